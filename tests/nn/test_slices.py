"""Stages that take sequences in slices: the same results as with whole ones, and which layers cannot."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import pytest

from mpipipe import attention, nn
from mpipipe.attention import Layout, Local, Ring, Sliced
from mpipipe.errors import ArgumentError
from mpipipe.job import inprocess
from mpipipe.language.models import GPT
from mpipipe.nn.layers.layer import Layer

SEQ, BATCH = 24, 2
SIZES = dict(vocab=17, dim=16, layers=2, heads=4, kv_heads=2, hidden=24, seq=SEQ)
CASES = {
    "rotary": {},
    "learned positions": dict(positions="learned"),
    "windows": dict(windows=(7, None)),
    "norms of heads": dict(qk_norm=True),
}


def stage_of(attend, wrap=lambda layer: layer, **options):
    model = GPT(**SIZES, **options)
    return nn.Stage([wrap(layer) for layer in model.build(attend)], "float64", seed=5)


def run(stage, ids, dy, rows, sequences=2, forwards_again=False):
    """(outputs of sequences, gradients), with their slices by turns: y and dy are (sequences, batch, seq, vocab)."""
    ends, slices = [0, *accumulate(rows)], len(rows)
    y, saved = np.empty_like(dy), {}
    stage.gradients.flat[...] = 0
    for at in range(slices):
        for number in range(sequences):
            part = slice(ends[at], ends[at + 1])
            position = nn.Position(step=3, microbatch=number * slices + at)
            y[number, :, part], saved[number, at] = stage.forward(ids[number, :, part], position)
    for at in reversed(range(slices)):
        for number in range(sequences):
            part = slice(ends[at], ends[at + 1])
            if forwards_again:
                position = nn.Position(step=3, microbatch=number * slices + at)
                saved[number, at] = stage.forward(ids[number, :, part], position)[1]
            stage.backward(dy[number, :, part], saved.pop((number, at)))
    return y, stage.gradients.flat.copy()


def data(vocab=17):
    rng = np.random.default_rng(0)
    return rng.integers(0, vocab, (2, BATCH, SEQ)), rng.standard_normal((2, BATCH, SEQ, vocab))


def same(found, expected):
    for one, other in zip(found, expected):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-12 * np.abs(other).max())


@pytest.mark.parametrize("slices", [1, 2, 3, 8])
@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_a_model_whose_layers_share_one_attend_object_equals_that_of_whole_sequences(slices, options):
    lengths, (ids, dy) = attention.slice_lengths(SEQ, slices, 4), data()
    expected = run(stage_of(Local(), **options), ids, dy, (SEQ,))
    same(run(stage_of(Sliced(Local(), lengths), **options), ids, dy, lengths), expected)
    same(run(stage_of(Sliced(Local(), lengths), **options), ids, dy, lengths, forwards_again=True), expected)
    same(run(stage_of(Sliced(Local(), lengths), nn.Recompute, **options), ids, dy, lengths), expected)


@pytest.mark.parametrize("kind", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_each_rank_of_a_ring_has_its_shard_of_each_slice(kind, positions):
    ids, dy = data()
    lengths = (13, 7, 4)
    layout = Layout(kind, 2, SEQ, lengths)
    y, gradients = run(stage_of(Local(), positions=positions), ids, dy, (SEQ,))

    def on_rank(comm):
        attend = Sliced(Ring(comm, layout=layout), lengths)
        mine = (layout.shard(x, comm.rank, axis=2) for x in (ids, dy))
        return run(stage_of(attend, positions=positions), *mine, attend.slice_rows)

    ys, parts = zip(*inprocess.run(2, on_rank))
    same((layout.unshard(ys, axis=2), sum(parts)), (y, gradients))


def test_coordinates_of_the_whole_sequence():
    coordinates = np.random.default_rng(1).standard_normal((SEQ, 2))

    def outputs(attend, rows):
        stage = nn.Stage([nn.SelfAttention(16, 2, attend=attend, coordinates=coordinates)], "float64", seed=2)
        x = np.random.default_rng(2).standard_normal((1, SEQ, 16))
        ends = [0, *accumulate(rows)]
        both = [stage.forward(x[:, ends[u] : ends[u + 1]], nn.Position(microbatch=u)) for u in range(len(rows))]
        dx = [stage.backward(2 * y, saved) for y, saved in both[::-1]][::-1]
        return np.concatenate([y for y, _ in both], 1), np.concatenate(dx, 1)

    same(outputs(Sliced(Local(), (10, 14)), (10, 14)), outputs(Local(), (SEQ,)))


def test_layers_below_the_end_of_backwards_keep_nothing():
    lengths = (12, 12)
    model = GPT(**SIZES)
    stage = nn.Stage(model.build(Sliced(Local(), lengths)), "float64", frozen=["0.*", "1.*", "2.*"])
    stage.end_backward(True)
    ids, dy = data()
    kept = []
    for at, part in enumerate((slice(0, 12), slice(12, 24))):
        kept.append(stage.forward(ids[0][:, part], nn.Position(microbatch=at))[1])
    attends = [layer._attend for _, layer in stage._named_layers() if isinstance(layer, nn.SelfAttention)]
    assert [len(each._sequences) for each in attends] == [0, 1]
    for at, part in ((1, slice(12, 24)), (0, slice(0, 12))):
        stage.backward(dy[0][:, part], kept[at])
    assert not attends[1]._sequences


def test_tables_of_all_slices_are_kept(monkeypatch):
    stage = stage_of(Sliced(Local(), (3,) * 8))
    made = []
    make = stage.tables.make
    monkeypatch.setattr(stage.tables, "make", lambda *arguments: made.append(1) or make(*arguments))
    for _ in range(2):
        run(stage, *data(), (3,) * 8)
    assert len(made) == 8  # of both layers, forward and backward


# -- Which layers cannot take slices ----------------------------------------------------------------------------------


class Own(nn.Linear):
    """A class that may mix positions, derived from one that does not."""


def test_layers_that_mix_positions_are_named():
    good, rows = Sliced(Local(), (4, 4)), (4, 4)
    attention_of = lambda attend: nn.SelfAttention(8, 2, attend=attend)  # noqa: E731
    layers = [
        nn.Embedding(9, 8), nn.LearnedPositions(8, 8, good), nn.LearnedPositions(8, 8), attention_of(good),
        attention_of(Local()), nn.Recompute(nn.PreNormResidual(nn.RMSNorm(8), attention_of(Local()))),
        nn.Conv(8, 8, (3,)),
        nn.Residual(nn.Sequential([nn.FeedForward(8, 9), nn.SwiGLU(8, 9), Own(8, 8)])), nn.LayerNorm(8), nn.Gelu(),
        nn.Dropout(0.1), nn.GroupNorm(2, 8), nn.Keep("a"), nn.Join("a", None), nn.Join("a", 1),
        attention_of(Sliced(Local(), (5, 3))), nn.Head(8, 9),
    ]  # fmt: skip
    stage = nn.Stage(layers, first=3)
    wrong = ["5 (LearnedPositions)", "7 (SelfAttention)", "8.layer.1 (SelfAttention)", "9 (Conv)", "10.layer.2 (Own)",
             "14 (GroupNorm)", "17 (Join)"]  # fmt: skip
    assert stage.unsliceable() == wrong
    assert stage.unsliceable(rows) == [*wrong, "18 (SelfAttention)"]
    assert "mixes_positions" in vars(Layer) and Layer.mixes_positions


def test_positions_of_a_layer_are_refused():
    with pytest.raises(ArgumentError, match="leave positions out"):
        nn.SelfAttention(8, 2, attend=Sliced(Local(), (4, 4)), positions=np.arange(8))
