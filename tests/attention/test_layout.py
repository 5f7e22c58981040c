"""Layouts and the planner against brute force over positions; one Layout for data, ring and positions."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.reference_attention import dense, visible_pairs
from support.rings import masks, refused
from support.tolerance import within

from mpipipe import attention, nn
from mpipipe.attention import Layout, Local, Ring, mask
from mpipipe.attention.kernels import host
from mpipipe.attention.layout import KINDS
from mpipipe.errors import ArgumentError, MismatchError, PeerError
from mpipipe.language.models import GPT


def seen(slices, rows, keys):
    """How often each (row, key) pair is covered by the slices."""
    count = np.zeros((rows, keys), int)
    for part in slices:
        i, j = np.mgrid[: part.q_stop - part.q_start, : part.k_stop - part.k_start]
        visible = np.ones(i.shape, bool)
        if part.low is not None:
            visible &= j - i >= part.low
        if part.high is not None:
            visible &= j - i <= part.high
        assert visible.any(0).all() and visible.any(1).all(), "no row and no key that sees nothing at the edges"
        assert visible.sum() == part.pairs
        count[part.q_start : part.q_stop, part.k_start : part.k_stop] += visible
    return count


@st.composite
def cases(draw):
    seq = draw(st.integers(1, 40))
    return draw(st.sampled_from(KINDS)), draw(st.integers(1, 5)), seq, draw(masks(seq, keys=False))[1]


@settings(max_examples=150)
@given(cases())
def test_every_visible_pair_is_planned_once_and_no_other(case):
    kind, ranks, seq, view = case
    layout = Layout(kind, ranks, seq)
    visible = visible_pairs(seq, seq, *view)
    for q_rank, k_rank in np.ndindex(ranks, ranks):
        expected = visible[layout.positions(q_rank)][:, layout.positions(k_rank)]
        slices = layout.needs(q_rank, k_rank, *view)
        for planned in (slices, mask.in_one_band(slices)):
            np.testing.assert_array_equal(seen(planned, *expected.shape), expected)


@given(st.sampled_from(KINDS), st.integers(1, 7), st.integers(0, 50))
def test_shards_cover_the_sequence_and_come_together_again(kind, ranks, seq):
    layout = Layout(kind, ranks, seq)
    every = np.concatenate([layout.positions(rank) for rank in range(ranks)])
    assert sorted(every.tolist()) == list(range(seq))
    array = np.random.default_rng(0).normal(size=(2, seq, 3))
    shards = [layout.shard(array, rank) for rank in range(ranks)]
    assert [shard.shape[1] for shard in shards] == [layout.length(rank) for rank in range(ranks)]
    assert all(shard.flags.c_contiguous for shard in shards)
    np.testing.assert_array_equal(layout.unshard(shards), array)


@pytest.mark.parametrize("window, steps", [(1, 1), (2, 2), (256, 2), (257, 2), (258, 3), (10_000, 4), (None, 4)])
def test_steps_that_nobody_needs_are_not_taken(window, steps):
    layout = Layout("contiguous", 4, 1024)
    assert layout.steps(True, window) == steps
    if window is not None and window < 700:
        assert steps == -(-(window - 1) // 256) + 1


def test_segments_as_numbers_or_as_lengths():
    assert mask.document_offsets(None, 5) is None
    assert mask.document_offsets([3, 2], 5) == mask.document_offsets([7, 7, 7, 4, 4], 5) == [0, 3, 5]
    for wrong in ([3, 3], [5, 0], [0, 0, 1, 1, 0]):
        with pytest.raises(ArgumentError, match="segments"):
            mask.document_offsets(wrong, 5)
    for wrong in ([[1], [4]], [2.0, 3.0]):
        with pytest.raises(ArgumentError, match="segments"):
            Local(segments=wrong)


def test_wrong_layouts_and_arrays_of_another_length():
    for arguments in (("spiral", 2, 8), ("zigzag", 0, 8), ("zigzag", 2, -1), ("zigzag", 2, 1.5)):
        with pytest.raises(ArgumentError, match="layout"):
            Layout(*arguments)
    layout = Layout("zigzag", 2, 8)
    with pytest.raises(ArgumentError, match="another length"):
        layout.shard(np.zeros((1, 9)), 0)
    with pytest.raises(ArgumentError, match="other lengths"):
        layout.unshard([np.zeros((1, 5)), np.zeros((1, 3))])


# -- one Layout for data, ring and positions: contiguous where nothing is said, and what differs is refused


SEQ, HEADS, DIM = 23, 2, 8


def whole():
    return np.random.default_rng(0).standard_normal((3, 1, SEQ, HEADS, DIM))


@pytest.mark.parametrize("kind", [None, *KINDS])
@pytest.mark.parametrize("said", ["name", "layout"])
def test_the_default_is_the_order_of_the_shards(comm, kind, said):
    layout = Layout(kind or "contiguous", comm.size, SEQ)
    mine = [layout.shard(x, comm.rank) for x in whole()]
    options = {} if kind is None else {"layout": layout if said == "layout" else kind}
    for out in (Ring(comm, **options).forward(*mine)[0], attention.ring_attention(*mine, comm, **options)[0]):
        expected = dense(*whole(), np.zeros((1, SEQ, HEADS, DIM)))
        within(layout.unshard(comm.allgather(out)), expected[0], expected.bounds(np.float64)[0], "out")


def test_a_layout_that_does_not_fit_is_refused(comm):
    layout = Layout("striped", comm.size, SEQ)
    mine = [layout.shard(x, comm.rank) for x in whole()]
    Ring(comm, layout=layout, seq_len=SEQ)  # said twice, and alike
    refused(comm, ArgumentError, "another length", lambda: Ring(comm, layout=layout, seq_len=SEQ + 1))
    more = Layout("striped", comm.size + 1, SEQ)
    refused(comm, ArgumentError, "another number of ranks", lambda: attention.ring_attention(*mine, comm, layout=more))
    longer = Layout("striped", comm.size, SEQ + comm.size)
    twice = "may be one document, or documents of one position"
    ones = Layout("contiguous", comm.size, 4 * comm.size)
    short = [np.zeros((1, 4, 1, 4))] * 3
    refused(comm, ArgumentError, twice, lambda: Ring(comm, layout=ones, segments=[1] * ones.seq_len).forward(*short))
    refused(comm, ArgumentError, "do not cover", lambda: Ring(comm, layout=longer).forward(*mine))
    refused(comm, ArgumentError, "unknown layout", lambda: Ring(comm, layout=3))
    if comm.size > 1:
        mixed = Layout("zigzag" if comm.rank else "striped", comm.size, SEQ)
        refused(comm, MismatchError, "differ in layout", lambda: Ring(comm, layout=mixed))


def model(attend, positions=None, learned=False):
    options = dict(positions="learned", norm="layer") if learned else {}
    return GPT(dim=16, layers=1, heads=2, vocab=11, seq_len=SEQ, **options).build(attend, positions)


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_that_is_given_no_positions_asks_the_ring(comm, kind, learned):
    layout = Layout(kind, comm.size, SEQ)
    ids = layout.shard(np.arange(SEQ).reshape(1, SEQ) % 11, comm.rank)
    asked = nn.Stage(model(Ring(comm, layout=layout), None, learned), dtype="float64")
    given = nn.Stage(model(Ring(comm, layout=layout), layout.positions(comm.rank), learned), dtype="float64")
    alone = nn.Stage(model(attention.Local(), None, learned), dtype="float64")
    out = asked.forward(ids)[0]
    assert out.tobytes() == given.forward(ids)[0].tobytes()
    dense = alone.forward(np.arange(SEQ).reshape(1, SEQ) % 11)[0]
    np.testing.assert_allclose(layout.unshard(comm.allgather(out)), dense, rtol=0, atol=1e-12)


@pytest.mark.mpi(min_size=2)
def test_positions_of_another_layout_are_refused_when_the_layers_are_made(comm):
    ring = Ring(comm, layout=Layout("zigzag", comm.size, SEQ))
    other = Layout("contiguous", comm.size, SEQ).positions(comm.rank)
    for learned in (False, True):
        with pytest.raises(ArgumentError, match=r"(?s)differ in the positions.*the zigzag shard.*one Layout for all"):
            model(ring, other, learned)
    with pytest.raises(ArgumentError, match="differ in the positions"):
        nn.SelfAttention(16, 2, attend=ring.with_window(3), positions=other)
    nn.SelfAttention(16, 2, attend=ring, positions=Layout("zigzag", comm.size, SEQ).positions(comm.rank))


@pytest.mark.mpi(min_size=2)
def test_positions_of_another_layout_than_the_name_are_refused_in_the_forward(comm):
    """Without a Layout the length is known when the shards are there; the ring is over then, on all ranks."""
    layout = Layout("striped", comm.size, 2 * comm.size)
    stage = nn.Stage([nn.SelfAttention(16, 2, attend=Ring(comm), positions=layout.positions(comm.rank))])
    with pytest.raises((ArgumentError, PeerError), match="differ in the positions") as caught:
        stage.forward(np.ones((1, 2, 16), np.float32))
    assert ArgumentError in comm.allgather(type(caught.value))


@pytest.mark.mpi(min_size=2)
def test_a_ring_of_unknown_length_knows_no_positions_and_rows_must_be_the_shard(comm):
    """Not 0 ... rows - 1 on every rank."""
    layout = Layout("zigzag", comm.size, 4 * comm.size)
    for said, rows, match in (("zigzag", 4, "does not know how long the sequence"), (layout, 5, "are not its shard")):
        stage = nn.Stage([nn.SelfAttention(16, 2, attend=Ring(comm, layout=said))])
        with pytest.raises(ArgumentError, match=match):
            stage.forward(np.ones((1, rows, 16), np.float32))
    unturned = nn.Stage([nn.SelfAttention(16, 2, attend=Ring(comm), rope_base=None)])
    unturned.forward(np.ones((1, 4, 16), np.float32))


def test_positions_may_begin_anew_in_each_document(comm):
    layout = Layout("contiguous", comm.size, 4 * comm.size)
    anew = layout.shard(np.tile(np.arange(4), comm.size), comm.rank, axis=0)
    ring = Ring(comm, layout=layout, segments=[4] * comm.size)
    stage = nn.Stage([nn.SelfAttention(16, 2, attend=ring, positions=anew)])
    stage.forward(np.ones((1, 4, 16), np.float32))


# -- The table of a ring, against what a ring really sends and computes, and brute force over positions ---------------


class Recording:
    """The host's kernel, which notes whose block it attends to: keys hold the number of their rank."""

    def __init__(self):
        self.blocks = []

    def forward(self, block, *rest):
        self.note(block)
        host.forward(block, *rest)

    def backward(self, block, *rest):
        self.note(block)
        host.backward(block, *rest)

    def note(self, block):
        self.blocks.append((int(block.k.flat[0]), seen(block.slices, block.q.shape[1], block.k.shape[1])))


