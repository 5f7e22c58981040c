"""Attention to slices of a sequence against dense attention to the whole, on one rank and in rings."""

import gc
import weakref
from itertools import accumulate, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.device_attention import agrees as agrees_on_device
from support.device_attention import make
from support.reference_attention import agrees, agrees_by_row, dense
from support.rings import arrays, refused

from mpipipe import arrays as backend
from mpipipe import attention
from mpipipe.attention import Layout, Local, Ring, Sliced
from mpipipe.attention.layout import KINDS
from mpipipe.errors import ArgumentError, MismatchError
from mpipipe.job import inprocess
from mpipipe.nn import Position


def through(attend, sequences, rank=0, segments=None, again=False, room=False, place=lambda x: x):
    """[(out, lse, dq, dk, dv)] of this rank's rows of sequences whose slices alternate; lse is (batch, rows, heads)."""
    slices, cuts = len(attend.lengths), [0, *accumulate(attend.slice_rows)]
    mine = [[attend.layout.shard(x, rank) for x in whole] for whole in sequences]
    found: list = [[None] * slices for _ in sequences]
    saved: dict = {}

    def part(number, at, which):
        return [place(mine[number][x][:, cuts[at] : cuts[at + 1]]) for x in which]

    def forward(number, at):
        attend.begin(Position(step=1, microbatch=number * slices + at))
        options = {} if segments is None else {"segments": segments[number]}
        assert (
            attend.positions(attend.slice_rows[at]).tolist()
            == attend.layout.positions(rank)[cuts[at] : cuts[at + 1]].tolist()
        )
        out, saved[number, at] = attend.forward(*part(number, at, (0, 1, 2)), **options)
        return out

    for at in range(slices):
        for number in range(len(sequences)):
            found[number][at] = [forward(number, at)]
    for at in reversed(range(slices)):
        for number in range(len(sequences)):
            if again:
                np.testing.assert_array_equal(*backend.download(found[number][at][0], forward(number, at)))
            kept = saved.pop((number, at))
            (dout,), three = part(number, at, (3,)), None
            if room:
                batch, rows, heads, _ = kept.own.q.shape
                qkv = np.full((batch, rows, heads + 4, mine[number][0].shape[3]), np.nan, dout.dtype)
                three = qkv[:, :, :heads], qkv[:, :, heads : heads + 2], qkv[:, :, heads + 2 :]
            gradients = attend.backward(dout, kept, three)
            assert three is None or all(one is other for one, other in zip(gradients, three))
            batch, rows, heads = dout.shape[:3]
            lse = backend.download(kept.own.lse)
            lse = lse.reshape(heads, batch, rows).transpose(1, 2, 0) if segments is not None else lse.transpose(0, 2, 1)
            found[number][at] = [backend.download(found[number][at][0]), lse, *backend.download(*gradients)]
    assert not attend._sequences
    return [[np.concatenate(parts, 1) for parts in zip(*of_one)] for of_one in found]


def by_head(result):
    """The result with lse (batch, heads, rows)."""
    return [result[0], result[1].transpose(0, 2, 1), *result[2:]]


def of_ranks(attend, layout, results):
    """Whole arrays of the results of all ranks, for each sequence."""
    return [by_head([layout.unshard(parts) for parts in zip(*of_one)]) for of_one in zip(*results)]


@st.composite
def cases(draw):
    lengths = draw(st.lists(st.integers(1, 12), min_size=1, max_size=8))
    seq = sum(lengths)
    cuts = draw(st.none() | st.lists(st.integers(1, max(1, seq - 1)), max_size=3))
    documents = None if cuts is None else sorted({0, seq, *cuts})
    heads = [dict(heads=4, kv_heads=2), dict(heads=4, kv_heads=4, dim=4, value_dim=5), dict(heads=6, kv_heads=1)]
    sizes = dict(batch=draw(st.integers(1, 2)), **draw(st.sampled_from(heads)))
    return lengths, draw(st.none() | st.integers(1, seq + 2)), documents, sizes, draw(st.floats(0.1, 1) | st.none())


