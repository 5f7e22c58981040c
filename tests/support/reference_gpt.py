"""The reference GPT of the tests: plain numpy on one process, for real or complex parameters.

Complex parameters give exact derivatives: for an analytic loss f, Im f(p + i h d) / h is the derivative along d up to
terms of order h^2, and h = 1e-30 leaves no rounding error (Squire and Trapp, SIAM Review 40, 1998).
"""

from __future__ import annotations

import numpy as np


def loss(parameters, model, tokens, targets):
    """Mean cross-entropy; `parameters` maps the names of the stages' parameters to arrays."""
    p = parameters
    x = p["0.weight"][tokens]
    for block in range(model.layers):
        attention, mlp = 1 + 2 * block, 2 + 2 * block
        x = x + _attention(_norm(x, p[f"{attention}.layer.0.gain"]), p, f"{attention}.layer.1", model)
        x = x + _swiglu(_norm(x, p[f"{mlp}.layer.0.gain"]), p, f"{mlp}.layer.1")
    last = 1 + 2 * model.layers
    logits = _norm(x, p[f"{last}.0.gain"]) @ p[f"{last}.1.weight"].T
    shifted = logits - logits.real.max(-1, keepdims=True)
    log_probabilities = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return -np.take_along_axis(log_probabilities, targets[..., None], -1).mean()


def derivative(parameters, model, tokens, targets, direction):
    """Exact derivative of the loss along `direction`, a mapping from some of the names to arrays."""
    step = 1e-30
    moved = {
        name: value + (1j * step * direction[name] if name in direction else 0) for name, value in parameters.items()
    }
    return loss(moved, model, tokens, targets).imag / step


def _norm(x, gain):
    return gain * x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)


def _attention(x, p, name, model):
    batch, seq, dim = x.shape
    size = dim // model.heads
    q, k, v = np.split(
        (x @ p[f"{name}.qkv"].T).reshape(batch, seq, -1, size), [model.heads, model.heads + model.kv_heads], axis=2
    )
    q, k = _rope(q, model), _rope(k, model)
    group = model.heads // model.kv_heads
    k, v = np.repeat(k, group, axis=2), np.repeat(v, group, axis=2)
    scores = np.einsum("bihd,bjhd->bhij", q, k) / np.sqrt(size)
    scores = np.where(np.tril(np.ones((seq, seq), bool)), scores, -np.inf)
    weights = np.exp(scores - scores.real.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    out = np.einsum("bhij,bjhd->bihd", weights, v).reshape(batch, seq, dim)
    return out @ p[f"{name}.out"].T


def _rope(x, model):
    """Rotate the pairs (2i, 2i + 1) by position * base^(-2i / size)."""
    size = x.shape[-1]
    angles = np.arange(x.shape[1])[:, None] * model.rope_base ** (-np.arange(0, size, 2) / size)
    cos, sin = np.cos(angles)[:, None, :], np.sin(angles)[:, None, :]
    even, odd = x[..., 0::2], x[..., 1::2]
    turned = np.empty_like(x)
    turned[..., 0::2], turned[..., 1::2] = even * cos - odd * sin, even * sin + odd * cos
    return turned


def _swiglu(x, p, name):
    gate, up = np.split(x @ p[f"{name}.gate_up"].T, 2, axis=-1)
    return (gate / (1 + np.exp(-gate)) * up) @ p[f"{name}.down"].T
