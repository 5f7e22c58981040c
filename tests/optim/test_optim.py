"""Optimizers, clipping and curves against textbook float64 versions."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from support.tolerance import close

from mpipipe import nn, optim
from mpipipe.errors import ArgumentError

RANDOM = np.random.default_rng(8)
NUMBERS = 200 * 300 + 300 + 300 + 300 * 5 + 3 * 5  # in the gradients of `stages`, whose squares a norm adds up


def stages(dtype="float64", cuts=((0, 2), (2, 4))):
    def layers():
        return [nn.Linear(200, 300), nn.RMSNorm(300), nn.Linear(300, 5), nn.LayerNorm(5)]

    made = [nn.Stage(layers()[a:b], dtype=dtype, first=a) for a, b in cuts]
    for index, stage in enumerate(made):
        stage.index = index
    return made


def fill(made, step=0, size=1.0):
    for stage in made:
        for name, gradient in stage.gradients.items():
            random = np.random.default_rng([step, *name.encode()])
            gradient[...] = random.standard_normal(gradient.shape) * size


def textbook_adamw(p, gradients, lr, b1, b2, eps, decay):
    """(parameters, sizes of what was added up to them)"""
    m, v, size, terms = np.zeros_like(p), np.zeros_like(p), np.zeros_like(p), np.abs(p)
    for t, g in enumerate(gradients, 1):
        p = p - lr * decay * p
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g**2
        p = p - lr * (m / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + eps)
        size = b1 * size + (1 - b1) * np.abs(g)
        terms = terms + lr * (size / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + eps)
    return p, terms


def textbook_sgd(p, gradients, lr, momentum, decay):
    """(parameters, sizes of what was added up to them)"""
    u, size, terms = np.zeros_like(p), np.zeros_like(p), np.abs(p)
    for g in gradients:
        u = momentum * u + g + decay * p
        p = p - lr * u
        size = momentum * size + np.abs(g) + decay * terms
        terms = terms + lr * size
    return p, terms


def run(made, optimizer, steps=5):
    """The gradients of each parameter, step by step."""
    history = {}
    for step in range(steps):
        fill(made, step)
        for stage in made:
            for name, gradient in stage.gradients.items():
                history.setdefault(name, []).append(gradient.astype(np.float64))
        optimizer.step()
    assert optimizer.steps == steps
    return history


def check(made, before, history, textbook):
    for stage in made:
        for name, found in stage.parameters.items():
            expected, size = textbook(before[name], history[name], decays=found.ndim == 2)
            assert np.abs(expected - before[name]).max() > 1e-3
            close(found, expected, 12 * len(history[name]), size, what=name)
        gaps = np.ones(stage.parameters.flat.size, bool)
        for name, array in stage.parameters.items():
            gaps[stage.parameters.offsets[name] :][: array.size] = False
        assert not stage.parameters.flat[gaps].any()


def before(made):
    return {name: array.astype(np.float64) for stage in made for name, array in stage.parameters.items()}


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adamw_is_the_textbook_one(dtype, decay):
    made = stages(dtype)
    start = before(made)
    optimizer = optim.AdamW(made, lr=0.01, betas=(0.8, 0.9), eps=1e-6, weight_decay=decay)
    history = run(made, optimizer)

    def textbook(p, gradients, decays):
        return textbook_adamw(p, gradients, 0.01, 0.8, 0.9, 1e-6, decay if decays else 0.0)

    check(made, start, history, textbook)
    assert [sorted(state) for state in optimizer.state] == [["first", "second"]] * 2
    assert all(
        a.dtype == dtype and a.size == s.parameters.flat.size for s, d in zip(made, optimizer.state) for a in d.values()
    )


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("momentum, decay", [(0.0, 0.0), (0.9, 0.0), (0.0, 0.1), (0.9, 0.1)])
def test_sgd_is_the_textbook_one(dtype, momentum, decay):
    made = stages(dtype)
    start = before(made)
    history = run(made, optim.SGD(made, lr=0.01, momentum=momentum, weight_decay=decay))

    def textbook(p, gradients, decays):
        return textbook_sgd(p, gradients, 0.01, momentum, decay if decays else 0.0)

    check(made, start, history, textbook)


@pytest.mark.parametrize("make", [lambda s: optim.SGD(s, lr=1.0), lambda s: optim.AdamW(s, lr=1.0)])
def test_a_learning_rate_for_one_step_overrides(make):
    one, other = stages(), stages()
    first, second = make(one), make(other)
    second.lr = 0.01
    fill(one), fill(other)
    first.step(lr=0.01)
    second.step()
    for a, b in zip(one, other):
        np.testing.assert_array_equal(a.parameters.flat, b.parameters.flat)
    gradients = [stage.gradients.flat.copy() for stage in one]
    first.step(lr=0.0)
    for a, b, gradient in zip(one, other, gradients):
        np.testing.assert_array_equal(a.parameters.flat, b.parameters.flat)
        np.testing.assert_array_equal(a.gradients.flat, gradient)


def test_warmup_cosine_rises_peaks_and_falls_to_the_floor():
    rates = [optim.warmup_cosine(step, 100, 2.0, 10, floor=0.1) for step in range(120)]
    close(rates[:10], np.arange(1, 11) * 0.2, 4)
    assert max(rates) == rates[9] == 2.0
    assert all(a > b for a, b in pairwise(rates[9:100]))
    close(rates[54], 2.0 * (0.1 + 0.9 / 2), 8, 2.0)
    close(rates[99:], np.full(21, 0.2), 8, 2.0)


@pytest.mark.parametrize("steps, warmup", [(1, 0), (1, 1), (5, 5), (5, 0)])
def test_short_curves_stay_between_floor_and_peak(steps, warmup):
    for step in range(steps + 2):
        assert 0.1 <= optim.warmup_cosine(step, steps, 1.0, warmup) <= 1.0


@pytest.mark.parametrize("arguments", [(-1, 5, 1.0, 0), (0, 0, 1.0, 0), (0, 5, 1.0, 6), (0, 5, 1.0, -1)])
def test_impossible_curves_are_refused(arguments):
    with pytest.raises(ArgumentError):
        optim.warmup_cosine(*arguments)
