"""Scaling of the loss: the sequence of scales, steps left out on every rank, and what it is for."""

from __future__ import annotations

import math

import numpy as np
import pytest
from support.tolerance import close, largest

from mpipipe import Pipeline, nn, optim
from mpipipe.errors import ArgumentError
from mpipipe.schedules import one_f_one_b

RANDOM = np.random.default_rng(13)


def simulated(outcomes, scale, growth, backoff, interval):
    """The scale after each step, from the history of outcomes alone."""
    scales = []
    last_change = 0
    for step, finite in enumerate(outcomes, 1):
        if not finite:
            scale, last_change = max(1.0, scale * backoff), step
        elif step - last_change == interval:
            scale, last_change = min(2.0**64, scale * growth), step
        scales.append(scale)
    return scales


@pytest.mark.parametrize("growth, backoff, interval", [(2.0, 0.5, 5), (3.0, 0.25, 1), (2.0, 0.5, 2000)])
def test_the_scale_follows_overflows_and_long_calms(growth, backoff, interval):
    outcomes = np.random.default_rng(1).random(5000) > 0.15
    outcomes[2000:4500] = True
    scaler = optim.LossScaler(4096.0, growth, backoff, interval)
    found = []
    for finite in outcomes:
        scaler.update(bool(finite))
        found.append(scaler.scale)
    assert found == simulated(outcomes, 4096.0, growth, backoff, interval)
    assert scaler.skipped == int(np.sum(~outcomes))
    assert min(found) == 1.0 if interval == 2000 else max(found) == 2.0**64


def test_the_defaults_are_those_of_the_field_and_a_static_scale_stays():
    scaler, static, scales = optim.LossScaler(), optim.LossScaler(128.0, interval=2, dynamic=False), []
    for finite in [True] * 2000 + [False]:
        scaler.update(finite)
        static.update(finite)
        scales.append(scaler.scale)
    assert scales == [65536] * 1999 + [131072, 65536] and (scaler.skipped, static.scale) == (1, 128)


@pytest.mark.parametrize(
    "arguments",
    [dict(initial=0.5), dict(initial=math.inf), dict(growth=0.5), dict(backoff=1.0), dict(backoff=0), dict(interval=0),
     dict(initial=math.nan)],
)  # fmt: skip
def test_impossible_scaling_is_refused(arguments):
    with pytest.raises(ArgumentError):
        optim.LossScaler(**arguments)


def test_scaling_saves_gradients_that_float16_would_lose():
    def gradient(scale):
        stage = nn.Stage([nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)], dtype="float16", seed=1)
        y, saved = stage.forward(np.ones((4, 8), np.float16))
        _, dy = nn.mean_squared_error(y, y - np.float16(2**-9), scale * 2.0**-14)
        stage.backward(dy, saved)
        return stage.gradients.flat / scale

    def exact():
        stage = nn.Stage([nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)], dtype="float64", seed=1)
        y, saved = stage.forward(np.ones((4, 8)))
        stage.backward(np.full(y.shape, 2 * 2.0**-9 / y.size * 2.0**-14), saved)
        return np.concatenate([g.reshape(-1) for g in stage.gradients.values()])

    wanted = exact()
    assert not gradient(1.0).any()
    # weights, slopes and their products are rounded to halves; sums of 8 and of 4 are not
    scale = 65536.0
    close(scale * gradient(scale), scale * wanted, 6, scale * largest(wanted), dtype="float16")


def test_a_loss_without_factor_carries_the_scale_as_one_with_it_does(comm):
    """The pipeline scales the gradient of a loss that cannot do it itself."""
    schedule = one_f_one_b(comm.size, 3)
    inputs, targets = np.random.default_rng(3).standard_normal((2, 7, 6))

    def gradients(loss, scale):
        stage = nn.Stage([nn.Linear(6, 6), nn.Gelu()], "float64", seed=1, first=2 * comm.rank)
        with Pipeline([stage], schedule, comm, loss=loss) as pipeline:
            result = pipeline.step(
                inputs if comm.rank == 0 else None, targets if comm.rank == comm.size - 1 else None, scale=scale
            )
        return stage.gradients.flat, result

    def plain(output, target):
        return nn.mean_squared_error(output, target)

    cases = (plain, 1.0), (plain, 24.0), (nn.mean_squared_error, 24.0)
    (true, expected), *scaled = (gradients(*case) for case in cases)
    assert np.abs(true).max() > 1e-3
    for found, result in scaled:
        operations = comm.size * 2 * 6 + 20 + 7  # two products and a Gelu in each stage, and the sum over rows
        close(found, 24 * true, operations, 24 * largest(true))
        assert result.loss == expected.loss
        if comm.rank == 0:  # those of the result are without the scale
            right = np.concatenate(expected.input_grads)
            close(np.concatenate(result.input_grads), right, operations, largest(right))
