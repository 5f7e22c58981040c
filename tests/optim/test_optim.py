"""Optimizers, clipping and curves against textbook float64 versions."""

from __future__ import annotations

import math
from itertools import pairwise, permutations

import numpy as np
import pytest
from support.tolerance import bound, close, within

from mpipipe import nn, optim
from mpipipe.errors import ArgumentError, NonFiniteError
from mpipipe.job import inprocess

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


def test_an_update_does_not_depend_on_the_cut():
    results = []
    for cuts in [((0, 2), (2, 4)), ((0, 4),), ((0, 1), (1, 2), (2, 3), (3, 4))]:
        made = stages("float32", cuts)
        optimizer = optim.AdamW(made, lr=0.01)
        norms = []
        for step in range(3):
            fill(made, step)
            norms.append(optim.clip_by_global_norm(made, 1.0))
            optimizer.step()
        results.append((norms, {name: array for stage in made for name, array in stage.parameters.items()}))
    for norms, parameters in results[1:]:
        assert norms == results[0][0]
        for name, array in parameters.items():
            np.testing.assert_array_equal(array, results[0][1][name])


def test_the_norm_does_not_depend_on_which_rank_has_which_stage():
    made = stages("float64", ((0, 1), (1, 2), (2, 3), (3, 4)))
    for step in range(20):
        fill(made, step, size=1 + step)
        norms = {optim.clip_by_global_norm([made[i] for i in order], math.inf) for order in permutations(range(4))}
        assert len(norms) == 1


def whole_norm(made):
    return math.sqrt(sum(float(np.sum(stage.gradients.flat.astype(np.float64) ** 2)) for stage in made))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_clipping_scales_to_the_global_norm(dtype):
    made = stages(dtype)
    fill(made)
    norm = whole_norm(made)
    copies = [stage.gradients.flat.copy() for stage in made]
    close(optim.clip_by_global_norm(made, 2 * norm), norm, NUMBERS)
    for stage, copy in zip(made, copies):
        np.testing.assert_array_equal(stage.gradients.flat, copy)
    close(optim.clip_by_global_norm(made, norm / 4), norm, NUMBERS)
    within(whole_norm(made), norm / 4, bound(dtype, 2, norm / 4) + bound("float64", NUMBERS, norm / 4))
    for stage, copy in zip(made, copies):
        found, expected = stage.gradients.flat, copy.astype(np.float64) / 4
        within(found, expected, bound(dtype, 2, np.abs(expected)) + bound("float64", NUMBERS, np.abs(expected)))


def test_the_norm_of_huge_float32_gradients_does_not_overflow():
    made = stages("float32")
    fill(made, size=1e30)
    norm = optim.clip_by_global_norm(made, 1.0)
    assert math.isfinite(norm) and norm > 1e30


def test_tied_copies_and_skipped_parameters_count_once():
    made = stages()
    fill(made)
    whole = whole_norm(made)
    left_out = float(np.sum(made[0].gradients["0.weight"] ** 2))
    made[0].tied_copies = {"0.weight"}
    expected = math.sqrt(whole**2 - left_out)
    close(optim.clip_by_global_norm(made, math.inf), expected, NUMBERS, whole**2 / expected)
    made[0].tied_copies = set()
    close(optim.clip_by_global_norm(made, math.inf, skip=["0.weight"]), expected, NUMBERS, whole**2 / expected)


def test_clipping_over_ranks_is_clipping_of_the_whole():
    whole = stages("float32")
    fill(whole)
    norm = optim.clip_by_global_norm(whole, 0.5)

    def body(comm):
        mine = [stages("float32")[comm.rank]]
        fill(mine)
        return optim.clip_by_global_norm(mine, 0.5, comm), mine[0].gradients.flat

    for rank, (found, gradients) in enumerate(inprocess.run(2, body)):
        assert found == norm
        np.testing.assert_array_equal(gradients, whole[rank].gradients.flat)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_is_named_on_every_rank(value):
    def body(comm):
        mine = [stages()[comm.rank]]
        fill(mine)
        if comm.rank == 1:
            mine[0].gradients["3.bias"][2] = value
        with pytest.raises(NonFiniteError, match=r"rank 1, stage 1.*3\.bias") as caught:
            optim.clip_by_global_norm(mine, 0.5, comm)
        return caught.value.rank, caught.value.stage

    assert inprocess.run(2, body) == [(1, 1), (1, 1)]


@pytest.mark.parametrize("max_norm", [0, -1.0, math.nan])
def test_an_impossible_norm_is_refused(max_norm):
    with pytest.raises(ArgumentError):
        optim.clip_by_global_norm(stages(), max_norm)


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
