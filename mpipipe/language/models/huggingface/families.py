"""The families of models: how each config.json becomes a description, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from mpipipe import nn
from mpipipe.errors import ArgumentError, ConfigError
from mpipipe.language.models.gpt import GPT
from mpipipe.language.models.huggingface import names
from mpipipe.language.models.huggingface.options import REQUIRED, Options
from mpipipe.options import Values

TANH_GELU = ("gelu_new", "gelu_pytorch_tanh")  # two names of one function


@dataclass(frozen=True)
class Family:
    """One family; `name` and `architecture` are `model_type` and class in config.json.

    prefix : prefix of their names, which files of the bare decoder leave out
    table : names of their tensors
    buffers : ends of names of arrays that are no parameters, which some files have
    read : fields of models.GPT from options; see `expressed` for the way back
    """

    name: str
    architecture: str
    read: Callable[[Options], Values]
    prefix: str = "model."
    table: tuple[names.Tensor, ...] = names.LLAMA
    buffers: tuple[str, ...] = (".rotary_emb.inv_freq",)


# what all families but GPT-2 call fields of models.GPT, and what GPT-2 calls them
SIZES = {
    "vocab_size": "vocab",
    "hidden_size": "dim",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "head_dim": "head_dim",
    "intermediate_size": "hidden",
    "max_position_embeddings": "seq_len",
    "tie_word_embeddings": "tied",
    "rms_norm_eps": "eps",
}
GPT2_SIZES = {
    "vocab_size": "vocab",
    "n_embd": "dim",
    "n_layer": "layers",
    "n_head": "heads",
    "n_inner": "hidden",
    "n_positions": "max_positions",
    "tie_word_embeddings": "tied",
    "layer_norm_epsilon": "eps",
}


def _read(options: Options, table: Mapping[str, str], **defaults: object) -> Values:
    """Read the fields in a table of names; `defaults` has those that may be missing."""
    readers: dict[str, Callable[..., Any]] = {"tied": options.flag, "eps": options.number}
    fields: Values = {}
    for theirs, ours in table.items():
        fields[ours] = readers.get(ours, options.count)(theirs, defaults.get(ours, REQUIRED))
    return fields


def _decoder(options: Options, *required: str) -> Values:
    """Read what all families but GPT-2 share; `required` fields have no default here."""
    heads = options.count("num_attention_heads")
    head_dim = options.count("hidden_size") // heads
    defaults = {"kv_heads": heads, "head_dim": head_dim, "tied": False, "eps": 1e-6}
    for name in required:
        del defaults[name]
    base, scaling = read_rotary(options, options.count("max_position_embeddings"))
    options.only("hidden_act", "silu", "swish")  # two names of one function
    return _read(options, SIZES, **defaults) | {"rope_base": base, "rope_scaling": scaling}


def _options_of(model: GPT) -> Values:
    """Return a model in the options of all families; each reads its own."""
    scaling: Any = model.rope_scaling
    if scaling is not None:
        numbers = {}
        for name, value in asdict(scaling).items():
            if value is not None:
                numbers[SCALING_NAMES.get(name, name)] = value
        scaling = numbers
    options = {theirs: getattr(model, ours) for theirs, ours in (SIZES | GPT2_SIZES).items()}
    return {
        **options,
        **layer_window_options(model.windows),
        "hidden_act": "silu",
        "activation_function": TANH_GELU[0],
        THETA: model.rope_base,
        SCALING: scaling,
        "attention_bias": model.qkv_bias,
        "mlp_bias": model.feed_forward_bias,
    }


def _read_llama(options: Options) -> Values:
    bias = options.flag("attention_bias", False)
    mlp_bias = options.flag("mlp_bias", False)
    options.only("sliding_window", None)
    return {**_decoder(options), "qkv_bias": bias, "out_bias": bias, "feed_forward_bias": mlp_bias}


def _read_mistral(options: Options) -> Values:
    common = _decoder(options, "kv_heads")
    return {**common, "windows": (_window(options),) * common["layers"]}


def _read_qwen2(options: Options) -> Values:
    options.only("use_mrope", False, None)
    common = _decoder(options, "kv_heads")
    if common["head_dim"] * common["heads"] != common["dim"]:
        raise options.error(
            "head_dim", "hidden_size / num_attention_heads, which is what all libraries read"
        )
    return {**common, "qkv_bias": True, "windows": read_layer_windows(options, common["layers"])}


def _read_qwen3(options: Options) -> Values:
    bias = options.flag("attention_bias", False)
    common = _decoder(options, "kv_heads", "head_dim")
    windows = read_layer_windows(options, common["layers"])
    return {**common, "qk_norm": True, "qkv_bias": bias, "out_bias": bias, "windows": windows}


def _read_gpt2(options: Options) -> Values:
    options.only("activation_function", *TANH_GELU)
    options.only("scale_attn_weights", True)
    options.only("scale_attn_by_inverse_layer_idx", False)
    options.only("reorder_and_upcast_attn", False)
    hidden = 4 * options.count("n_embd")
    fields = _read(options, GPT2_SIZES, hidden=hidden, tied=True, eps=1e-5)
    return {
        **fields,
        "seq_len": fields["max_positions"],
        "norm": "layer",
        "positions": "learned",
        "feed_forward": "gelu",
        "qkv_bias": True,
        "out_bias": True,
        "feed_forward_bias": True,
    }


# In this order a model that several families can express is written as the first of them.
_ALL = (
    Family("llama", "LlamaForCausalLM", _read_llama),
    Family("mistral", "MistralForCausalLM", _read_mistral),
    Family("qwen2", "Qwen2ForCausalLM", _read_qwen2),
    Family("qwen3", "Qwen3ForCausalLM", _read_qwen3),
    Family(
        "gpt2",
        "GPT2LMHeadModel",
        _read_gpt2,
        prefix="transformer.",
        table=names.GPT2,
        buffers=(".attn.bias", ".attn.masked_bias"),
    ),
)
FAMILIES = {family.name: family for family in _ALL}


def expressed(model: GPT, first: Family | None = None) -> tuple[Family, Values]:
    """Return the family that can express a model, and its options; `first` where that one can.

    A family can where its options, read again, describe the same model; but for `seq`, a number
    that no family has where positions are learned, and dropout and slices of the head, which belong
    to a training.
    """
    families = list(FAMILIES.values())
    if first is not None:
        families.insert(0, first)
    of_training: Values = {"dropout": model.dropout, "head_slices": model.head_slices}
    for family in families:
        try:
            everything = _options_of(model)
            options = Options(everything, Path("config.json"))
            again = GPT(**family.read(options))
        except (ArgumentError, AttributeError):  # the latter of a model that is no GPT
            continue
        if replace(again, seq_len=model.seq_len, **of_training) == model:
            for name in options.left:
                del everything[name]
            return family, everything
    raise ConfigError(
        "no family of Hugging Face models here can express this model",
        found=repr(model),
        expected=f"a model as one of {', '.join(FAMILIES)} has it; docs/model-folders.md has a "
        "table",
        remedy="keep the weights that a training leaves",
    )


def read_config(values: dict[str, object], path: Path) -> tuple[Family, Values]:
    """Return the family of a config.json, and the fields of models.GPT."""
    options = Options(values, path)
    name = options.take("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise options.error("model_type", " or ".join(FAMILIES), "is of a family that is not known")
    family = FAMILIES[name]
    options.only("architectures", [family.architecture], None)
    for key in (
        "quantization_config",
        "auto_map",
        "add_cross_attention",
        "is_encoder_decoder",
        "is_decoder",
        "tie_encoder_decoder",
        "cross_attention_hidden_size",
    ):
        options.only(key, None, False)
    options.only("pruned_heads", {}, None)
    fields = family.read(options)
    options.ignore(COMMON)
    if name == "gpt2":
        options.ignore(GPT2)
    options.finish(family.architecture)
    return family, fields


# -- Rotary positions in config.json: the base and the scaling, in the old form and the new one ----
#
#     old    "rope_theta": 10000.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}
#     new    "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
#
# In the old form "type" may stand for "rope_type". Both are read. The old one is written, which
# transformers 5 reads as well; earlier versions know no other.


SCALING = "rope_scaling"
PARAMETERS = "rope_parameters"
THETA = "rope_theta"
ORIGINAL = "original_max_position_embeddings"
BASE = 10000.0  # default in all families
# Other names than those of the fields of a scaling.
SCALING_NAMES = {"original_positions": ORIGINAL, "kind": "rope_type"}


def read_rotary(options: Options, positions: int) -> tuple[float, nn.RopeScaling | None]:
    """Return base and scaling; `positions` is max_position_embeddings. Raises ConfigError."""
    options.only("partial_rotary_factor", None, 1.0, 1)
    options.only("rope_interleaved", False, None)
    base = options.number(THETA, None, above=1.0)
    old = _object(options, SCALING)
    new = _object(options, PARAMETERS)
    if old and new and old != new:
        raise options.error(
            SCALING, f"that, or {PARAMETERS}, or the same in both", "contradicts another one"
        )
    inner = Options(old or new, options.path, SCALING if old else PARAMETERS)
    inside = inner.number(THETA, None, above=1.0)
    if base is not None and inside not in (None, base):
        raise inner.error(THETA, f"{base}, the rope_theta beside it", "contradicts another one")
    inner.only("partial_rotary_factor", None, 1.0, 1)
    return base or inside or BASE, _scaling(inner, positions)


def _object(options: Options, key: str) -> Values:
    """Return an object, which is empty where it is null or missing."""
    value = options.take(key)
    if not isinstance(value, (dict, type(None))):
        raise options.error(key, "an object, or null")
    return value or {}


def _scaling(options: Options, positions: int) -> nn.RopeScaling | None:
    """Read a scaling: its numbers are the fields of its class."""
    types = [options.take(name) for name in ("rope_type", "type")]
    kind = types[0] or types[1] or "default"
    known = ("default", *nn.ROPE_SCALINGS)
    if kind not in known:
        name = "type"
        if types[0]:
            name = "rope_type"
        raise options.error(name, " or ".join(known), "has a value that is not supported")
    scaling = None
    if kind != "default":
        numbers: Values = {}
        made: Any = nn.ROPE_SCALINGS[kind]
        for entry in fields(made):
            if entry.name == "original_positions":
                numbers[entry.name] = options.count(ORIGINAL, positions)
            elif entry.init:
                default = REQUIRED if entry.default is MISSING else entry.default
                numbers[entry.name] = options.number(entry.name, default)
        if kind == "yarn":
            options.only("truncate", True, None)
            options.only("mscale", None)
            options.only("mscale_all_dim", None)
        try:
            scaling = made(**numbers)
        except ArgumentError as error:
            raise ConfigError(
                f"{options.inside} of a model folder: {error.message}",
                found=f"{error.found} in {options.path}",
                expected=error.expected,
            ) from error
    options.finish(f"rotary positions of the kind {kind}")
    return scaling


# -- Which layers have a sliding window, and how wide it is: from config.json, and back ------------
#
# A window of w positions ends with the query's own, in their convention as in ours.


Windows = tuple[int | None, ...] | None
# Entries of layer_types, and if they slide.
KINDS = {"sliding_attention": True, "full_attention": False}


def _window(options: Options) -> int | None:
    """Read `sliding_window`; null says that there is none."""
    if "sliding_window" in options.values:
        return options.count("sliding_window", None)
    return 4096


def read_layer_windows(options: Options, layers: int) -> tuple[int | None, ...]:
    """Read windows by layer, from `layer_types` or `max_window_layers`."""
    window = _window(options)
    if not options.flag("use_sliding_window", False):
        window = None
    first = options.count("max_window_layers", 28, least=0)
    slides = [layer >= first for layer in range(layers)]
    types = options.take("layer_types")
    if types is not None:
        try:
            slides = [KINDS[kind] for kind in types]
        except (KeyError, TypeError):
            slides = []
        if not isinstance(types, list) or len(slides) != layers:
            raise options.error("layer_types", f"a list of {layers} of {' and '.join(KINDS)}")
        if any(slides) and window is None:
            raise options.error(
                "layer_types", "full_attention alone, where use_sliding_window is false"
            )
    return tuple(window if slide else None for slide in slides)


def layer_window_options(windows: Windows) -> Values:
    """Return the options that `read_layer_windows` reads."""
    if windows is None:
        return {"use_sliding_window": False, "sliding_window": None}
    width = next(filter(None, windows))
    names = {slides: name for name, slides in KINDS.items()}
    return {
        "use_sliding_window": True,
        "sliding_window": width,
        "max_window_layers": windows.index(width),
        "layer_types": [names[width is not None] for width in windows],
    }


# -- Options of config.json without effect on the result, passed over and kept for writing
#
# They say how text is generated, what a model was started with, what is dropped at random in a
# training there, how labels are called, or with which version a file was written.


# of text: which ids are special, and how tokens are chosen
GENERATION = """
    bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id max_length
    min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature
    top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores
    return_dict_in_generate forced_bos_token_id forced_eos_token_id remove_invalid_values
    suppress_tokens begin_suppress_tokens exponential_decay_length_penalty prefix tokenizer_class
    task_specific_params use_cache output_attentions output_hidden_states return_dict output_past
""".split()

# of the library: where a model came from, and how its memory is used
LIBRARY = """
    _name_or_path transformers_version torch_dtype dtype torchscript use_bfloat16 tf_legacy_loss
    _attn_implementation_autoset gradient_checkpointing chunk_size_feed_forward pretraining_tp
    is_llama_config unsloth_fixed unsloth_version transformers.js_config
""".split()

# of heads that a language model has not, and of training: random starts and dropout
OTHERS = """
    initializer_range attention_dropout finetuning_task id2label label2id num_labels problem_type
""".split()

COMMON = (*GENERATION, *LIBRARY, *OTHERS)

GPT2 = """
    n_ctx resid_pdrop embd_pdrop attn_pdrop summary_type summary_use_proj summary_activation
    summary_proj_to_labels summary_first_dropout predict_special_tokens n_special
""".split()

# what is carried from a folder that was read into one that is written
CARRIED = (
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "initializer_range",
    "attention_dropout",
    "use_cache",
    "task_specific_params",
    "resid_pdrop",
    "embd_pdrop",
    "attn_pdrop",
)
