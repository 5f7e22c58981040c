"""Several sequences in one cache: each is dense causal attention over itself, whatever stands beside it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.reference_attention import dense
from support.tolerance import within

from mpipipe.attention.cache import Piece, Pieces, SlotCache
from mpipipe.errors import ArgumentError
from mpipipe.job import inprocess

HEADS, KV_HEADS, DIM, WIDTH = 4, 2, 8, 6


def sequence(length, seed, dtype=np.float64, size=1.0):
    rng = np.random.default_rng(seed)
    shapes = (1, length, HEADS, DIM), (1, length, KV_HEADS, DIM), (1, length, KV_HEADS, WIDTH)
    return [(size * rng.normal(size=shape)).astype(dtype) for shape in shapes]


def run(cache, sequences, micro_batches):
    """The outputs of all sequences; a micro-batch is a list of (number of the sequence, slot, start, rows)."""
    found = [np.full((1, each[0].shape[1], HEADS, WIDTH), np.nan, each[0].dtype) for each in sequences]
    for micro_batch in micro_batches:
        parts = [(number, slice(start, start + rows)) for number, _, start, rows in micro_batch]
        totals = [sequences[number][0].shape[1] for number, *_ in micro_batch]
        cache.pieces.begin([Piece(*place, total) for (_, *place), total in zip(micro_batch, totals)])
        q, k, v = (np.concatenate([sequences[number][i][:, at] for number, at in parts], 1) for i in range(3))
        out, _ = cache.forward(q, k, v)
        for (number, at), piece in zip(parts, np.split(out, np.cumsum([m[3] for m in micro_batch])[:-1], axis=1)):
            found[number][:, at] = piece
    return found


def agrees(found, sequences, window=None, scale=None):
    for out, (q, k, v) in zip(found, sequences):
        expected = dense(q, k, v, np.zeros((*q.shape[:3], WIDTH)), window=window, scale=scale)
        within(out, expected[0], expected.bounds(q.dtype)[0], "out")


# three sequences in two slots: the third takes the place of the second
MIXED = [
    [(0, 0, 0, 5), (1, 1, 0, 3)],
    [(1, 1, 3, 1), (0, 0, 5, 1)],
    [(0, 0, 6, 4), (1, 1, 4, 1), (0, 0, 10, 2)],
    [(2, 1, 0, 7), (0, 0, 12, 1)],
    [(0, 0, 13, 1)],
    [(2, 1, 7, 1), (0, 0, 14, 1)],
]
LENGTHS = (15, 5, 8)


@pytest.fixture(params=[1, 2, 4])
def ranks(request, comm):
    """A communicator of so many ranks; all ranks take part, in groups side by side."""
    if comm.size % request.param:
        pytest.skip(f"needs a multiple of {request.param} ranks")
    part = comm.Split(comm.rank // request.param)
    yield part
    part.Free()


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_each_sequence_sees_itself_alone(ranks, dtype, window, scale):
    sequences = [sequence(length, seed, dtype) for seed, length in enumerate(LENGTHS)]
    cache = SlotCache(Pieces(), 2, 20, ranks, window, scale)
    found = run(cache, sequences, MIXED)
    agrees(found, sequences, window, scale)
    assert len(set(ranks.allgather(b"".join(out.tobytes() for out in found)))) == 1


def test_what_stands_beside_a_token_changes_no_bit_of_its_attention(ranks):
    sequences = [sequence(length, seed, np.float32) for seed, length in enumerate(LENGTHS)]
    together = run(SlotCache(Pieces(), 2, 20, ranks), sequences, MIXED)
    alone = run(
        SlotCache(Pieces(), 2, 20, ranks), sequences, [[piece] for micro_batch in MIXED for piece in micro_batch]
    )
    for one, other in zip(together, alone):
        np.testing.assert_array_equal(one, other)


def test_huge_scores_do_not_overflow(ranks):
    sequences = [sequence(length, seed, size=60.0) for seed, length in enumerate(LENGTHS)]
    found = run(SlotCache(Pieces(), 2, 20, ranks), sequences, MIXED)
    assert all(np.isfinite(out).all() for out in found)
    agrees(found, sequences)


@settings(max_examples=40)
@given(
    st.integers(1, 5), st.lists(st.integers(1, 7), min_size=1, max_size=3), st.none() | st.integers(1, 5),
    st.integers(0, 999),
)  # fmt: skip
def test_any_pieces_on_any_number_of_ranks_equal_dense(size, lengths, window, seed):
    places, micro_batches, rng = [0] * len(lengths), [], np.random.default_rng(seed)
    while places != lengths:
        rows = [int(rng.integers(0, length - place + 1)) for place, length in zip(places, lengths)]
        found = [(number, number, places[number], count) for number, count in enumerate(rows) if count]
        places = [place + count for place, count in zip(places, rows)]
        micro_batches += [found] if found else []
    sequences = [sequence(length, seed) for seed, length in enumerate(lengths)]

    def on_each_rank(comm):
        return run(SlotCache(Pieces(), len(lengths), 7, comm, window), sequences, micro_batches)

    for found in inprocess.run(size, on_each_rank):
        agrees(found, sequences, window)


@pytest.mark.parametrize(
    ("piece", "match"),
    [
        (Piece(2, 0, 3, 8), "does not fit into the cache"),
        (Piece(0, 6, 3, 8), "does not fit into the cache"),
        (Piece(0, 0, 3, 9), "does not fit into the cache"),
        (Piece(0, 0, 2, 8), "not what its pieces say"),
    ],
)
def test_a_piece_that_does_not_fit_is_refused(piece, match):
    cache = SlotCache(Pieces(), 2, 8)
    cache.pieces.begin([piece])
    with pytest.raises(ArgumentError, match=match):
        cache.forward(*sequence(3, 0))
