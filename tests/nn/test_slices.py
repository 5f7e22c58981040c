"""Stages that take sequences in slices: the same results as with whole ones, and which layers cannot."""

from itertools import accumulate

import numpy as np
import pytest

from mpipipe import nn
from mpipipe.attention import Local, Sliced
from mpipipe.errors import ArgumentError
from mpipipe.language.models import GPT
from mpipipe.nn.layers.layer import Layer

SEQ, BATCH = 24, 2
SIZES = dict(vocab=17, dim=16, layers=2, heads=4, kv_heads=2, hidden=24, seq_len=SEQ)


def data(vocab=17):
    rng = np.random.default_rng(0)
    return rng.integers(0, vocab, (2, BATCH, SEQ)), rng.standard_normal((2, BATCH, SEQ, vocab))


def same(found, expected):
    for one, other in zip(found, expected):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-12 * np.abs(other).max())


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
    attends = [layer._attend for _, layer in stage.named_layers if isinstance(layer, nn.SelfAttention)]
    assert [len(each._sequences) for each in attends] == [0, 1]
    for at, part in ((1, slice(12, 24)), (0, slice(0, 12))):
        stage.backward(dy[0][:, part], kept[at])
    assert not attends[1]._sequences


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
        nn.Dropout(0.1), nn.Keep("a"), nn.Join("a", None), nn.Join("a", 1),
        attention_of(Sliced(Local(), (5, 3))), nn.Head(8, 9),
    ]  # fmt: skip
    stage = nn.Stage(layers, first=3)
    wrong = ["5 (LearnedPositions)", "7 (SelfAttention)", "8.layer.1 (SelfAttention)", "9 (Conv)", "10.layer.2 (Own)",
             "16 (Join)"]  # fmt: skip
    assert stage.unsliceable() == wrong
    assert stage.unsliceable(rows) == [*wrong, "17 (SelfAttention)"]
    assert "mixes_positions" in vars(Layer) and Layer.mixes_positions


def test_positions_of_a_layer_are_refused():
    with pytest.raises(ArgumentError, match="leave positions out"):
        nn.SelfAttention(8, 2, attend=Sliced(Local(), (4, 4)), positions=np.arange(8))
