"""Few queries against a cache of keys that is spread over ranks: dense attention, with the same bits on every rank."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.reference_attention import dense
from support.tolerance import close, largest, within

from mpipipe import nn
from mpipipe.arrays import dtype as named_dtype
from mpipipe.attention import Cached, Local, decode_attention
from mpipipe.attention.cache import Piece, Pieces, SlotCache
from mpipipe.errors import ArgumentError, MismatchError
from mpipipe.job import inprocess


def agrees(out, q, k, v, window=None, scale=None, queries=None):
    """`out` is causal attention of the last so many queries, by default of all of them."""
    expected = dense(q, k, v, np.zeros((*q.shape[:3], v.shape[3])), window=window, scale=scale)
    at = slice(None if queries is None else -queries, None)
    within(out, expected[0][:, at], expected.bounds(q.dtype)[0][:, at], "out")


def arrays(seq, batch=2, heads=4, kv_heads=2, dim=8, value_dim=6, dtype=np.float64, size=1.0, seed=0):
    rng = np.random.default_rng(seed)
    shapes = (batch, seq, heads, dim), (batch, seq, kv_heads, dim), (batch, seq, kv_heads, value_dim)
    return [(size * rng.normal(size=shape)).astype(dtype) for shape in shapes]


def in_pieces(cache, whole, pieces):
    """The output of all positions, from forwards of so many at a time."""
    ends = np.cumsum(pieces)
    return np.concatenate([cache.forward(*(x[:, end - p : end] for x in whole))[0] for p, end in zip(pieces, ends)], 1)


@pytest.fixture(params=[1, 2, 4])
def ranks(request, comm):
    """A communicator of so many ranks; all ranks take part, in groups side by side."""
    if comm.size % request.param:
        pytest.skip(f"needs a multiple of {request.param} ranks")
    part = comm.Split(comm.rank // request.param)
    yield part
    part.Free()


SIZES = [{}, {"kv_heads": 4}, {"kv_heads": 1, "batch": 1}, {"heads": 8, "value_dim": 8}, {"dim": 5, "value_dim": 1}]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("window, queries", [(None, 1), (None, 20), (7, 20)])
def test_few_queries_over_uneven_shards_equal_dense(ranks, sizes, window, queries):
    seq = 37
    cuts = {1: [0, 37], 2: [0, 30, 37], 4: [0, 20, 20, 36, 37]}[ranks.size]  # one shard of four is empty
    q, k, v = arrays(seq, **sizes)
    own = slice(cuts[ranks.rank], cuts[ranks.rank + 1])
    out = decode_attention(
        q[:, -queries:], k[:, own], v[:, own], ranks, start=seq - queries, first=own.start, window=window
    )
    agrees(out, q, k, v, window, queries=queries)
    assert len(set(ranks.allgather(out.tobytes()))) == 1


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("capacity, window", [(24, None), (27, 5), (100, None)])
def test_a_text_in_pieces_equals_dense(ranks, dtype, capacity, window):
    whole = arrays(24, dtype=named_dtype(dtype))
    cache = Cached(capacity, ranks, window=window, scale=0.3)
    out = in_pieces(cache, whole, [10, 1, 1, 1, 7, 2, 1, 1])
    assert out.dtype == dtype and cache.length == 24
    agrees(out, *whole, window, 0.3)
    assert len(set(ranks.allgather(out.tobytes()))) == 1


@given(
    st.integers(1, 5), st.lists(st.integers(1, 6), min_size=1, max_size=6), st.integers(0, 9),
    st.none() | st.integers(1, 8),
)  # fmt: skip
def test_any_pieces_on_any_number_of_ranks_equal_dense(ranks, pieces, spare, window):
    whole = arrays(sum(pieces))
    found = inprocess.run(ranks, lambda comm: in_pieces(Cached(sum(pieces) + spare, comm, window), whole, pieces))
    for out in found:
        agrees(out, *whole, window)
        assert out.tobytes() == found[0].tobytes()


def test_huge_scores_do_not_overflow_between_ranks(ranks):
    whole = arrays(12, size=60.0)
    agrees(in_pieces(Cached(12, ranks), whole, [6, 6]), *whole)


def test_each_rank_has_room_for_its_part_alone(ranks):
    x = np.zeros((1, 1, 1, 64))
    tracemalloc.start()
    cache = Cached(4096, ranks)
    cache.forward(x, x, x)
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert used < 2 * 4096 * 64 * 8 / ranks.size + 100_000


def test_a_cleared_cache_takes_another_text_of_another_shape(ranks):
    cache = Cached(8, ranks)
    in_pieces(cache, arrays(8), [8])
    cache.clear()
    other = arrays(5, batch=1, heads=2, kv_heads=1, seed=1)
    agrees(in_pieces(cache, other, [4, 1]), *other)


def test_thousands_of_caches_take_one_communicator(ranks):
    caches = [Cached(4, ranks) for _ in range(3000)]  # MPICH has 2 046
    whole = arrays(2)
    agrees(in_pieces(caches[-1], whole, [2]), *whole)


def alike(found, expected, x):
    """Outputs of two SelfAttention layers: products over dim, and a sum over the positions in between."""
    close(found, expected, 3 * x.shape[-1] + x.shape[1], largest(x) ** 2 * largest(expected))


@pytest.mark.parametrize("pieces, positions", [([9], None), ([4, 1, 1, 3], None), ([4], np.array([0, 5, 6, 50]))])
def test_layers_find_their_positions_by_themselves_unless_these_are_given(pieces, positions):
    layers = [nn.Stage([nn.SelfAttention(16, 4, 2, attend, positions)], "float64") for attend in (Local(), Cached(9))]
    ends = np.cumsum(pieces)
    x = np.random.default_rng(0).normal(size=(2, ends[-1], 16))
    y = np.concatenate([layers[1].forward(x[:, end - p : end])[0] for p, end in zip(pieces, ends)], 1)
    alike(y, layers[0].forward(x)[0], x)


def test_more_positions_than_the_capacity_are_refused_and_nothing_is_kept(ranks):
    whole = arrays(6)
    cache = Cached(6, ranks)
    first = cache.forward(*(x[:, :4] for x in whole))[0]
    with pytest.raises(ArgumentError, match="capacity") as caught:
        cache.forward(*arrays(3))
    assert "4 positions and 3 more" in str(caught.value) and "clear()" in str(caught.value)
    rest = cache.forward(*(x[:, 4:] for x in whole))[0]
    agrees(np.concatenate([first, rest], 1), *whole)


REFUSED = [
    (lambda q, k, v: (q[:1], k[:1], v[:1]), "k does not fit to what is in the cache"),
    (lambda q, k, v: (q, k, v[..., :3]), "v does not fit to what is in the cache"),
    (lambda q, k, v: (q, k[:, :, :1], v[:, :, :1]), "k does not fit"),
    (lambda q, k, v: (q.astype("f4"), k.astype("f4"), v.astype("f4")), "float32"),
    (lambda q, k, v: (q[:, :1], k, v), "as many keys as queries"),
    (lambda q, k, v: (q, k, v[:, :1]), "do not fit together"),
    (lambda q, k, v: (None, k, v), "NoneType"),
]


@pytest.mark.parametrize("change, match", REFUSED)
def test_arrays_that_do_not_fit_on_one_rank_are_refused_on_all(ranks, change, match):
    cache = Cached(8, ranks)
    cache.forward(*arrays(2))
    wrong = ranks.rank == ranks.size - 1
    with pytest.raises(ArgumentError, match=match):
        cache.forward(*(change(*arrays(2)) if wrong else arrays(2)))


def test_ranks_that_differ_are_told(subcomm):
    comm = subcomm(2)
    if comm is None:
        return
    for name, options, sizes in [("q", {}, {"batch": 3 - comm.rank}), ("window", {"window": 3 + comm.rank}, {})]:
        with pytest.raises(MismatchError, match=f"differ in {name}") as caught:
            decode_attention(*arrays(2, **sizes), comm, start=0, first=2 * comm.rank, **options)
        assert caught.value.rank == 1


@pytest.mark.parametrize("options", [{"capacity": 0}, {"capacity": 2.5}, {"capacity": 4, "window": 0}])
def test_senseless_options_are_refused(options):
    with pytest.raises(ArgumentError, match=list(options)[-1]):
        Cached(**options)


# -- several sequences in one cache: each is dense causal attention over itself, whatever stands beside it


HEADS, KV_HEADS, DIM, WIDTH = 4, 2, 8, 6


def sequence(length, seed, dtype=np.float64, size=1.0):
    return arrays(length, 1, HEADS, KV_HEADS, DIM, WIDTH, dtype, size, seed)


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


def all_agree(found, sequences, window=None, scale=None):
    for out, whole in zip(found, sequences):
        agrees(out, *whole, window, scale)


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


@pytest.mark.parametrize("dtype, size", [(np.float64, 1.0), (np.float32, 1.0), (np.float64, 60.0)])
@pytest.mark.parametrize("window, scale", [(None, None), (4, None), (4, 0.3)])
def test_each_sequence_sees_itself_alone(ranks, dtype, size, window, scale):
    sequences = [sequence(length, seed, dtype, size) for seed, length in enumerate(LENGTHS)]
    cache = SlotCache(Pieces(), 2, 20, ranks, window, scale)
    found = run(cache, sequences, MIXED)
    all_agree(found, sequences, window, scale)
    assert len(set(ranks.allgather(b"".join(out.tobytes() for out in found)))) == 1


def test_what_stands_beside_a_token_changes_no_bit_of_its_attention(ranks):
    sequences = [sequence(length, seed, np.float32) for seed, length in enumerate(LENGTHS)]
    apart = [[piece] for micro_batch in MIXED for piece in micro_batch]
    together, alone = (run(SlotCache(Pieces(), 2, 20, ranks), sequences, each) for each in (MIXED, apart))
    for one, other in zip(together, alone):
        np.testing.assert_array_equal(one, other)


@settings(max_examples=40)
@given(
    st.integers(1, 5), st.lists(st.integers(1, 7), min_size=1, max_size=3), st.none() | st.integers(1, 5),
    st.integers(0, 999),
)  # fmt: skip
def test_sequences_in_any_pieces_on_any_number_of_ranks_equal_dense(size, lengths, window, seed):
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
        all_agree(found, sequences, window)


def test_a_piece_that_does_not_fit_is_refused():
    cache = SlotCache(Pieces(), 2, 8)
    for piece in (Piece(2, 0, 3, 8), Piece(0, 6, 3, 8), Piece(0, 0, 3, 9), Piece(0, 0, 2, 8)):
        cache.pieces.begin([piece])
        with pytest.raises(ArgumentError, match="does not fit into the" if piece.rows == 3 else "not what its pieces"):
            cache.forward(*sequence(3, 0))
