"""Attention with its options against PyTorch in float64, and rotary frequencies against those of transformers."""

from __future__ import annotations

import math

import numpy as np
import pytest
from support.tolerance import close, largest

from mpipipe import nn
from mpipipe.attention import Local

pytestmark = pytest.mark.judges
RANDOM = np.random.default_rng(5)
BATCH, SEQ, DIM = 2, 7, 12
OPERATIONS = 200  # two products over 12 to 40, attention to 7 positions, norms, and sums over 14 rows


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch")


def attention(torch, p, x, base=100.0, window=None, normed=True, size=6):
    functional = torch.nn.functional
    qkv = functional.linear(x, p["0.qkv"], p["0.qkv_bias"]).view(BATCH, SEQ, 8, size).transpose(1, 2)
    q, k, v = qkv[:, :4], qkv[:, 4:6], qkv[:, 6:]
    if normed:
        q, k = (functional.rms_norm(heads, (size,), p[f"0.{n}_norm"], eps=0.01) for heads, n in ((q, "q"), (k, "k")))
    if base is not None:
        angles = torch.arange(SEQ)[:, None] * base ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
        turns = torch.polar(torch.ones_like(angles), angles)
        q, k = (
            torch.view_as_real(torch.view_as_complex(heads.unflatten(-1, (-1, 2)).contiguous()) * turns).flatten(-2)
            for heads in (q, k)
        )
    behind = torch.arange(SEQ)[:, None] - torch.arange(SEQ)
    mask = (behind >= 0) & (behind < (window or SEQ))
    y = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return functional.linear(y.transpose(1, 2).reshape(BATCH, SEQ, -1), p["0.out"], p["0.out_bias"])


HEADS = dict(kv_heads=2, head_dim=6, qkv_bias=True, out_bias=True)
LAYERS = {
    "attention": (
        lambda: [nn.SelfAttention(DIM, 4, attend=Local(), rope_base=100.0, qk_norm=True, eps=0.01, **HEADS)],
        attention,
    ),
    "attention with a window": (
        lambda: [nn.SelfAttention(DIM, 4, attend=Local(window=3), rope_base=100.0, **HEADS)],
        lambda *given: attention(*given, window=3, normed=False),
    ),
    "attention that does not turn": (
        lambda: [nn.SelfAttention(DIM, 4, attend=Local(), rope_base=None, qk_norm=True, eps=0.01, **HEADS)],
        lambda *given: attention(*given, base=None),
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_outputs_and_gradients_are_those_of_torch(torch, name):
    make, judge = LAYERS[name]
    stage = nn.Stage(make(), dtype="float64")
    stage.parameters.flat += RANDOM.standard_normal(stage.parameters.flat.size) * 0.3
    x = RANDOM.standard_normal((BATCH, SEQ, DIM))
    there = torch.tensor(x, requires_grad=True)
    p = {key: torch.tensor(array, requires_grad=True) for key, array in stage.parameters.items()}
    expected = judge(torch, p, there)
    y, saved = stage.forward(x)
    close(y, expected.detach().numpy(), OPERATIONS, largest(y))
    dy = RANDOM.standard_normal(y.shape)
    expected.backward(torch.tensor(dy))
    dx = stage.backward(dy, saved)
    close(dx, there.grad.numpy(), OPERATIONS, largest(dx), what="input")
    for key, array in p.items():
        close(stage.gradients[key], array.grad.numpy(), OPERATIONS, largest(stage.gradients[key]), what=key)


SCALINGS = {
    "linear": (nn.LinearScaling(2.5), dict(rope_type="linear", factor=2.5)),
    "llama3": (
        nn.Llama3Scaling(8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_positions=8192),
        dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
             original_max_position_embeddings=8192),
    ),
    "yarn": (
        nn.YarnScaling(4.0, original_positions=32768),
        dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32768),
    ),
    "yarn with all its numbers": (
        nn.YarnScaling(16.0, original_positions=4096, beta_fast=20.0, beta_slow=2.0, attention_factor=1.25),
        dict(rope_type="yarn", factor=16.0, original_max_position_embeddings=4096, beta_fast=20.0, beta_slow=2.0,
             attention_factor=1.25),
    ),
}  # fmt: skip


@pytest.mark.parametrize("head_dim, base", [(128, 1e6), (64, 5e5), (16, 1e4)])
@pytest.mark.parametrize("name", SCALINGS)
def test_rotary_frequencies_are_those_of_transformers(name, head_dim, base):
    """Those are float32. A power of the base errs by the rounding of its exponent times the logarithm of the base."""
    transformers = pytest.importorskip("transformers")
    functions = pytest.importorskip("transformers.modeling_rope_utils").ROPE_INIT_FUNCTIONS
    scaling, numbers = SCALINGS[name]
    config = transformers.LlamaConfig(
        hidden_size=4 * head_dim, num_attention_heads=4, max_position_embeddings=131072,
        rope_parameters={"rope_theta": base, **numbers},
    )  # fmt: skip
    expected, amplitude = functions[scaling.kind](config, device="cpu")
    found = scaling.scaled(base ** (-np.arange(0, head_dim, 2) / head_dim), base)
    close(found, expected.numpy(), 10 + math.log(base), dtype=np.float32)
    close(scaling.amplitude, amplitude, 5)
