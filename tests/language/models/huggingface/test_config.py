"""config.json of known models is read, whatever its age; what is not known is refused by name, and never guessed."""

from pathlib import Path

import pytest
from support import huggingface_reference as theirs

from mpipipe import nn
from mpipipe.attention import Local
from mpipipe.errors import ArgumentError, ConfigError
from mpipipe.language.models import GPT
from mpipipe.language.models.huggingface.families import FAMILIES, expressed, read_config
from mpipipe.language.models.huggingface.options import Options

PLACE = Path("folder/config.json")
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "hidden_act": "silu",
    "initializer_range": 0.02, "model_type": "llama", "pretraining_tp": 1, "use_cache": True,
    "tie_word_embeddings": False, "rms_norm_eps": 1e-05, "torch_dtype": "bfloat16",
}  # fmt: skip
QWEN = {
    "attention_dropout": 0.0, "hidden_act": "silu", "initializer_range": 0.02, "max_window_layers": 28,
    "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "use_cache": True, "use_sliding_window": False,
}  # fmt: skip
# the options of published models, and what they mean
PUBLISHED = {
    "Llama 3.2, 1B": (
        {
            **LLAMA, "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "head_dim": 64,
            "hidden_size": 2048, "intermediate_size": 8192, "max_position_embeddings": 131072, "mlp_bias": False,
            "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8,
            "rope_scaling": {
                "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192, "rope_type": "llama3",
            },
            "rope_theta": 500000.0, "tie_word_embeddings": True, "transformers_version": "4.45.0.dev0",
            "vocab_size": 128256,
        },
        dict(
            vocab=128256, dim=2048, layers=16, heads=32, kv_heads=8, hidden=8192, seq_len=131072, eps=1e-5, tied=True,
            rope_base=500000.0, rope_scaling=nn.Llama3Scaling(32.0, 1.0, 4.0, 8192),
        ),
        1_235_814_400,
    ),
    "Mistral, 7B": (
        {
            "architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
            "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
            "max_position_embeddings": 32768, "model_type": "mistral", "num_attention_heads": 32,
            "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
            "sliding_window": 4096, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True,
            "transformers_version": "4.34.0.dev0", "vocab_size": 32000,
        },
        dict(
            vocab=32000, dim=4096, layers=32, heads=32, kv_heads=8, hidden=14336, seq_len=32768, eps=1e-5,
            windows=(4096,) * 32,
        ),
        7_241_732_096,
    ),
    "Qwen2, 7B": (
        {
            **QWEN, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "bos_token_id": 151643,
            "eos_token_id": 151645, "hidden_size": 3584, "intermediate_size": 18944,
            "max_position_embeddings": 32768, "num_attention_heads": 28, "num_hidden_layers": 28,
            "num_key_value_heads": 4, "sliding_window": 131072, "vocab_size": 152064,
        },
        dict(
            vocab=152064, dim=3584, layers=28, heads=28, kv_heads=4, hidden=18944, seq_len=32768, qkv_bias=True,
            rope_base=1e6,
        ),
        7_615_616_512,
    ),
    "Qwen3, 0.6B": (
        {
            **QWEN, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False,
            "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_size": 1024,
            "intermediate_size": 3072, "max_position_embeddings": 40960, "num_attention_heads": 16,
            "num_hidden_layers": 28, "num_key_value_heads": 8, "rope_scaling": None, "sliding_window": None,
            "tie_word_embeddings": True, "vocab_size": 151936,
        },
        dict(
            vocab=151936, dim=1024, layers=28, heads=16, kv_heads=8, head_dim=128, hidden=3072, seq_len=40960,
            qk_norm=True, tied=True, rope_base=1e6,
        ),
        596_049_920,
    ),
    "GPT-2": (
        {
            "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1,
            "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02,
            "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12,
            "n_layer": 12, "n_positions": 1024, "resid_pdrop": 0.1, "summary_activation": None,
            "summary_first_dropout": 0.1, "summary_proj_to_labels": True, "summary_type": "cls_index",
            "summary_use_proj": True, "vocab_size": 50257,
            "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
        },
        dict(
            vocab=50257, dim=768, layers=12, heads=12, hidden=3072, seq_len=1024, max_positions=1024, tied=True,
            eps=1e-5, norm="layer", positions="learned", qkv_bias=True, out_bias=True, feed_forward="gelu",
            feed_forward_bias=True,
        ),
        124_439_808,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_are_understood(name):
    """Their numbers of parameters are those that their files hold; they are counted from the sizes alone."""
    config, sizes, parameters = PUBLISHED[name]
    family, fields = read_config(config, PLACE)
    assert (family.name, GPT(**fields)) == (config["model_type"], GPT(**sizes))
    assert GPT(**fields).parameters == parameters


@pytest.mark.parametrize("family", theirs.CONFIGS)
@pytest.mark.parametrize("key", ["logits_scaling", "attention_multiplier", "residual_scale", "new_option"])
def test_an_unknown_option_is_refused_by_name(family, key):
    for value in (1, None, False):
        with pytest.raises(ConfigError, match=f"option {key} of a model folder is not known") as caught:
            read_config({**theirs.CONFIGS[family], key: value}, PLACE)
        assert f"{key} = {value!r} in {PLACE}" in str(caught.value)


CHANGES = {
    "llama": [
        ("hidden_act", "gelu"), ("partial_rotary_factor", 0.5), ("rope_interleaved", True),
        ("rope_scaling", {"type": "dynamic", "factor": 2.0}), ("rope_parameters", []),
        ("rope_scaling", {"rope_type": "linear", "factor": 2.0, "beta": 1}), ("rope_scaling", {"rope_type": "linear"}),
        ("rope_scaling", {"rope_type": "linear", "factor": 0.5}), ("rope_scaling", {"rope_type": ["linear"]}),
        ("rope_scaling", {"rope_type": "yarn", "factor": 2.0, "truncate": False}),
        ("rope_scaling", {"rope_type": "yarn", "factor": 2.0, "mscale": 0.7, "mscale_all_dim": 1.4}),
        ("rope_scaling", {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0}),
        ("rope_scaling", {"rope_type": "default", "rope_theta": 5.0}), ("rope_theta", "10000"), ("rope_theta", 0.5),
        ("rope_theta", float("nan")), ("rope_parameters", {"full_attention": {"rope_theta": 5.0}}),
        ("attention_bias", "yes"), ("mlp_bias", 1), ("sliding_window", 7), ("quantization_config", {"bits": 4}),
        ("auto_map", {"AutoModel": "own.py"}), ("architectures", ["LlamaForSequenceClassification"]),
        ("architectures", "LlamaForCausalLM"), ("model_type", "mixtral"), ("model_type", None),
        ("hidden_size", True), ("hidden_size", 0), ("hidden_size", 10**30), ("rms_norm_eps", "1e-5"),
        ("rms_norm_eps", float("inf")), ("tie_word_embeddings", None), ("num_key_value_heads", 3),
        ("head_dim", 7), ("is_encoder_decoder", True), ("pruned_heads", {"0": [1]}),
    ],
    "mistral": [("sliding_window", 0), ("sliding_window", "5"), ("layer_types", ["full_attention"] * 3)],
    "qwen2": [
        ("layer_types", ["sliding_attention"] * 3), ("layer_types", ["full_attention"] * 2),
        ("layer_types", [["full_attention"]] * 3), ("layer_types", "full_attention"), ("use_mrope", True),
        ("max_window_layers", -1), ("use_sliding_window", None), ("head_dim", 10), ("attention_bias", True),
    ],
    "qwen3": [("layer_types", ["chunked_attention"] * 3), ("head_dim", 9)],
    "gpt2": [
        ("activation_function", "gelu"), ("activation_function", "relu"), ("scale_attn_weights", False),
        ("scale_attn_by_inverse_layer_idx", True), ("reorder_and_upcast_attn", True), ("add_cross_attention", True),
        ("n_inner", 0), ("rope_theta", 10000.0), ("n_positions", None),
    ],
}  # fmt: skip
CHANGED = [(family, key, value) for family, changes in CHANGES.items() for key, value in changes]


@pytest.mark.parametrize(("family", "key", "value"), CHANGED, ids=[f"{f}-{k}={v}"[:50] for f, k, v in CHANGED])
def test_a_value_that_would_change_the_result_is_refused_by_the_name_of_its_option(family, key, value):
    config = {**theirs.CONFIGS[family], key: value}
    with pytest.raises(ArgumentError) as caught:
        GPT(**read_config(config, PLACE)[1]).build(Local())
    words = {"num_key_value_heads": "kv_heads", "rope_parameters": "rope"}
    assert words.get(key, key.split("_theta")[0]) in str(caught.value)


NOT_GUESSED = {
    "llama": ("vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "max_position_embeddings",
              "num_attention_heads"),
    "mistral": ("num_key_value_heads",), "qwen2": ("num_key_value_heads",),
    "qwen3": ("num_key_value_heads", "head_dim"), "gpt2": ("n_embd", "n_positions"),
}  # fmt: skip


@pytest.mark.parametrize(("family", "key"), [(family, key) for family, keys in NOT_GUESSED.items() for key in keys])
def test_a_size_that_is_missing_is_not_guessed(family, key):
    config = {name: value for name, value in theirs.CONFIGS[family].items() if name != key}
    with pytest.raises(ConfigError, match=f"{key} of a model folder is missing"):
        read_config(config, PLACE)


def test_two_scalings_that_contradict_each_other_are_refused():
    config = {**theirs.CONFIGS["llama"], "rope_scaling": {"type": "linear", "factor": 2.0}}
    read_config(config, PLACE)
    with pytest.raises(ConfigError, match="rope_scaling of a model folder contradicts"):
        read_config({**config, "rope_parameters": {"rope_type": "default"}}, PLACE)


MODELS = [
    GPT(),
    GPT(eps=1e-5, rope_scaling=nn.LinearScaling(2.0), tied=True, head_dim=6),
    GPT(rope_scaling=nn.YarnScaling(4.0, 64, beta_fast=16.0, attention_factor=1.5)),
    GPT(rope_scaling=nn.YarnScaling(4.0, 64)),
    GPT(rope_scaling=nn.Llama3Scaling(4.0, 1.0, 4.0, 64)),
    GPT(qkv_bias=True, out_bias=True, feed_forward_bias=True),
    GPT(windows=(8,) * 4, kv_heads=2),
    GPT(qkv_bias=True, windows=(None, None, 8, 8)),
    GPT(qkv_bias=True, windows=(8, None, 8, None)),
    GPT(qk_norm=True, head_dim=10, windows=(8, None, 8, 8)),
    GPT(qk_norm=True, qkv_bias=True, out_bias=True),
    GPT(norm="layer", eps=1e-5, positions="learned", max_positions=300, qkv_bias=True, out_bias=True, tied=True,
        feed_forward="gelu", feed_forward_bias=True, hidden=70),
]  # fmt: skip


@pytest.mark.parametrize(("model", "family"), list(zip(MODELS, [
    "llama", "llama", "llama", "llama", "llama", "llama", "mistral", "qwen2", "qwen2", "qwen3", "qwen3", "gpt2",
])))  # fmt: skip
def test_a_description_is_expressed_and_read_back(model, family):
    found, options = expressed(model)
    again = GPT(**FAMILIES[found.name].read(Options(options, PLACE)))
    assert found.name == family
    assert {**vars(again), "seq_len": model.seq_len} == vars(model)


@pytest.mark.parametrize(
    "model",
    [
        GPT(windows=(8, None, 8, 8)),
        GPT(windows=(8, 9, 9, 9), qkv_bias=True),
        GPT(out_bias=True),
        GPT(embedding_scale=2.0),
        GPT(norm="layer"),
        GPT(feed_forward="gelu"),
        GPT(qk_norm=True, feed_forward_bias=True),
        GPT(positions="learned"),
        GPT(windows=(8,) * 4, qkv_bias=True, qk_norm=True, feed_forward_bias=True),
    ],
)
def test_a_model_that_no_family_has_is_refused(model):
    with pytest.raises(ConfigError, match="no family of Hugging Face models here can express"):
        expressed(model)


def test_the_family_that_a_model_comes_from_is_kept():
    assert expressed(GPT(), FAMILIES["mistral"])[0].name == "mistral"
    assert expressed(GPT(qk_norm=True), FAMILIES["mistral"])[0].name == "qwen3"
