"""Which layer of a stage writes to which gradients: found by looking at the gradients after each layer's backward."""

import numpy as np
import pytest

from mpipipe import nn
from mpipipe.attention import Local
from mpipipe.language.models import GPT
from mpipipe.nn.write_hooks import gradient_ready
from mpipipe.pipeline.ties import User, share

SMALL = dict(vocab=32, dim=16, layers=2, heads=4, kv_heads=2, hidden=24, seq=12)


def built(first=0, **sizes):
    return nn.Stage(GPT(**{**SMALL, **sizes}).build(Local(causal=True)), seed=3, first=first, dtype="float64")


def shared():
    """A stage whose head uses the storage of its embedding, as a pipeline leaves it within a step."""
    stage = built(tied=True)
    (names,) = stage.ties.values()
    share([(User(stage, names[1]), User(stage, names[0]))])
    stage.use_parts(True)
    return stage


def recomputing():
    layers = [nn.Embedding(32, 16), nn.Recompute(nn.Residual(nn.Sequential([nn.RMSNorm(16), nn.SwiGLU(16, 24)])))]
    return nn.Stage([*layers, nn.LayerNorm(16), nn.Gelu(), nn.Linear(16, 32)], seed=3, dtype="float64", first=4)


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("made", [built, lambda: built(first=7), lambda: built(tied=True), shared, recomputing])
def test_a_layer_writes_to_its_own_pieces_and_only_before_it_has_ended(made, split):
    stage = made()
    writers = gradient_ready(stage)
    assert writers is not None and writers.arrays[0].array is stage.gradients.flat
    assert len(writers.arrays) == 1 + len(stage.buffers.parts)
    before = [written.array.copy() for written in writers.arrays]
    told, changed = [], []

    def ended(layer):
        place = writers.places[layer]
        told.append(place)
        for written, old in zip(writers.arrays, before):
            start = 0
            for stop, writer in written.pieces:
                if not np.array_equal(written.array[start:stop], old[start:stop]):
                    assert writer == place, "another layer has written here"
                    changed.append((place, id(written.array), start))
                start = stop
            assert start == written.array.size
            old[...] = written.array

    stage.on_layer_done = ended
    y, saved = stage.forward(np.arange(24).reshape(2, 12))
    if split:
        _, pending = stage.backward_input(np.ones_like(y), saved)
        assert not told
        stage.backward_weight(pending)
    else:
        stage.backward(np.ones_like(y), saved)
    assert told == list(range(len(stage.layers)))[::-1]
    pieces = {(writer, id(w.array), start) for w in writers.arrays for start, writer in _starts(w.pieces)}
    assert set(changed) == pieces
    stage.on_layer_done = None
    stage.backward(np.ones_like(y), saved)
    assert len(told) == len(stage.layers)


def _starts(pieces):
    return [(start, writer) for start, (_, writer) in zip([0, *(stop for stop, _ in pieces)], pieces)]


class Odd(nn.Linear):
    """A layer of the user's."""


@pytest.mark.parametrize("layers", [[Odd(3, 3)], [nn.Sequential([nn.Gelu(), nn.Residual(Odd(3, 3))])]])
def test_layers_of_others_have_unknown_writers(layers):
    assert gradient_ready(nn.Stage(layers)) is None
