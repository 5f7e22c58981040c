"""Model folders written by hand as the families of Hugging Face have them, and their forward in plain numpy, float64.

Nothing here comes from the package: names, shapes and formulas are those of the families' own conventions, with halves
of a head turned against each other (`turned`), separate projections, and matrices of GPT-2 stored as (inputs, outputs).
"""

import json
from types import SimpleNamespace

import numpy as np
from safetensors.numpy import load_file, save_file

from support.reference_gpt import attended, gelu, normal
from support.reference_rope import frequencies

_DECODER = {
    "vocab_size": 48, "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "hidden_act": "silu", "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False, "rope_theta": 100.0, "torch_dtype": "float64",
}  # fmt: skip
CONFIGS = {
    "llama": {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **_DECODER},
    "mistral": {"model_type": "mistral", "architectures": ["MistralForCausalLM"], **_DECODER, "sliding_window": 5},
    "qwen2": {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], **_DECODER},
    "qwen3": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], **_DECODER, "head_dim": 6},
    "gpt2": {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 48, "n_embd": 16, "n_layer": 3,
        "n_head": 4, "n_positions": 64, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5,
        "torch_dtype": "float64",
    },
}  # fmt: skip


def tensors_of(config, seed=0):
    """Random tensors by name; gains and biases are far from 1 and 0, so that a wrong place is seen."""
    shapes = _gpt2_shapes(config) if config["model_type"] == "gpt2" else _decoder_shapes(config)
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape) * (0.5 if len(shape) == 1 else 0.3) + 0.1 for name, shape in shapes}


def _decoder_shapes(c):
    dim, hidden, head = c["hidden_size"], c["intermediate_size"], _head_dim(c)
    q, k = c["num_attention_heads"] * head, c["num_key_value_heads"] * head
    yield "model.embed_tokens.weight", (c["vocab_size"], dim)
    for i in range(c["num_hidden_layers"]):
        at = f"model.layers.{i}."
        for part, rows in (("q", q), ("k", k), ("v", k)):
            yield f"{at}self_attn.{part}_proj.weight", (rows, dim)
            if c["model_type"] == "qwen2" or c.get("attention_bias"):
                yield f"{at}self_attn.{part}_proj.bias", (rows,)
        yield f"{at}self_attn.o_proj.weight", (dim, q)
        if c.get("attention_bias"):
            yield f"{at}self_attn.o_proj.bias", (dim,)
        if c["model_type"] == "qwen3":
            yield f"{at}self_attn.q_norm.weight", (head,)
            yield f"{at}self_attn.k_norm.weight", (head,)
        for part, shape in (("gate", (hidden, dim)), ("up", (hidden, dim)), ("down", (dim, hidden))):
            yield f"{at}mlp.{part}_proj.weight", shape
            if c.get("mlp_bias"):
                yield f"{at}mlp.{part}_proj.bias", shape[:1]
        yield f"{at}input_layernorm.weight", (dim,)
        yield f"{at}post_attention_layernorm.weight", (dim,)
    yield "model.norm.weight", (dim,)
    if not c["tie_word_embeddings"]:
        yield "lm_head.weight", (c["vocab_size"], dim)


def _gpt2_shapes(c):
    dim, hidden = c["n_embd"], c.get("n_inner") or 4 * c["n_embd"]
    yield "transformer.wte.weight", (c["vocab_size"], dim)
    yield "transformer.wpe.weight", (c["n_positions"], dim)
    matrices = {"attn.c_attn": (dim, 3 * dim), "attn.c_proj": (dim, dim), "mlp.c_fc": (dim, hidden),
                "mlp.c_proj": (hidden, dim)}  # fmt: skip
    for i in range(c["n_layer"]):
        for name, shape in matrices.items():
            yield f"transformer.h.{i}.{name}.weight", shape
            yield f"transformer.h.{i}.{name}.bias", shape[1:]
        for name in ("ln_1", "ln_2"):
            yield f"transformer.h.{i}.{name}.weight", (dim,)
            yield f"transformer.h.{i}.{name}.bias", (dim,)
    yield "transformer.ln_f.weight", (dim,)
    yield "transformer.ln_f.bias", (dim,)
    if not c.get("tie_word_embeddings", True):
        yield "lm_head.weight", (c["vocab_size"], dim)


