"""Options of config.json that change nothing in what a model computes, so they are passed over, and kept for writing.

They say how text is generated, what a model was started with, what is dropped at random in a training there, how labels
are called, or with which version a file was written.
"""

from __future__ import annotations

# of text: which ids are special, and how tokens are chosen
GENERATION = """
    bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id max_length min_length do_sample
    early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p typical_p repetition_penalty
    length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores
    return_dict_in_generate forced_bos_token_id forced_eos_token_id remove_invalid_values suppress_tokens
    begin_suppress_tokens exponential_decay_length_penalty prefix tokenizer_class task_specific_params use_cache
    output_attentions output_hidden_states return_dict output_past
""".split()

# of the library: where a model came from, and how its memory is used
LIBRARY = """
    _name_or_path transformers_version torch_dtype dtype torchscript use_bfloat16 tf_legacy_loss
    _attn_implementation_autoset gradient_checkpointing chunk_size_feed_forward pretraining_tp is_llama_config
    unsloth_fixed unsloth_version transformers.js_config
""".split()

# of heads that a language model has not, and of training: random starts and dropout
OTHERS = """
    initializer_range attention_dropout finetuning_task id2label label2id num_labels problem_type
""".split()

COMMON = (*GENERATION, *LIBRARY, *OTHERS)

GPT2 = """
    n_ctx resid_pdrop embd_pdrop attn_pdrop summary_type summary_use_proj summary_activation summary_proj_to_labels
    summary_first_dropout predict_special_tokens n_special
""".split()

# what is carried from a folder that was read into one that is written
CARRIED = ("bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "attention_dropout", "use_cache",
           "task_specific_params", "resid_pdrop", "embd_pdrop", "attn_pdrop")  # fmt: skip
