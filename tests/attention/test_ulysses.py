"""Attention by all-to-all over heads: any sequence, mask and grouping, against dense attention."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.reference_attention import NAMES, dense
from support.rings import arrays, masks, refused
from support.tolerance import within

from mpipipe import arrays as backend
from mpipipe.attention import Layout, Local, Ring, Ulysses
from mpipipe.attention.layout import KINDS
from mpipipe.errors import ArgumentError, MismatchError
from mpipipe.job import inprocess


def through(comm, whole, kind="zigzag", place=lambda x: x, attend=Ulysses, segments_of_rows=None, room=None, **options):
    """(out, dq, dk, dv) of the whole sequence, put together from all ranks."""
    rows, keys = (Layout(kind, comm.size, whole[at].shape[1]) for at in (0, 1))
    object_ = attend(comm, layout=kind, **options)
    q, k, v, dout = (place(layout.shard(x, comm.rank)) for layout, x in zip((rows, keys, keys, rows), whole))
    out, saved = object_.forward(q, k, v, segments_of_rows)
    found = object_.backward(dout, saved, None if room is None else room(q, k, v))
    parts = comm.allgather(backend.download(out, *found))
    return [layout.unshard(shards) for layout, shards in zip((rows, rows, keys, keys), zip(*parts))]


def agrees(found, expected, more=1.0):
    """As for other attention; `more` where the parts of a sum were rounded before they were added."""
    for name, wanted, allowed in zip(NAMES, expected, expected.bounds(found[0].dtype)):
        if name != "lse":
            within(found[max(0, NAMES.index(name) - 1)], wanted, more * allowed, name)


@st.composite
def cases(draw):
    ranks, seq = draw(st.integers(1, 5)), draw(st.integers(1, 50))
    options, expected, keys = draw(masks(seq))
    kv_heads = ranks * draw(st.integers(1, 2))
    dim, value_dim = draw(st.sampled_from([(8, 8), (8, 5), (4, 12)]))
    heads = dict(heads=draw(st.integers(1, 3)) * kv_heads, kv_heads=kv_heads)
    whole = arrays(seq, keys, draw(st.integers(1, 2)), **heads, dim=dim, value_dim=value_dim)
    return ranks, whole, options | dict(kind=draw(st.sampled_from(KINDS))), expected


@settings(max_examples=50)
@given(cases(), st.booleans())
def test_any_sequence_equals_dense_attention(case, synchronous):
    ranks, whole, options, expected = case
    found = inprocess.run(ranks, lambda comm: through(comm, whole, **options), synchronous=synchronous)
    agrees(found[0], dense(*whole, *expected))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mask", [dict(), dict(causal=False), dict(window=37), dict(segments=[20, 1, 40])], ids=str)
def test_real_ranks_equal_dense_attention(comm, monkeypatch, kind, mask):
    monkeypatch.setenv("MPIPIPE_SYNC_SENDS", "1")
    whole = arrays(61, heads=24, kv_heads=12)
    documents = None if "segments" not in mask else [0, *np.cumsum(mask["segments"])]
    expected = dense(*whole, mask.get("causal", True), mask.get("window"), documents)
    agrees(through(comm, whole, kind, **mask), expected)


def test_documents_of_each_row_and_room_for_gradients():
    rng = np.random.default_rng(3)
    whole = arrays(23, batch=3)
    segments = np.cumsum(rng.random((3, 23)) < 0.2, axis=1)

    def room(*like):
        parts = np.full((*like[0].shape[:2], 8, 8), np.nan)
        return parts[:, :, :4], parts[:, :, 4:6], parts[:, :, 6:]

    local = Local()
    out, saved = local.forward(*whole[:3], segments)
    expected = out, *local.backward(whole[3], saved)
    for ranks in (1, 2):
        for found in inprocess.run(
            ranks, lambda comm: through(comm, whole, "striped", segments_of_rows=segments, room=room)
        ):
            for one, other in zip(found, expected):
                np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_half_precision(dtype):
    whole = [x.astype(backend.dtype(dtype)) for x in arrays(31, kv_heads=4)]
    found = inprocess.run(4, lambda comm: through(comm, whole))
    assert [x.dtype.name for x in found[0]] == [dtype] * 4
    agrees(found[0], dense(*whole))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_device_arrays(gpu, comm, dtype):
    whole = [x.astype(backend.dtype(dtype)) for x in arrays(20, heads=24, kv_heads=12)]
    agrees(through(comm, whole, place=backend.upload), dense(*whole), more=2)


@pytest.mark.mpi(min_size=2)
def test_mistakes_are_one_error_on_all_ranks(comm):
    odd = comm.rank == 1
    mine, more = arrays(4, heads=12, kv_heads=12), arrays(4, heads=24, kv_heads=12)
    few = arrays(4, heads=8, kv_heads=1)[:3]
    attend, ring = Ulysses(comm), Ring(comm)
    refused(comm, ArgumentError, "not a multiple of the ranks", lambda: attend.forward(*few))
    refused(comm, MismatchError, "differ in options", lambda: (ring if odd else attend).forward(*mine[:3]))
    refused(comm, MismatchError, "differ in heads", lambda: attend.forward(*(more if odd else mine)[:3]))
    saved = [attend.forward(*mine[:3])[1] for _ in range(2)]
    refused(comm, ArgumentError, "does not fit the output", lambda: attend.backward(mine[3][:, :2], saved[0]))
    refused(comm, MismatchError, "different calls", lambda: attend.backward(mine[3], saved[odd]))
    attend.backward(mine[3], saved[0])
    assert attend.bytes_sent > 0


def test_arrays_that_go_one_after_the_other_have_the_same_bits(comm):
    whole = arrays(9, heads=24, kv_heads=12)
    one, other = (through(comm, whole, rotation=rotation) for rotation in ("overlap", "sendrecv"))
    for first, second in zip(one, other):
        np.testing.assert_array_equal(first, second)


def test_a_window_for_each_layer():
    make = lambda comm, **options: Ulysses(comm, **options).with_window(2)  # noqa: E731
    found = inprocess.run(2, lambda comm: through(comm, arrays(9), attend=make))
    agrees(found[0], dense(*arrays(9), window=2))
    attend = inprocess.run(1, lambda comm: Ulysses(comm))[0]
    assert attend.with_window(2) is attend.with_window(2)