def write_folder(path, config, tensors, files=1):
    """Write a folder; with several files their tensors are dealt out in turn, and there is an index."""
    path.mkdir(parents=True, exist_ok=True)
    names = sorted(tensors)
    parts = [names[first::files] for first in range(files)]
    places = {}
    for number, part in enumerate(parts):
        name = "model.safetensors" if files == 1 else f"model-{number + 1:05d}-of-{files:05d}.safetensors"
        save_file({key: np.ascontiguousarray(tensors[key]) for key in part}, path / name, {"format": "pt"})
        places.update(dict.fromkeys(part, name))
    if files > 1:
        total = sum(tensor.nbytes for tensor in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
    (path / "config.json").write_text(json.dumps(config, indent=1))
    return path


def logits(config, tensors, ids):
    """The forward of a family, float64 (batch, seq, vocab)."""
    return (_gpt2 if config["model_type"] == "gpt2" else _decoder)(config, tensors, ids)


def _decoder(c, t, ids):
    x = t["model.embed_tokens.weight"][ids]
    angles, amplitude = _angles(c, np.arange(ids.shape[1]))
    for i in range(c["num_hidden_layers"]):
        at = f"model.layers.{i}."

        def linear(x, name, at=at):
            return x @ t[f"{at}{name}.weight"].T + t.get(f"{at}{name}.bias", 0)

        y = _rms(x, t[f"{at}input_layernorm.weight"], c)
        q, k, v = (_heads(linear(y, f"self_attn.{part}_proj"), _head_dim(c)) for part in "qkv")
        if f"{at}self_attn.q_norm.weight" in t:
            q, k = _rms(q, t[f"{at}self_attn.q_norm.weight"], c), _rms(k, t[f"{at}self_attn.k_norm.weight"], c)
        q, k = turned(q, angles) * amplitude, turned(k, angles) * amplitude
        x = x + linear(attended(q, k, v, _window(c, i)), "self_attn.o_proj")
        y = _rms(x, t[f"{at}post_attention_layernorm.weight"], c)
        gate = linear(y, "mlp.gate_proj")
        x = x + linear(gate / (1 + np.exp(-gate)) * linear(y, "mlp.up_proj"), "mlp.down_proj")
    head = t["model.embed_tokens.weight"] if c["tie_word_embeddings"] else t["lm_head.weight"]
    return _rms(x, t["model.norm.weight"], c) @ head.T


def _gpt2(c, t, ids):
    x = t["transformer.wte.weight"][ids] + t["transformer.wpe.weight"][: ids.shape[1]]
    for i in range(c["n_layer"]):
        at = f"transformer.h.{i}."

        def conv(x, name, at=at):
            return x @ t[f"{at}{name}.weight"] + t[f"{at}{name}.bias"]

        y = conv(_layer_norm(x, t, f"{at}ln_1", c), "attn.c_attn")
        q, k, v = (_heads(part, c["n_embd"] // c["n_head"]) for part in np.split(y, 3, -1))
        x = x + conv(attended(q, k, v, None), "attn.c_proj")
        y = conv(_layer_norm(x, t, f"{at}ln_2", c), "mlp.c_fc")
        x = x + conv(gelu(y), "mlp.c_proj")
    head = t["transformer.wte.weight"] if c.get("tie_word_embeddings", True) else t["lm_head.weight"]
    return _layer_norm(x, t, "transformer.ln_f", c) @ head.T


def _head_dim(c):
    return c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]


def _rms(x, gain, c):
    return gain * normal(x, c["rms_norm_eps"])


def _layer_norm(x, t, name, c):
    apart = x - x.mean(-1, keepdims=True)
    return t[f"{name}.weight"] * normal(apart, c["layer_norm_epsilon"]) + t[f"{name}.bias"]


def _heads(x, size):
    return x.reshape(*x.shape[:2], -1, size)


def turned(x, angles):
    """Rotate the pairs (j, j + size / 2) of each head."""
    first, second = np.split(x, 2, -1)
    cos, sin = np.cos(angles)[:, None, :], np.sin(angles)[:, None, :]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def _window(c, layer):
    if c["model_type"] == "mistral":
        return c["sliding_window"]
    if "layer_types" in c:
        return c["sliding_window"] if c["layer_types"][layer] == "sliding_attention" else None
    return c["sliding_window"] if c.get("use_sliding_window") and layer >= c["max_window_layers"] else None


def _angles(c, positions):
    """Angles (seq, head / 2), and the factor on cosine and sine."""
    size, scaling = _head_dim(c), c.get("rope_parameters") or c.get("rope_scaling") or {}
    base = scaling.get("rope_theta") or c.get("rope_theta", 10000.0)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return positions[:, None] * frequencies(size, base)[0], 1.0
    amplitude = scaling.get("attention_factor")
    named = SimpleNamespace(
        **{key: scaling.get(key) for key in ("factor", "low_freq_factor", "high_freq_factor")},
        kind=kind,
        original_positions=scaling.get("original_max_position_embeddings", c["max_position_embeddings"]),
        beta_fast=scaling.get("beta_fast") or 32,
        beta_slow=scaling.get("beta_slow") or 1,
        attention_factor=amplitude,
    )
    used, amplitude = frequencies(size, base, named)
    return positions[:, None] * used, amplitude


def tensors_in(folder):
    """All tensors in the files of a folder."""
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}
