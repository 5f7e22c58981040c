"""The reference GPT of the tests: plain numpy on one process, for real or complex parameters.

Complex parameters give exact derivatives: for an analytic loss f, Im f(p + i h d) / h is the derivative along d up to
terms of order h^2, and h = 1e-30 leaves no rounding error (Squire and Trapp, SIAM Review 40, 1998).
"""

import numpy as np

from support import reference_rope


def loss(parameters, model, tokens, targets):
    """Mean cross-entropy; `parameters` maps the names of the stages' parameters to arrays."""
    logits = forward(parameters, model, tokens)
    shifted = logits - logits.real.max(-1, keepdims=True)
    log_probabilities = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return -np.take_along_axis(log_probabilities, targets[..., None], -1).mean()


def forward(parameters, model, tokens):
    """Logits (batch, seq, vocab) of a model with any of the options of models.GPT."""
    p, learned = parameters, model.positions == "learned"
    x = p["0.0.weight" if learned else "0.weight"][tokens] * model.embedding_scale
    if learned:
        x = x + p["0.1.weight"][: x.shape[1]]
    for block in range(model.layers):
        attention, mlp = 1 + 2 * block, 2 + 2 * block
        window = None if model.windows is None else model.windows[block]
        x = x + _attention(_norm(x, p, f"{attention}.layer.0", model), p, f"{attention}.layer.1", model, window)
        x = x + _feed_forward(_norm(x, p, f"{mlp}.layer.0", model), p, f"{mlp}.layer.1", model)
    last = 1 + 2 * model.layers
    return _norm(x, p, f"{last}.0", model) @ p[f"{last}.1.weight"].T


def derivative(parameters, model, tokens, targets, direction):
    """Exact derivative of the loss along `direction`, a mapping from some of the names to arrays."""
    step = 1e-30
    moved = {
        name: value + (1j * step * direction[name] if name in direction else 0) for name, value in parameters.items()
    }
    return loss(moved, model, tokens, targets).imag / step


def _norm(x, p, name, model):
    if model.norm == "layer":
        x = x - x.mean(-1, keepdims=True)
    return normal(x, model.eps) * p[f"{name}.gain"] + p.get(f"{name}.bias", 0)


def normal(x, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)


def _attention(x, p, name, model, window):
    batch, seq, _ = x.shape
    size, heads = model.head_dim, [model.heads, model.heads + model.kv_heads]
    projected = x @ p[f"{name}.qkv"].T + p.get(f"{name}.qkv_bias", 0)
    q, k, v = np.split(projected.reshape(batch, seq, -1, size), heads, axis=2)
    if model.qk_norm:
        q = normal(q, model.eps) * p[f"{name}.q_norm"]
        k = normal(k, model.eps) * p[f"{name}.k_norm"]
    if model.positions == "rotary":
        q, k = _rope(q, model), _rope(k, model)
    return attended(q, k, v, window) @ p[f"{name}.out"].T + p.get(f"{name}.out_bias", 0)


def attended(q, k, v, window):
    """Causal attention within a window, where there is one, as (batch, seq, heads * size)."""
    batch, seq, heads, size = q.shape
    k, v = (np.repeat(x, heads // k.shape[2], axis=2) for x in (k, v))
    scores = np.einsum("bihd,bjhd->bhij", q, k) / np.sqrt(size)
    behind = np.arange(seq)[:, None] - np.arange(seq)
    scores = np.where((behind >= 0) & (behind < (window or seq)), scores, -np.inf)
    weights = np.exp(scores - scores.real.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("bhij,bjhd->bihd", weights, v).reshape(batch, seq, -1)


def _rope(x, model):
    """Rotate the pairs (2i, 2i + 1) by position times the frequency of pair i."""
    frequencies, amplitude = reference_rope.frequencies(x.shape[-1], model.rope_base, model.rope_scaling)
    angles = np.arange(x.shape[1])[:, None] * frequencies
    cos, sin = (amplitude * part(angles)[:, None, :] for part in (np.cos, np.sin))
    even, odd = x[..., 0::2], x[..., 1::2]
    turned = np.empty_like(x)
    turned[..., 0::2], turned[..., 1::2] = even * cos - odd * sin, even * sin + odd * cos
    return turned


def _feed_forward(x, p, name, model):
    down, down_bias = p[f"{name}.down"], p.get(f"{name}.down_bias", 0)
    if model.feed_forward == "gelu":
        u = x @ p[f"{name}.up"].T + p.get(f"{name}.up_bias", 0)
        return gelu(u) @ down.T + down_bias
    gate, up = np.split(x @ p[f"{name}.gate_up"].T + p.get(f"{name}.gate_up_bias", 0), 2, axis=-1)
    return (gate / (1 + np.exp(-gate)) * up) @ down.T + down_bias


def gelu(u):
    return u * (1 + np.tanh(np.sqrt(2 / np.pi) * (u + 0.044715 * u**3))) / 2
