"""Scaling of the loss: the sequence of scales, steps left out on every rank, and what it is for."""

from __future__ import annotations

import math

import numpy as np
import pytest
from support.tolerance import close, largest

from mpipipe import Pipeline, nn, optim
from mpipipe.errors import ArgumentError, NonFiniteError
from mpipipe.job import inprocess
from mpipipe.schedules import one_f_one_b

RANDOM = np.random.default_rng(13)


def stages(dtype="float32", number=0):
    stage = nn.Stage([nn.Linear(30, 40), nn.RMSNorm(40)], dtype=dtype, first=2 * number)
    stage.index = number
    return [stage]


def fill(made, seed=0, size=1.0):
    for stage in made:
        for name, gradient in stage.gradients.items():
            gradient[...] = np.random.default_rng([seed, *name.encode()]).standard_normal(gradient.shape) * size


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


def test_the_defaults_are_those_of_the_field():
    scaler = optim.LossScaler()
    assert scaler.scale == 65536
    for _ in range(1999):
        scaler.update(True)
    assert scaler.scale == 65536
    scaler.update(True)
    assert scaler.scale == 131072
    scaler.update(False)
    assert scaler.scale == 65536 and scaler.skipped == 1


def test_a_static_scale_stays():
    scaler = optim.LossScaler(128.0, interval=2, dynamic=False)
    for _ in range(10):
        scaler.update(True)
    assert scaler.scale == 128


@pytest.mark.parametrize(
    "arguments",
    [dict(initial=0.5), dict(initial=math.inf), dict(growth=0.5), dict(backoff=1.0), dict(backoff=0), dict(interval=0),
     dict(initial=math.nan)],
)  # fmt: skip
def test_impossible_scaling_is_refused(arguments):
    with pytest.raises(ArgumentError):
        optim.LossScaler(**arguments)


@pytest.mark.parametrize("make", [lambda s: optim.SGD(s, 0.1, 0.9, 0.1), lambda s: optim.AdamW(s, 0.1)])
@pytest.mark.parametrize("max_norm", [math.inf, 0.5])
def test_a_scaled_step_is_clipping_and_a_step_of_the_true_gradients(make, max_norm):
    one, other = stages(), stages()
    first, second = make(one), make(other)
    scaler = optim.LossScaler(2.0**12)
    for step in range(3):
        fill(one, step), fill(other, step, size=scaler.scale)
        scaled = other[0].gradients.flat.copy()
        norm = optim.clip_by_global_norm(one, max_norm)
        first.step(lr=0.02)
        close(optim.scaled_step(second, scaler, max_norm, lr=0.02), norm, one[0].gradients.flat.size)
        # a gradient is rounded once more by one of the two; it enters this step and, by a momentum, those that follow
        updates = 0.02 * (step + 1) ** 2 * largest(scaled) / scaler.scale
        found, expected = other[0].parameters.flat, one[0].parameters.flat
        close(found, expected, 12 * (step + 1), np.abs(expected) + updates)
        np.testing.assert_array_equal(other[0].gradients.flat, scaled)
    assert scaler.good == 3 and first.steps == second.steps == 3


@pytest.mark.parametrize("make", [lambda s: optim.SGD(s, 0.1), lambda s: optim.AdamW(s, 0.1)])
def test_a_step_without_scaling_has_the_bits_of_clip_and_step(make):
    one, other = stages(), stages()
    first, second = make(one), make(other)
    fill(one), fill(other)
    optim.clip_by_global_norm(one, 0.5)
    first.step()
    optim.scaled_step(second, optim.LossScaler(1.0, dynamic=False), 0.5)
    np.testing.assert_array_equal(one[0].parameters.flat, other[0].parameters.flat)


def test_clipping_leaves_the_scale_on_the_gradients():
    made = stages("float64")
    fill(made)
    norm = optim.gradient_norm(made)
    assert optim.gradient_norm(made, scale=8.0) == norm / 8
    assert optim.clip_by_global_norm(made, norm / 32, scale=8.0) == norm / 8
    close(optim.gradient_norm(made, scale=8.0), norm / 32, made[0].gradients.flat.size)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_the_norm_of_an_overflow_is_told_and_not_raised(value):
    made = stages()
    fill(made)
    made[0].gradients["0.bias"][3] = value
    assert not math.isfinite(optim.gradient_norm(made, scale=4.0))


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_an_overflow_on_one_rank_skips_the_step_on_all_ranks(comm, value):
    made = stages(number=comm.rank)
    optimizer, scaler = optim.AdamW(made, 0.1), optim.LossScaler(1024.0, interval=3)
    start = made[0].parameters.flat.copy()
    history = []
    for step in range(6):
        fill(made, step, size=scaler.scale)
        if step in (0, 2) and comm.rank == comm.size - 1:
            made[0].gradients[f"{2 * comm.rank}.bias"][5] = value
        norm = optim.scaled_step(optimizer, scaler, 1.0, comm=comm)
        history.append((norm, scaler.scale, scaler.skipped, optimizer.steps))
        if step == 0:
            np.testing.assert_array_equal(made[0].parameters.flat, start)
    assert [norm is None for norm, *_ in history] == [True, False, True, False, False, False]
    assert [scale for _, scale, *_ in history] == [512, 512, 256, 256, 256, 512]
    assert history[-1][2:] == (2, 4)
    assert np.isfinite(made[0].parameters.flat).all() and (made[0].parameters[f"{2 * comm.rank}.weight"] != 0).all()
    assert comm.allgather(history) == [history] * comm.size


@pytest.mark.parametrize("scaler", [dict(initial=1.0), dict(initial=64.0, dynamic=False)])
def test_an_overflow_that_no_scale_can_cure_is_an_error_on_every_rank(scaler):
    def body(comm):
        made = stages(number=comm.rank)
        fill(made)
        start = made[0].parameters.flat.copy()
        if comm.rank == 1:
            made[0].gradients["3.gain"][2] = math.nan
        optimizer = optim.SGD(made, 0.1)
        with pytest.raises(NonFiniteError, match=r"rank 1, stage 1.*3\.gain"):
            optim.scaled_step(optimizer, optim.LossScaler(**scaler), 1.0, comm=comm)
        np.testing.assert_array_equal(made[0].parameters.flat, start)
        return optimizer.steps

    assert inprocess.run(2, body) == [0, 0]


def test_a_dynamic_scale_gives_up_when_it_has_fallen_to_one():
    made = stages()
    optimizer, scaler = optim.SGD(made, 0.1), optim.LossScaler(8.0)
    fill(made)
    made[0].gradients.flat[0] = math.inf
    assert [optim.scaled_step(optimizer, scaler) for _ in range(3)] == [None] * 3
    assert scaler.scale == 1
    with pytest.raises(NonFiniteError, match=r"0\.weight"):
        optim.scaled_step(optimizer, scaler)


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
