"""The gradients of queries, keys and values are written where the product that reads them wants them."""

from __future__ import annotations

import numpy as np
import pytest

from mpipipe import arrays, nn
from mpipipe.attention import Local, Ring
from mpipipe.job import inprocess

RANDOM = np.random.default_rng(12)
DIM, HEADS = 64, 4


class Elsewhere:
    """An object of a user's, with memory of its own for gradients."""

    def __init__(self, inner):
        self.forward, self.backward = inner.forward, inner.backward


class Halved(Local):
    """A subclass that changes gradients."""

    def backward(self, dout, saved):
        return tuple(x / 2 for x in super().backward(dout, saved))


def both_ways(device, kind, kv_heads, gpu, **options):
    """What a backward finds and launches, by Local and by what has a part of it."""
    dout = RANDOM.standard_normal((2, 19, DIM)).astype(arrays.dtype(kind))
    x = RANDOM.standard_normal((2, 19, DIM)).astype(arrays.dtype(kind))
    if device == "cuda":
        x, dout = arrays.upload(x), arrays.upload(dout)
    found = []
    for attend in (Local(**options), Elsewhere(Local(**options))):
        stage = nn.Stage([nn.SelfAttention(DIM, HEADS, kv_heads, attend)], kind, seed=2, device=device)
        saved = stage.forward(x)[1]
        stage.backward(dout, saved)  # builds what is built once
        arrays.set_zero(stage.gradients.flat)
        gpu.reset()
        dx = stage.backward(dout, saved)
        launched = list(gpu.launches)
        results = (dx, stage.gradients.flat)
        found.append((arrays.download(*results) if device == "cuda" else results, launched))
    return found


@pytest.mark.parametrize("options", [{}, dict(window=5), dict(segments=[4, 15])], ids=str)
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("kind", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("device, by", [("cpu", ""), ("cuda", "cupy"), ("cuda", "")])
def test_gradients_in_one_array_have_the_bits_of_three(gpu, device, by, kind, kv_heads, options, monkeypatch):
    monkeypatch.setenv("MPIPIPE_ATTENTION", by)
    (ours, launched), (theirs, more) = both_ways(device, kind, kv_heads, gpu, **options)
    for found, expected in zip(ours, theirs):
        assert found.dtype == expected.dtype and found.tobytes() == expected.tobytes()
    if device == "cuda" and not gpu.real:
        # one turn for queries and keys together, and values are where they belong
        assert launched.count("apply_rope") == more.count("apply_rope") - 1 == 1, (launched, more)
        assert len(launched) == len(more) - 2


def test_what_a_subclass_redefines_is_never_passed_by():
    x, dout = RANDOM.standard_normal((2, 2, 9, DIM))
    found = []
    for attend in (Local(), Halved()):
        stage = nn.Stage([nn.SelfAttention(DIM, HEADS, attend=attend)], "float64", seed=2)
        found.append(stage.backward(dout, stage.forward(x)[1]))
    np.testing.assert_allclose(found[1], found[0] / 2, rtol=1e-12)


def test_a_ring_of_one_step_writes_into_the_room_it_is_given():
    q, k, v, dout = RANDOM.standard_normal((4, 1, 12, HEADS, 8))

    def on_the_rank(comm):
        ring = Ring(comm)
        expected = ring.backward(dout, ring.forward(q, k, v)[1])
        room = tuple(np.full((1, 12, 3 * HEADS, 8), np.nan)[:, :, at : at + HEADS] for at in (0, HEADS, 2 * HEADS))
        found = ring.backward_into(dout, ring.forward(q, k, v)[1], room)
        assert all(a is b for a, b in zip(found, room))
        for a, b in zip(found, expected):
            np.testing.assert_array_equal(a, b)

    inprocess.run(1, on_the_rank)
