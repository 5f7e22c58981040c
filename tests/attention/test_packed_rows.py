"""Rows of a batch with documents of their own: each row is what it would be alone, on one rank and in a ring."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.reference_attention import agrees_by_row
from support.rings import arrays, refused

from mpipipe import arrays as backend
from mpipipe import attention
from mpipipe.attention.layout import KINDS, Layout
from mpipipe.errors import ArgumentError, MismatchError
from mpipipe.job import inprocess

DTYPES = ["float32", "bfloat16"]


def random_segments(rng, batch, seq):
    """The document of each position: in each row other lengths, and numbers that need not begin at 0."""
    return np.stack([np.cumsum(rng.random(seq) < rng.choice([0, 0.1, 0.5, 1])) + rng.integers(5) for _ in range(batch)])


def by_row(found, whole, segments, window=None):
    """As `agrees_by_row`, lse (batch, seq, heads)."""
    agrees_by_row([found[0], found[1].transpose(0, 2, 1), *found[2:]], whole, segments, window)


def through(attend, mine, segments, room=None):
    """(out, lse, dq, dk, dv) of this rank's part, lse (batch, local, heads)."""
    out, saved = attend.forward(*mine[:3], segments=segments)
    gradients = attend.backward(mine[3], saved, room)
    assert room is None or all(one is other for one, other in zip(gradients, room))
    out, lse, *gradients = backend.download(out, saved.lse, *gradients)
    batch, seq, heads = out.shape[:3]
    return out, lse.reshape(heads, batch, seq).transpose(1, 2, 0), *gradients


def part_of_qkv(batch, seq, dtype=np.float64):
    """Room for dq, dk and dv side by side in one array, as SelfAttention has it."""
    whole = np.full((batch, seq, 8, 8), np.nan, dtype)
    return whole[:, :, :4], whole[:, :, 4:6], whole[:, :, 6:]


@settings(max_examples=40)
@given(st.integers(1, 6), st.integers(1, 40), st.integers(1, 4), st.sampled_from(KINDS), st.integers(0, 2**32))
def test_each_row_is_what_it_would_be_alone(ranks, seq, batch, kind, seed):
    rng = np.random.default_rng(seed)
    window = None if rng.random() < 0.5 else int(rng.integers(1, seq + 3))
    whole, segments = arrays(seq, batch=batch, seed=seed), random_segments(rng, batch, seq)
    layout = Layout(kind, ranks, seq)

    def on_rank(comm):
        ring = attention.Ring(comm, layout=kind, window=window)
        return through(ring, [layout.shard(x, comm.rank) for x in whole], segments)

    found = [layout.unshard(parts) for parts in zip(*inprocess.run(ranks, on_rank))]
    local = attention.Local() if window is None else attention.Local().with_window(window)
    for result in (found, through(local, whole, segments), through(local, whole, segments, part_of_qkv(batch, seq))):
        by_row(result, whole, segments, window)


def test_documents_change_from_call_to_call_and_backwards_keep_theirs():
    """As micro-batches that are under way at once."""
    rng = np.random.default_rng(1)
    whole, cuts = arrays(12, batch=2), [random_segments(rng, 2, 12) for _ in range(3)]
    for attend in (attention.Local(), *inprocess.run(1, lambda comm: attention.Ring(comm))):
        forwards = [attend.forward(*whole[:3], segments=each) for each in cuts]
        plain = attend.forward(*whole[:3])
        for (out, saved), each in [*zip(forwards, cuts)][::-1]:
            fresh, again = attend.forward(*whole[:3], segments=each)
            np.testing.assert_array_equal(out, fresh)
            for one, other in zip(attend.backward(whole[3], saved), attend.backward(whole[3], again)):
                np.testing.assert_array_equal(one, other)
        np.testing.assert_array_equal(plain[0], attend.forward(*whole[:3])[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_on_the_gpu(gpu, dtype):
    whole = [x.astype(backend.dtype(dtype)) for x in arrays(20, batch=2)]
    segments = random_segments(np.random.default_rng(3), 2, 20)
    by_row(through(attention.Local(), [backend.upload(x) for x in whole], segments), whole, segments)
    layout = Layout("zigzag", 2, 20)

    def on_rank(comm):
        mine = [backend.upload(layout.shard(x, comm.rank)) for x in whole]
        return through(attention.Ring(comm, layout=layout), mine, segments)

    by_row([layout.unshard(parts) for parts in zip(*inprocess.run(2, on_rank))], whole, segments)


def test_segments_that_do_not_fit_are_refused_on_all_ranks(comm):
    layout = Layout("zigzag", comm.size, 8 * comm.size)
    ring = attention.Ring(comm, layout=layout)
    mine = [layout.shard(x, comm.rank) for x in arrays(8 * comm.size, batch=2)][:3]
    good = np.zeros((2, 8 * comm.size), int)
    mixed = good.copy()
    mixed[1, 2] = 1
    for wrong, match in [(good[:1], "segments of a forward"), (good + 0.5, "segments of a forward"),
                         (good[:, 1:], "another sequence"), (mixed, "do not stand together")]:  # fmt: skip
        refused(comm, ArgumentError, match, lambda wrong=wrong: ring.forward(*mine, segments=wrong))
        with pytest.raises(ArgumentError, match="segments"):
            attention.Local().forward(*arrays(8 * comm.size, batch=2)[:3], segments=wrong)
    if comm.size > 1:  # on one rank alone
        segments = mixed if comm.rank == 0 else good
        refused(comm, ArgumentError, "do not stand together", lambda: ring.forward(*mine, segments=segments))
        good[0, : comm.rank] = 1
        with pytest.raises(MismatchError):
            ring.forward(*mine, segments=good)


def test_a_batch_without_rows_has_an_output_without_rows():
    nothing = np.zeros((0, 6, 2, 4))
    assert attention.Local().forward(nothing, nothing, nothing, np.zeros((0, 6), int))[0].shape == nothing.shape
