"""Small GPTs with the options of known families, and with each option by itself."""

from __future__ import annotations

import numpy as np

from mpipipe import arrays, nn
from mpipipe.attention import Local
from mpipipe.language.models import GPT

SIZES = dict(vocab=11, dim=16, layers=2, heads=4, hidden=24, seq=8)
LLAMA3 = nn.Llama3Scaling(8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_positions=16)
YARN = nn.YarnScaling(4.0, original_positions=64, beta_fast=8.0)
OPTIONS = {
    "GPT-2": dict(
        norm="layer", eps=1e-5, positions="learned", max_positions=10, qkv_bias=True, out_bias=True,
        feed_forward="gelu", feed_forward_bias=True, tied=True,
    ),
    "Llama 3": dict(kv_heads=2, eps=1e-5, rope_base=5e5, rope_scaling=LLAMA3),
    "Mistral": dict(kv_heads=1, windows=(3, 3), rope_scaling=nn.LinearScaling(2.0)),
    "Qwen 2": dict(kv_heads=2, qkv_bias=True, windows=(None, 3), rope_base=1e4, rope_scaling=YARN, tied=True),
    "Qwen 3": dict(kv_heads=2, head_dim=6, qk_norm=True),
    "norms of learned positions": dict(positions="learned", qk_norm=True, eps=0.1, head_dim=3),
    "all of SwiGLU": dict(feed_forward_bias=True, out_bias=True, embedding_scale=4.0),
    "GELU without biases": dict(feed_forward="gelu", norm="layer", eps=0.01, embedding_scale=-0.5, tied=True),
}  # fmt: skip


def model_of(name, **sizes):
    return GPT(**{**SIZES, **OPTIONS[name], **sizes})


def stir(stages):
    """Move gains and biases away from their neutral elements, each by its name."""
    for stage in stages:
        for name, array in stage.parameters.items():
            if array.ndim == 1:
                values = arrays.download(array) + np.random.default_rng([*name.encode()]).normal(0, 0.3, array.shape)
                arrays.copy_into(array, values if stage.device == "cpu" else arrays.upload(values))
        stage.refresh()


def whole(model, attend=None, positions=None, **options):
    """All layers as one stage, in float64 if the options of nn.Stage do not say otherwise."""
    stage = nn.Stage(model.build(attend or Local(), positions), **{"dtype": "float64", **options})
    stir([stage])
    return stage


def text(model, rows=3, seed=0):
    """(tokens, targets) for the model."""
    ids = np.random.default_rng(seed).integers(0, model.vocab, (rows, model.seq + 1))
    return np.ascontiguousarray(ids[:, :-1]), np.ascontiguousarray(ids[:, 1:])
