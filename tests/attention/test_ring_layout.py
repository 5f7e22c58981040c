"""One Layout for data, ring and positions: what is not said is the order of the shards, and what differs is refused."""

from __future__ import annotations

import numpy as np
import pytest
from support.rings import refused

from mpipipe import attention, nn
from mpipipe.attention import Layout, Ring
from mpipipe.attention.layout import KINDS
from mpipipe.errors import ArgumentError, MismatchError, PeerError
from mpipipe.language.models import GPT

SEQ, HEADS, DIM = 23, 2, 8


def whole():
    return np.random.default_rng(0).standard_normal((3, 1, SEQ, HEADS, DIM))


def softmax_attention(q, k, v):
    """Causal attention in plain numpy."""
    scores = np.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[3])
    scores[..., np.triu_indices(q.shape[1], 1)[0], np.triu_indices(q.shape[1], 1)[1]] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("bhqk,bkhd->bqhd", weights / weights.sum(-1, keepdims=True), v)


@pytest.mark.parametrize("kind", [None, *KINDS])
@pytest.mark.parametrize("said", ["name", "layout"])
def test_the_default_is_the_order_of_the_shards(comm, kind, said):
    layout = Layout(kind or "contiguous", comm.size, SEQ)
    mine = [layout.shard(x, comm.rank) for x in whole()]
    options = {} if kind is None else {"layout": layout if said == "layout" else kind}
    for out in (Ring(comm, **options).forward(*mine)[0], attention.ring_attention(*mine, comm, **options)[0]):
        found = layout.unshard(comm.allgather(out))
        np.testing.assert_allclose(found, softmax_attention(*whole()), rtol=0, atol=1e-13)


def test_a_layout_that_does_not_fit_is_refused(comm):
    layout = Layout("striped", comm.size, SEQ)
    mine = [layout.shard(x, comm.rank) for x in whole()]
    Ring(comm, layout=layout, seq_len=SEQ)  # said twice, and alike
    refused(comm, ArgumentError, "another length", lambda: Ring(comm, layout=layout, seq_len=SEQ + 1))
    more = Layout("striped", comm.size + 1, SEQ)
    refused(comm, ArgumentError, "another number of ranks", lambda: attention.ring_attention(*mine, comm, layout=more))
    longer = Layout("striped", comm.size, SEQ + comm.size)
    refused(comm, ArgumentError, "do not cover", lambda: Ring(comm, layout=longer).forward(*mine))
    refused(comm, ArgumentError, "unknown layout", lambda: Ring(comm, layout=3))
    if comm.size > 1:
        mixed = Layout("zigzag" if comm.rank else "striped", comm.size, SEQ)
        refused(comm, MismatchError, "differ in layout", lambda: Ring(comm, layout=mixed))


def model(attend, positions=None, learned=False):
    options = dict(positions="learned", norm="layer") if learned else {}
    return GPT(dim=16, layers=1, heads=2, vocab=11, seq=SEQ, **options).build(attend, positions)


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
def test_a_ring_of_unknown_length_knows_no_positions(comm):
    """Not 0 ... rows - 1 on every rank."""
    stage = nn.Stage([nn.SelfAttention(16, 2, attend=Ring(comm, layout="zigzag"))])
    with pytest.raises(ArgumentError, match="does not know how long the sequence is"):
        stage.forward(np.ones((1, 4, 16), np.float32))
    unturned = nn.Stage([nn.SelfAttention(16, 2, attend=Ring(comm), rope_base=None)])
    unturned.forward(np.ones((1, 4, 16), np.float32))


@pytest.mark.mpi(min_size=2)
def test_rows_that_are_not_the_shard_of_the_layout(comm):
    stage = nn.Stage([nn.SelfAttention(16, 2, attend=Ring(comm, layout=Layout("zigzag", comm.size, 4 * comm.size)))])
    with pytest.raises(ArgumentError, match="are not its shard of the sequence"):
        stage.forward(np.ones((1, 5, 16), np.float32))


def test_positions_may_begin_anew_in_each_document(comm):
    layout = Layout("contiguous", comm.size, 4 * comm.size)
    anew = layout.shard(np.tile(np.arange(4), comm.size), comm.rank, axis=0)
    ring = Ring(comm, layout=layout, segments=[4] * comm.size)
    stage = nn.Stage([nn.SelfAttention(16, 2, attend=ring, positions=anew)])
    stage.forward(np.ones((1, 4, 16), np.float32))
