"""The families of models that are read and written: how each one's config.json becomes a description, and back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mpipipe.errors import ArgumentError, ConfigError
from mpipipe.models.gpt import GPT
from mpipipe.models.huggingface import names, without_effect
from mpipipe.models.huggingface.options import Options
from mpipipe.models.huggingface.rotary import read_rotary, rotary_options
from mpipipe.models.huggingface.windows import layer_window_options, read_layer_windows, read_one_window

TANH_GELU = ("gelu_new", "gelu_pytorch_tanh")  # two names of one function


@dataclass(frozen=True)
class Family:
    """One family.

    Attributes
    ----------
    name : `model_type` in config.json
    architecture : the class of a language model there
    prefix : of their names, which files of the bare decoder leave out
    table : the names of their tensors
    buffers : ends of names of arrays that are no parameters, which some files have
    read : fields of models.GPT from options
    write : options from a description; reading them back shows whether the family can express it (see `expressed`)
    """

    name: str
    architecture: str
    prefix: str
    table: tuple[names.Tensor, ...]
    buffers: tuple[str, ...]
    read: Callable[[Options], dict[str, Any]]
    write: Callable[[GPT], dict[str, Any]]


def _decoder(options: Options) -> dict[str, Any]:
    """Read what all families but GPT-2 have in common."""
    dim, heads = options.count("hidden_size"), options.count("num_attention_heads")
    positions = options.count("max_position_embeddings")
    rotary = read_rotary(options, positions)
    options.only("hidden_act", "silu", "swish")  # two names of one function
    return {
        "vocab": options.count("vocab_size"),
        "dim": dim,
        "layers": options.count("num_hidden_layers"),
        "heads": heads,
        "kv_heads": options.count("num_key_value_heads", heads),
        "head_dim": options.count("head_dim", dim // heads),
        "hidden": options.count("intermediate_size"),
        "seq": positions,
        "tied": options.flag("tie_word_embeddings", False),
        "eps": options.number("rms_norm_eps", 1e-6),
        "rope_base": rotary.base,
        "rope_scaling": rotary.scaling,
    }


def _decoder_options(model: GPT) -> dict[str, Any]:
    """Return what all families but GPT-2 write."""
    return {
        "vocab_size": model.vocab,
        "hidden_size": model.dim,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "intermediate_size": model.hidden,
        "max_position_embeddings": model.seq,
        "tie_word_embeddings": model.tied,
        "rms_norm_eps": model.eps,
        "hidden_act": "silu",
        **rotary_options(model.rope_base, model.rope_scaling),
    }


def _read_llama(options: Options) -> dict[str, Any]:
    bias, mlp_bias = options.flag("attention_bias", False), options.flag("mlp_bias", False)
    options.only("sliding_window", None)
    return {**_decoder(options), "qkv_bias": bias, "out_bias": bias, "feed_forward_bias": mlp_bias}


def _write_llama(model: GPT) -> dict[str, Any]:
    return {**_decoder_options(model), "attention_bias": model.qkv_bias, "mlp_bias": model.feed_forward_bias}


def _read_mistral(options: Options) -> dict[str, Any]:
    options.count("num_key_value_heads")  # no default is taken: the library's own is 8
    common = _decoder(options)
    return {**common, "windows": read_one_window(options, common["layers"], 4096)}


def _write_mistral(model: GPT) -> dict[str, Any]:
    return {**_decoder_options(model), "sliding_window": (model.windows or (None,))[0]}


def _read_qwen2(options: Options) -> dict[str, Any]:
    options.count("num_key_value_heads")  # no default is taken: the library's own is 32
    options.only("use_mrope", False, None)
    common = _decoder(options)
    if common["head_dim"] * common["heads"] != common["dim"]:
        raise options.error("head_dim", "hidden_size / num_attention_heads, which is what all libraries read")
    return {**common, "qkv_bias": True, "windows": read_layer_windows(options, common["layers"])}


def _write_qwen2(model: GPT) -> dict[str, Any]:
    return {**_decoder_options(model), **layer_window_options(model.windows)}


def _read_qwen3(options: Options) -> dict[str, Any]:
    options.count("num_key_value_heads")  # no default is taken: the library's own is 32
    options.count("head_dim")  # and 128
    bias, common = options.flag("attention_bias", False), _decoder(options)
    windows = read_layer_windows(options, common["layers"])
    return {**common, "qk_norm": True, "qkv_bias": bias, "out_bias": bias, "windows": windows}


def _write_qwen3(model: GPT) -> dict[str, Any]:
    return {**_write_qwen2(model), "attention_bias": model.qkv_bias}


def _read_gpt2(options: Options) -> dict[str, Any]:
    dim, positions = options.count("n_embd"), options.count("n_positions")
    options.only("activation_function", *TANH_GELU)
    options.only("scale_attn_weights", True)
    options.only("scale_attn_by_inverse_layer_idx", False)
    options.only("reorder_and_upcast_attn", False)
    return {
        "vocab": options.count("vocab_size"),
        "dim": dim,
        "layers": options.count("n_layer"),
        "heads": options.count("n_head"),
        "hidden": options.count("n_inner", 4 * dim),
        "seq": positions,
        "max_positions": positions,
        "tied": options.flag("tie_word_embeddings", True),
        "eps": options.number("layer_norm_epsilon", 1e-5),
        "norm": "layer",
        "positions": "learned",
        "qkv_bias": True,
        "out_bias": True,
        "feed_forward": "gelu",
        "feed_forward_bias": True,
    }


def _write_gpt2(model: GPT) -> dict[str, Any]:
    return {
        "vocab_size": model.vocab,
        "n_embd": model.dim,
        "n_layer": model.layers,
        "n_head": model.heads,
        "n_inner": model.hidden,
        "n_positions": model.max_positions,
        "tie_word_embeddings": model.tied,
        "layer_norm_epsilon": model.eps,
        "activation_function": TANH_GELU[0],
    }


_ROTARY_BUFFERS = (".rotary_emb.inv_freq",)
_MASKS = (".attn.bias", ".attn.masked_bias")
# In this order a model that several families can express is written as the first of them.
FAMILIES = {
    family.name: family
    for family in (
        Family("llama", "LlamaForCausalLM", "model.", names.LLAMA, _ROTARY_BUFFERS, _read_llama, _write_llama),
        Family("mistral", "MistralForCausalLM", "model.", names.LLAMA, _ROTARY_BUFFERS, _read_mistral, _write_mistral),
        Family("qwen2", "Qwen2ForCausalLM", "model.", names.LLAMA, _ROTARY_BUFFERS, _read_qwen2, _write_qwen2),
        Family("qwen3", "Qwen3ForCausalLM", "model.", names.LLAMA, _ROTARY_BUFFERS, _read_qwen3, _write_qwen3),
        Family("gpt2", "GPT2LMHeadModel", "transformer.", names.GPT2, _MASKS, _read_gpt2, _write_gpt2),
    )
}


def expressed(model: GPT, first: Family | None = None) -> tuple[Family, dict[str, Any]]:
    """Return the family that can express a model, and its options; `first` where that one can.

    A family can where its options, read again, describe the same model; but for `seq`, a number that no family has
    where positions are learned, and dropout, which belongs to a training.

    Raises ConfigError if none can.
    """
    for family in dict.fromkeys(([] if first is None else [first]) + list(FAMILIES.values())):
        try:
            options = family.write(model)
            again = GPT(**family.read(Options(options, Path("config.json"))))
        except (ArgumentError, AttributeError):  # the latter of a model that is no GPT
            continue
        if replace(again, seq=model.seq, dropout=model.dropout) == model:
            return family, options
    raise ConfigError(
        "no family of Hugging Face models here can express this model",
        found=repr(model),
        expected=f"a model as one of {', '.join(FAMILIES)} has it; docs/model-folders.md has a table",
        remedy="save it with --save-as mpipipe",
    )


def read_config(values: dict[str, Any], path: Path) -> tuple[Family, dict[str, Any]]:
    """Return the family of a config.json, and the fields of models.GPT that it describes.

    Raises ConfigError, which names the option, for an unknown family, an unknown option, and a value that cannot be
    used.
    """
    options = Options(values, path)
    name = options.take("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise options.error("model_type", " or ".join(FAMILIES), "is of a family that is not known")
    family = FAMILIES[name]
    options.only("architectures", [family.architecture], None)
    for key in ("quantization_config", "auto_map", "add_cross_attention", "is_encoder_decoder", "is_decoder",
                "tie_encoder_decoder", "cross_attention_hidden_size"):  # fmt: skip
        options.only(key, None, False)
    options.only("pruned_heads", {}, None)
    fields = family.read(options)
    options.ignore(without_effect.COMMON)
    if name == "gpt2":
        options.ignore(without_effect.GPT2)
    options.finish(f"{family.architecture}")
    return family, fields