VIEWS = [(True, None), (False, None), (True, 7), (True, 2)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("causal, window", VIEWS)
def test_a_ring_does_what_its_table_says(comm, monkeypatch, kind, causal, window):
    layout, kernel = Layout(kind, comm.size, 24), Recording()
    monkeypatch.setattr(attention.kernels, "chosen", lambda *arrays: kernel)
    mine = [layout.shard(x, comm.rank) for x in np.random.default_rng(0).standard_normal((3, 1, 24, HEADS, DIM))]
    mine[1][:] = comm.rank
    ring = Ring(comm, causal, layout, window)
    tables = [layout.table(comm.rank, causal, window, backward=backward) for backward in (False, True)]
    if len(tables[0]) == 1:
        assert tables == [[(0, None, None, comm.rank, *tables[0][0][-2:])]] * 2
        return
    saved = ring.forward(*mine)[1]
    exchange, started = ring._exchange(saved.plan), []
    start = exchange.start

    def noted(channel, outgoing, dest, incoming, source):
        started.append((dest, source))
        return start(channel, outgoing, dest, incoming, source)

    monkeypatch.setattr(exchange, "start", noted)
    for table, call, arguments in zip(tables, (ring.forward, ring.backward), (mine, (mine[2], saved))):
        kernel.blocks.clear()
        started.clear()
        call(*arguments)
        assert started == [(row.send_to, row.receive_from) for row in table if row.send_to is not None]
        assert [row.step for row in table] == list(range(layout.steps(causal, window)))
        assert [(row.keys_of, row.pairs) for row in table] == [(owner, count.sum()) for owner, count in kernel.blocks]
        i = layout.positions(comm.rank)[:, None]
        for row, (_, count) in zip(table, kernel.blocks):
            j = layout.positions(row.keys_of)
            visible = (j <= i) | (not causal)
            visible &= (window is None) | (i - j < (window or 0))
            np.testing.assert_array_equal(count, visible)
            assert (row.mask == "full") == visible.all() and (row.mask == "none") == (not visible.any())
            triangle = [np.array_equal(visible, np.tri(*visible.shape, shift)) for shift in (0, -1)]
            assert row.mask != "causal" or any(triangle)
            # a window may cut a triangle into parts
            assert row.mask == "causal" or not any(triangle) or row.pairs in (0, 1) or window is not None


def test_tables_that_do_not_exist_and_those_of_nothing():
    for rank in (-1, 3):
        with pytest.raises(ArgumentError, match="no such rank"):
            Layout("zigzag", 3, 9).table(rank)
    assert str(Layout("contiguous", 2, 0).table(0)).splitlines()[2].split() == "0 - - 0 none 0".split()
