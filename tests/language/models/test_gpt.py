"""The GPT against one written down in plain numpy, and what does not depend on how it is cut into stages."""

from __future__ import annotations

import math

import numpy as np
import pytest
from support import reference_gpt
from support.tolerance import close, largest
from support.training_tolerance import path

from mpipipe import nn, schedules
from mpipipe.attention import Local
from mpipipe.errors import ArgumentError
from mpipipe.language.models import GPT

SMALL = dict(vocab=11, dim=16, layers=2, heads=4, hidden=24, seq=6)


def ids(model, batch=3, seed=0):
    return np.random.default_rng(seed).integers(0, model.vocab, (batch, model.seq))


def whole(model, dtype="float64", seed=0):
    return nn.Stage(model.build(Local()), dtype=dtype, seed=seed)


@pytest.mark.parametrize(
    "extra", [{}, {"kv_heads": 2}, {"kv_heads": 1, "rope_base": 50.0}, {"tied": True}, {"layers": 1}]
)
def test_loss_and_gradient_equal_those_of_an_independent_model(extra):
    model = GPT(**{**SMALL, **extra})
    stage, tokens, targets = whole(model), ids(model), ids(model, seed=1)
    for name, array in stage.parameters.items():
        if name.endswith("gain"):
            array += np.random.default_rng(1).normal(0, 0.3, array.shape)
    logits, saved = stage.forward(tokens)
    value, gradient = nn.softmax_cross_entropy(logits, targets)
    stage.backward(gradient, saved)
    assert logits.shape == (*tokens.shape, model.vocab)
    operations = path(model, tokens.size)
    close(value, reference_gpt.loss(stage.parameters, model, tokens, targets), operations)
    for name, array in stage.parameters.items():
        direction = np.random.default_rng(2).standard_normal(array.shape)
        slope = reference_gpt.derivative(stage.parameters, model, tokens, targets, {name: direction})
        size = np.abs(stage.gradients[name] * direction).sum()
        close((stage.gradients[name] * direction).sum(), slope, operations, size, what=name)


@pytest.mark.parametrize("stages", [2, 3, 6])
def test_cutting_into_stages_changes_neither_parameters_nor_logits(stages):
    model, x = GPT(**SMALL, dropout=0.2), None
    one, tokens = whole(model, "float32", seed=4), ids(GPT(**SMALL))
    layers, x, seen = model.build(Local()), tokens, {}
    for start, stop in schedules.partition(model.costs(), stages):
        part = nn.Stage(layers[start:stop], dtype="float32", seed=4, first=start)
        x = part.forward(x)[0]
        seen.update(part.parameters)
    assert list(seen) == list(one.parameters)
    for name, array in one.parameters.items():
        np.testing.assert_array_equal(seen[name], array)
    np.testing.assert_array_equal(x, one.forward(tokens)[0])


def test_a_byte_does_not_see_what_comes_after_it():
    model = GPT(**SMALL)
    stage, tokens = whole(model), ids(model)
    before = stage.forward(tokens)[0]
    changed = tokens.copy()
    changed[:, 4] = (changed[:, 4] + 1) % model.vocab
    after = stage.forward(changed)[0]
    close(before[:, :4], after[:, :4], path(model) / 2, largest(before))  # on the way forward
    assert (abs(before[:, 4:] - after[:, 4:]).max(-1) > 1e-6 * largest(before)).all()  # far beyond rounding


@pytest.mark.parametrize("tied", [False, True])
def test_a_fresh_model_knows_nothing(tied):
    model = GPT(dim=64, layers=3, heads=4, seq=32, tied=tied)
    logits, _ = whole(model, "float32").forward(ids(model))
    loss, _ = nn.softmax_cross_entropy(logits, ids(model, seed=1))
    assert 5 < loss < math.log(256) + 0.7


def test_sizes_by_default_and_the_number_of_parameters():
    model = GPT(vocab=100, dim=96, layers=2, heads=4, kv_heads=2)
    assert model.hidden == 256
    block = 96 + 96 * (96 + 2 * 48) + 96 * 96 + 96 + 3 * 96 * 256
    assert model.parameters == 2 * 100 * 96 + 2 * block + 96
    assert GPT(dim=384, heads=4).hidden == 1024


def test_tied_parameters_count_once_and_are_named_to_the_pipeline():
    model = GPT(**SMALL, tied=True)
    assert model.parameters == GPT(**SMALL).parameters - 11 * 16
    stage = whole(model)
    assert list(stage.ties.values()) == [["0.weight", "5.1.weight"]]
    np.testing.assert_array_equal(stage.parameters["0.weight"], stage.parameters["5.1.weight"])


def test_costs_count_every_layer():
    model = GPT(vocab=256, dim=32, layers=3, heads=4, kv_heads=2, hidden=64, seq=100)
    costs = model.costs()
    assert len(costs) == len(model.build(Local())) == 8
    attention = 2 * 32 * (32 + 16 + 16 + 32) + 4 * 100 * 32 / 2
    assert costs == [32, *[attention, 2 * 3 * 32 * 64] * 3, 2 * 32 * 256]


@pytest.mark.parametrize(
    "sizes",
    [
        {"dim": 0},
        {"layers": 0},
        {"vocab": -1},
        {"seq": 1.5},
        {"heads": 3},
        {"heads": 16},
        {"kv_heads": 3},
        {"hidden": 0},
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes):
    with pytest.raises(ArgumentError) as caught:
        GPT(**{**SMALL, **sizes})
    assert next(iter(sizes)) in str(caught.value)