@settings(max_examples=40)
@given(cases(), st.integers(1, 5), st.sampled_from(KINDS), st.booleans(), st.booleans())
def test_any_slices_on_any_ring_are_dense_attention_to_the_whole(case, ranks, kind, again, room):
    lengths, window, documents, sizes, scale = case
    whole = arrays(sum(lengths), **sizes)
    segments = None if documents is None else np.searchsorted(documents, np.arange(sum(lengths)), "right") - 1
    options = dict(window=window, segments=segments, scale=scale)
    expected = dense(*whole, True, window, documents, scale)
    room = room and sizes["kv_heads"] == 2  # side by side in one array, as SelfAttention has it
    agrees(by_head(through(Sliced(Local(**options), lengths), [whole], again=again, room=room)[0]), expected)

    def on_rank(comm):
        attend = Sliced(Ring(comm, layout=kind, **options), lengths)
        return through(attend, [whole], comm.rank, again=again)

    found = of_ranks(None, Layout(kind, ranks, sum(lengths), lengths), inprocess.run(ranks, on_rank))
    agrees(found[0], expected)


@settings(max_examples=25)
@given(cases(), st.integers(1, 4), st.sampled_from(KINDS), st.integers(0, 2**32))
def test_documents_of_rows_change_from_sequence_to_sequence(case, ranks, kind, seed):
    lengths, window, _, sizes, _ = case
    seq, batch, rng = sum(lengths), sizes["batch"], np.random.default_rng(seed)
    sequences = [arrays(seq, seed=number, **sizes) for number in range(2)]
    segments = [np.stack([np.cumsum(rng.random(seq) < 0.2) for _ in range(batch)]) for _ in sequences]

    def check(results):
        for found, whole, rows in zip(results, sequences, segments):
            agrees_by_row(found, whole, rows, window)

    check(map(by_head, through(Sliced(Local(window=window), lengths), sequences, segments=segments)))

    def on_rank(comm):
        return through(Sliced(Ring(comm, layout=kind, window=window), lengths), sequences, comm.rank, segments)

    check(of_ranks(None, Layout(kind, ranks, seq, lengths), inprocess.run(ranks, on_rank)))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_other_dtypes_on_the_host_and_on_the_gpu(place, dtype):
    whole = make(dtype, seq=30)
    segments = [np.repeat([[0, 1], [5, 4]], 15, axis=1)]
    for options, documents in (({}, None), ({"segments": segments}, [0, 15, 30])):
        found = by_head(through(Sliced(Local(window=12), (13, 10, 7)), [whole], place=place, **options)[0])
        agrees_on_device(found, dense(*whole, True, 12, documents), dtype)
    lengths = (18, 12)

    def on_rank(comm):
        return through(Sliced(Ring(comm, layout="zigzag"), lengths), [whole], comm.rank, place=place)

    found = of_ranks(None, Layout("zigzag", 2, 30, lengths), inprocess.run(2, on_rank))
    agrees_on_device(found[0], dense(*whole), dtype)


def test_a_ring_of_whole_sequences_takes_shards_of_slices():
    whole, layout = arrays(40), Layout("zigzag", 2, 40, (23, 17))
    assert [layout.positions(rank).size for rank in (0, 1)] == [20, 20]

    def on_rank(comm):
        mine = [layout.shard(x, comm.rank) for x in whole]
        for ring in (Ring(comm, layout=layout), attention.Ulysses(comm, layout=layout)):
            out, saved = ring.forward(*mine[:3])
            yield out, *ring.backward(mine[3], saved)

    expected = dense(*whole)
    for results in zip(*inprocess.run(2, lambda comm: list(on_rank(comm)))):
        found = [layout.unshard(parts) for parts in zip(*results)]
        agrees([found[0], expected[1], *found[1:]], expected)


# -- Life of the buffers ----------------------------------------------------------------------------------------------


def forwards(attend, whole, units, **options):
    """{unit: saved} of forwards of these units."""
    cuts, saved = [0, *accumulate(attend.slice_rows)], {}
    for unit in units:
        at = unit % len(attend.lengths)
        attend.begin(Position(microbatch=unit, **options))
        saved[unit] = attend.forward(*(x[:, cuts[at] : cuts[at + 1]] for x in whole[:3]))[1]
    return saved


def buffers(attend):
    """Weak references to the memory of all sequences under way."""
    return [weakref.ref(x.base) for sequence in attend._sequences.values() for x in sequence.kept[0]]


