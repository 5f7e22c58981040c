"""A ring's memory grows with the local length, not with its square and not with the length of the sequence."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from mpipipe import attention

HEADS, DIM = 2, 64


def peaks(comm, local, rotation):
    """Peak bytes of the forward and of the backward above the arrays handed in, on the rank with the most."""
    rng = np.random.default_rng(comm.rank)
    q, k, v, dout = (rng.standard_normal((1, local, HEADS, DIM), dtype=np.float32) for _ in range(4))
    ring = attention.Ring(comm, layout="zigzag", rotation=rotation)
    ring.forward(q[:, :8], k[:, :8], v[:, :8])  # what is made once
    tracemalloc.start()
    try:
        _, saved = ring.forward(q, k, v)
        forward = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        ring.backward(dout, saved)
        backward = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    return np.max(comm.allgather((forward, backward)), axis=0)


@pytest.mark.parametrize("rotation", ["overlap", "sendrecv"])
def test_memory_is_linear_in_the_local_length(comm, rotation):
    """With the same bound for rings of any size: the sequence is as many times as long as there are ranks."""
    short, long = 2048, 4096
    small, large = peaks(comm, short, rotation), peaks(comm, long, rotation)
    growth = (large - small) / (long - short)  # bytes a position; the tiles' own memory drops out
    assert (large <= 2.1 * small).all()
    row = 4 * HEADS * DIM  # of q, k, v, ...: K, V held and arriving, the output, and a head's work; then gradients
    assert growth[0] <= 9 * row and growth[1] <= 20 * row
