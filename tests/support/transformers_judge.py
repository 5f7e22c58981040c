"""Tiny random models of the library `transformers`, which the tests hold the package against.

The library computes norms, rotary positions and softmax in float32, whatever the dtype of a model is. For comparisons
in float64, `in_float64` lets the same code see float64 where it says float32: the name `torch` in its modules stands
for the library itself with these two names changed. Nothing else of the judge is touched.
"""

import importlib
from contextlib import contextmanager

import numpy as np

_DECODER = dict(
    vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=320, bos_token_id=None, eos_token_id=None, pad_token_id=None,
)  # fmt: skip
_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
# name -> (config class, model class, options)
FAMILIES = {
    "Llama 2": ("Llama", "LlamaForCausalLM", {**_DECODER, "num_key_value_heads": 4, "rms_norm_eps": 1e-5}),
    "Llama 3": ("Llama", "LlamaForCausalLM", {**_DECODER, "rope_parameters": _LLAMA3, "rms_norm_eps": 1e-5}),
    "SmolLM": (
        "Llama", "LlamaForCausalLM",
        {**_DECODER, "hidden_size": 36, "num_attention_heads": 9, "num_key_value_heads": 3,
         "tie_word_embeddings": True},
    ),
    "Mistral": ("Mistral", "MistralForCausalLM", {**_DECODER, "sliding_window": 24}),
    "Qwen2": (
        "Qwen2", "Qwen2ForCausalLM", {**_DECODER, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    ),
    "Qwen3": ("Qwen3", "Qwen3ForCausalLM", {**_DECODER, "head_dim": 12, "tie_word_embeddings": True}),
    "GPT-2": (
        "GPT2", "GPT2LMHeadModel",
        dict(vocab_size=97, n_embd=32, n_layer=3, n_head=4, n_positions=320, bos_token_id=None, eos_token_id=None),
    ),
}  # fmt: skip


def make(family, dtype="float32", seed=0, size=0.15, **options):
    """A random model in its evaluation mode, with matrices of this size.

    Gains and biases are far from 1 and 0, so that a wrong place is seen.
    """
    import torch
    import transformers

    config_name, model_name, sizes = FAMILIES[family]
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    config = getattr(transformers, f"{config_name}Config")(**{**sizes, **options})
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        model = getattr(transformers, model_name)._from_config(config, attn_implementation="eager")
    finally:
        torch.set_default_dtype(before)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = size if parameter.ndim == 2 else 0.3
            gain = name.endswith("weight") and ("norm" in name.split(".")[-2] or ".ln_" in name)
            parameter.copy_(gain + scale * torch.randn(parameter.shape, dtype=torch.float64))
    return model.eval()


class _Wider:
    """The library torch, whose float32 is float64."""

    def __init__(self, torch):
        self._torch = torch
        self.float32 = self.float = torch.float64

    def __getattr__(self, name):
        return getattr(self._torch, name)


@contextmanager
def in_float64(family):
    """Within, the modules that compute this family see float64 where they say float32."""
    import torch

    name = FAMILIES[family][0].lower()
    modules = [
        importlib.import_module(f"transformers.models.{name}.modeling_{name}"),
        importlib.import_module("transformers.modeling_rope_utils"),
    ]
    for module in modules:
        module.torch = _Wider(torch)
    try:
        yield
    finally:
        for module in modules:
            module.torch = torch


def logits_of(model, ids):
    import torch

    with torch.no_grad():
        return model(torch.as_tensor(ids)).logits.numpy()


def gradients_of(model, ids, targets):
    """(loss, {name: gradient}) of the mean cross-entropy over all tokens."""
    import torch

    model.zero_grad()
    logits = model(torch.as_tensor(ids)).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.as_tensor(targets).flatten())
    loss.backward()
    return loss.item(), {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}


def greedy(model, prompt, count):
    """The likeliest token after the other."""
    import torch

    ids = torch.as_tensor(prompt)[None]
    keys = dict(max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0)
    return model.generate(ids, attention_mask=torch.ones_like(ids), **keys)[0, len(prompt) :].tolist()


def tokens(rows=2, length=40, vocab=97, seed=1):
    return np.random.default_rng(seed).integers(0, vocab, (rows, length))