def test_buffers_live_from_the_first_forward_to_the_last_backward():
    attend, whole = Sliced(Local(), (3, 3, 2)), arrays(8)
    saved = forwards(attend, whole, range(3))
    alive = buffers(attend)
    for at, start in ((2, 6), (1, 3), (0, 0)):
        assert all(each() is not None for each in alive)
        attend.backward(whole[3][:, start : start + attend.lengths[at]], saved.pop(at))
    gc.collect()
    assert alive and not any(each() is not None for each in alive)


def test_nothing_is_kept_where_no_backward_follows():
    attend, whole = Sliced(Local(), (3, 3, 2)), arrays(8)
    saved = forwards(attend, whole, [0, 3, 1, 4], keeps=False)
    alive = buffers(attend)
    assert len(alive) == 4
    saved |= forwards(attend, whole, [2, 5], keeps=False)
    gc.collect()
    assert not any(each() is not None for each in alive) and set(saved.values()) == {None}
    forwards(attend, whole, [0, 1, 0, 1, 2], keeps=False)  # the first of them was given up half way
    assert not attend._sequences


def test_another_step_drops_what_is_left_half_way():
    attend, whole = Sliced(Local(), (3, 3, 2)), arrays(8)
    forwards(attend, whole, [0, 1, 3])
    alive = buffers(attend)
    for other in (dict(step=1), dict(step=1, training=False, keeps=False)):
        forwards(attend, whole, [0], **other)
        assert list(attend._sequences) == [0] and not any(each() is not None for each in alive)


def test_each_layer_has_its_own():
    attend, whole = Sliced(Local(), (5, 3)), arrays(8)
    one, other = attend.for_layer(), attend.for_layer()
    forwards(one, whole, [0])
    with pytest.raises(ArgumentError, match="out of order"):
        forwards(other, whole, [1])
    assert one.with_window(2).for_layer() is not one.with_window(2) is one.with_window(2)


# -- Mistakes ---------------------------------------------------------------------------------------------------------


def test_orders_that_break_a_sequence_are_refused():
    whole = arrays(8)
    for units, match in (([1], "(?s)slice 1 of sequence 0.*0 slices of it"), ([0, 2], "slice 2 of sequence 0"),
                         ([0, 1, 3, 5], "slice 2 of sequence 1 .unit 5")):  # fmt: skip
        with pytest.raises(ArgumentError, match=match):
            forwards(Sliced(Local(), (3, 3, 2)), whole, units)
    with pytest.raises(ArgumentError, match="out of order"):
        forwards(Sliced(Local(), (3, 3, 2)), whole, [0, 1, 1], keeps=False)
    attend = Sliced(Local(), (3, 3, 2))
    saved = forwards(attend, whole, range(3))
    for wrong in (0, 1):
        with pytest.raises(ArgumentError, match=rf"(?s)slice {wrong} of sequence 0.*slice 2"):
            attend.backward(whole[3][:, 3:6], saved[wrong])
    attend.backward(whole[3][:, 6:], saved[2])
    with pytest.raises(ArgumentError, match=r"(?s)slice 2 of sequence 0.*slice 1"):
        attend.backward(whole[3][:, 6:], saved[2])
    with pytest.raises(ArgumentError, match="gradient of the output"):
        attend.backward(whole[3][:, :2], saved[1])


