"""Random arrays of attention, taken through a ring of ranks."""

import numpy as np
import pytest
from hypothesis import strategies as st

from mpipipe import arrays as backend
from mpipipe import attention
from mpipipe.attention.layout import Layout


def arrays(seq, keys=None, batch=2, heads=4, kv_heads=2, dim=8, value_dim=None, dtype=np.float64, size=1.0, seed=0):
    rng = np.random.default_rng(seed)
    keys, value_dim = seq if keys is None else keys, dim if value_dim is None else value_dim
    shapes = (
        (batch, seq, heads, dim), (batch, keys, kv_heads, dim), (batch, keys, kv_heads, value_dim),
        (batch, seq, heads, value_dim),
    )  # fmt: skip
    return [(size * rng.normal(size=shape)).astype(dtype) for shape in shapes]


@st.composite
def masks(draw, seq, keys=True):
    """(options of attention to so many positions, the same for the dense reference, lengths of other keys)."""
    causal = draw(st.booleans())
    others = draw(st.none() | st.integers(1, seq + 9)) if keys else None
    window = draw(st.none() | st.integers(1, seq + 9)) if causal else None
    cuts = draw(st.none() | st.lists(st.integers(1, max(1, seq - 1)), max_size=3)) if others is None else None
    documents = None if cuts is None else sorted({0, seq, *cuts})
    segments = None if cuts is None else np.searchsorted(documents, np.arange(seq), "right") - 1
    return dict(causal=causal, window=window, segments=segments), (causal, window, documents), others


def through_ring(comm, whole, place=lambda x: x, **options):
    """(out, lse, dq, dk, dv) of the whole sequence, put together from all ranks, and the bytes sent by this one.

    `place` is what brings shards to the device on which they attend.
    """
    options = {"layout": "zigzag", **options}
    rows, keys = (Layout(options["layout"], comm.size, whole[at].shape[1]) for at in (0, 1))
    ring = attention.Ring(comm, **options)
    mine = [place(layout.shard(array, comm.rank)) for layout, array in zip((rows, keys, keys, rows), whole)]
    out, saved = ring.forward(*mine[:3])
    out, lse, *gradients = backend.download(out, saved.lse, *ring.backward(mine[3], saved))
    parts = comm.allgather((out, lse.transpose(0, 2, 1), *gradients))
    result = [layout.unshard(shards) for layout, shards in zip((rows, rows, rows, keys, keys), zip(*parts))]
    result[1] = result[1].transpose(0, 2, 1)
    return result, ring.bytes_sent


def refused(comm, kind, match, build):
    """`build()` raises `kind` with `match` on every rank, and exactly one rank is left to report it."""
    with pytest.raises(kind, match=match) as caught:
        build()
    assert comm.allgather(caught.value.reported_elsewhere).count(False) == 1
    return str(caught.value)