def test_arguments_that_do_not_fit_are_refused():
    q, k, v, _ = arrays(8)
    for inner, lengths, match in (
        (Local(causal=False), (4, 4), "causal mask"), (attention.KVCache(8), (4, 4), "KVCache"),
        (Local(), (8, 0), "at least 1"), (Local(), (), "at least 1"), (Local(), (4.0, 4), "at least 1"),
        *((each, (4, 5), "add up to 8") for each in inprocess.run(1, lambda comm: Ring(comm, seq_len=8))),
        *((each, (4, 4), "Ulysses") for each in inprocess.run(1, attention.Ulysses)),
        *((each, (5, 3), "other slices")
          for each in inprocess.run(1, lambda comm: Ring(comm, layout=Layout("zigzag", 1, 8, (4, 4))))),
    ):  # fmt: skip
        with pytest.raises(ArgumentError, match=match):
            Sliced(inner, lengths)
    with pytest.raises(ArgumentError, match="add up to 9"):
        Layout("zigzag", 2, 9, (4, 4))
    attend = Sliced(Local(segments=[5, 3]), (5, 3))
    with pytest.raises(ArgumentError, match="without having been told"):
        attend.forward(q[:, :5], k[:, :5], v[:, :5])
    attend.begin(Position())
    for call in (lambda: attend.forward(q[:, :4], k[:, :4], v[:, :4]), lambda: attend.positions(8)):
        with pytest.raises(ArgumentError, match=r"(?s)[48] rows.*expected: 5, slice 0"):
            call()
    with pytest.raises(ArgumentError, match="rows are not those"):
        attend.forward(q[:, :5], k[:, :4], v[:, :4])
    with pytest.raises(ArgumentError, match="leave positions out"):
        attend.check_positions(np.arange(5))
    attend.forward(q[:, :5], k[:, :5], v[:, :5])
    attend.begin(Position(microbatch=1))
    with pytest.raises(ArgumentError, match="not like those of the slices before"):
        attend.forward(q[:1, 5:], k[:1, 5:], v[:1, 5:])


def test_a_ring_agrees_on_slices_and_on_mistakes(comm):
    if comm.size == 1:
        return
    with pytest.raises(MismatchError, match="slice_lengths"):
        Sliced(Ring(comm), (5 + comm.rank, 6 - comm.rank))
    refused(comm, ArgumentError, "at least 1", lambda: Sliced(Ring(comm), (5, comm.rank)))
    attend, whole = Sliced(Ring(comm), (2 * comm.size, comm.size)), arrays(3 * comm.size)
    mine = [attend.layout.shard(x, comm.rank)[:, :2] for x in whole[:3]]
    attend.begin(Position())
    rows = 2 - (comm.rank == 1)
    refused(
        comm, ArgumentError, "rows are not those of the slice", lambda: attend.forward(*(x[:, :rows] for x in mine))
    )
    attend.begin(Position(step=1, microbatch=comm.rank > 0))
    with pytest.raises(MismatchError if comm.rank < 0 else (MismatchError, ArgumentError)):
        attend.forward(*mine)


# -- Lengths of equal time --------------------------------------------------------------------------------------------


def cost(start, stop, width, parameters, window):
    """Operations of forward and backward of positions start ... stop - 1."""
    return sum(6 * parameters + 14 * width * min(t + 1, window or stop) for t in range(start, stop))


@given(st.integers(1, 400), st.integers(1, 9), st.sampled_from([0, 1, 16]), st.none() | st.integers(0, 4000),
       st.none() | st.integers(1, 300), st.integers(1, 7))  # fmt: skip
def test_slices_take_equal_time_within_a_unit(seq, slices, width, parameters, window, unit):
    if slices * unit > seq:
        with pytest.raises(ArgumentError, match="fewer slices"):
            attention.slice_lengths(seq, slices, width, parameters, window, unit)
        return
    lengths = attention.slice_lengths(seq, slices, width, parameters, window, unit)
    assert sum(lengths) == seq and len(lengths) == slices and min(lengths) >= unit
    assert not any(length % unit for length in lengths[:-1])
    assert all(one >= other for one, other in zip(lengths, [*lengths[1:-1], lengths[-1] - seq % unit][: slices - 1]))
    parameters = 12 * width**2 if parameters is None else parameters
    if not width and not parameters:
        parameters = 1
    ends = [0, *accumulate(lengths)]
    costs = [cost(*each, width, parameters, window) for each in pairwise(ends)]
    step = cost(seq - 1, seq, width, parameters, window) * unit  # the most that a unit costs
    if min(lengths) > unit:
        assert max(costs[:-1], default=0) - min(costs) <= 3 * step + 1e-9 * sum(costs)


def test_numbers_without_sense():
    for wrong in (dict(slices=0), dict(unit=0), dict(width=-1.0), dict(parameters=-1), dict(window=0), dict(slices=9)):
        with pytest.raises(ArgumentError, match="cannot be cut"):
            attention.slice_lengths(**{"seq_len": 8, "slices": 2, **wrong})
