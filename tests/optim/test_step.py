"""Clipping, steps with it over all ranks, and the scale of the loss."""

import math
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.gradients import OPTIMIZERS, fill, four_layers, gradient_norm
from support.tolerance import bound, close, largest, within

from mpipipe import nn, optim
from mpipipe.errors import ArgumentError, NonFiniteError
from mpipipe.job import inprocess
from mpipipe.optim.norm import expansion

UNSCALED = optim.LossScaler(1.0, dynamic=False)
NUMBERS = st.lists(st.floats(0, 1e300), max_size=40)
TERMS = 200 * 300 + 300 + 300 + 300 * 5 + 3 * 5  # in the gradients of `four_layers`, whose squares a norm adds up


def model(rank):
    """A stage of its own for each rank, with gradients."""
    stage = nn.Stage([nn.Linear(7, 5), nn.RMSNorm(5)], seed=rank, first=2 * rank)
    stage.index = rank
    fill([stage])
    return stage


def norm_of(stages):
    return math.sqrt(sum(float(np.sum(stage.gradients.flat.astype(np.float64) ** 2)) for stage in stages))


# -- the norm ---------------------------------------------------------------------------------------------------------


@given(NUMBERS)
def test_an_expansion_is_the_exact_sum_in_few_numbers(numbers):
    parts = expansion(numbers)
    assert sum(map(Fraction, parts)) == sum(map(Fraction, numbers))
    assert all(abs(small) <= math.ulp(large) / 2 for large, small in pairwise(parts))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_clipping_scales_to_the_global_norm_of_the_gradients_without_their_scale(dtype):
    stages = four_layers(dtype)
    fill(stages)
    norm = norm_of(stages)
    copies = [stage.gradients.flat.copy() for stage in stages]
    close(optim.clip_by_global_norm(stages, 2 * norm), norm, TERMS)
    for stage, copy in zip(stages, copies):
        np.testing.assert_array_equal(stage.gradients.flat, copy)
    exact = gradient_norm(stages)
    assert gradient_norm(stages, scale=8.0) == exact / 8
    assert optim.clip_by_global_norm(stages, exact / 32, scale=8.0) == exact / 8
    close(exact, norm, TERMS)
    within(norm_of(stages), norm / 4, bound(dtype, 2, norm / 4) + bound("float64", TERMS, norm / 4))
    for stage, copy in zip(stages, copies):
        clipped = copy.astype(np.float64) / 4
        within(stage.gradients.flat, clipped, bound(dtype, 2, abs(clipped)) + bound("float64", TERMS, abs(clipped)))


def test_the_norm_of_huge_float32_gradients_does_not_overflow_and_that_of_others_is_told():
    stages = four_layers("float32")
    fill(stages, size=1e30)
    assert 1e30 < optim.clip_by_global_norm(stages, 1.0) < math.inf
    for value in (math.inf, -math.inf, math.nan):
        stages[0].gradients["0.bias"][3] = value
        assert not math.isfinite(gradient_norm(stages, scale=4.0))


def test_tied_copies_count_once():
    made = four_layers()
    fill(made)
    whole = norm_of(made)
    left_out = float(np.sum(made[0].gradients["0.weight"] ** 2))
    made[0].tied_copies.add("0.weight")
    expected = math.sqrt(whole**2 - left_out)
    close(optim.clip_by_global_norm(made, math.inf), expected, TERMS, whole**2 / expected)


def test_clipping_over_ranks_is_clipping_of_the_whole():
    whole = four_layers("float32")
    fill(whole)
    norm = optim.clip_by_global_norm(whole, 0.5)

    def body(comm):
        mine = [four_layers("float32")[comm.rank]]
        fill(mine)
        return optim.clip_by_global_norm(mine, 0.5, comm), mine[0].gradients.flat

    for rank, (found, gradients) in enumerate(inprocess.run(2, body)):
        assert found == norm
        np.testing.assert_array_equal(gradients, whole[rank].gradients.flat)


# -- a step with clipping and scaling ---------------------------------------------------------------------------------


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("max_norm", [math.inf, 0.5])
def test_a_scaled_step_is_clipping_and_a_step_of_the_true_gradients(make, max_norm):
    """And without scaling it has its bits."""
    one, other, third = (model(0) for _ in range(3))
    first, second, last = make([one]), make([other]), make([third])
    scaler, none = optim.LossScaler(2.0**12), optim.LossScaler(1.0, dynamic=False)
    for step in range(3):
        for stage, size in ((one, 1.0), (other, scaler.scale), (third, 1.0)):
            fill([stage], step, size)
        scaled = other.gradients.flat.copy()
        norm = optim.clip_by_global_norm([one], max_norm)
        first.step(lr=0.02)
        close(optim.scaled_step(second, scaler, max_norm, lr=0.02), norm, one.gradients.flat.size)
        assert optim.scaled_step(last, none, max_norm, lr=0.02) == norm
        # a gradient is rounded once more by one of the two; it enters this step and, by a momentum, those that follow
        updates = 0.02 * (step + 1) ** 2 * largest(scaled) / scaler.scale
        close(other.parameters.flat, one.parameters.flat, 12 * (step + 1), np.abs(one.parameters.flat) + updates)
        np.testing.assert_array_equal(other.gradients.flat, scaled)
        if step == 0:
            np.testing.assert_array_equal(third.parameters.flat, one.parameters.flat)
    assert scaler.good == 3 and first.steps == second.steps == 3


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_an_overflow_on_one_rank_skips_the_step_on_all_ranks(comm, value):
    stage, scaler, history = model(comm.rank), optim.LossScaler(1024.0, interval=3), []
    optimizer, start = optim.AdamW([stage], 0.1), stage.parameters.flat.copy()
    for step in range(6):
        fill([stage], step, scaler.scale)
        if step in (0, 2) and comm.rank == comm.size - 1:
            stage.gradients[f"{2 * comm.rank}.bias"][3] = value
        norm = optim.scaled_step(optimizer, scaler, 1.0, comm=comm)
        history.append((norm, scaler.scale, scaler.skipped, optimizer.steps))
        if step == 0:
            np.testing.assert_array_equal(stage.parameters.flat, start)
    assert [norm is None for norm, *_ in history] == [True, False, True, False, False, False]
    assert [scale for _, scale, *_ in history] == [512, 512, 256, 256, 256, 512]
    assert history[-1][2:] == (2, 4)
    assert np.isfinite(stage.parameters.flat).all() and (stage.parameters[f"{2 * comm.rank}.weight"] != 0).all()
    assert comm.allgather(history) == [history] * comm.size


CALLS = {
    "clip": lambda optimizer, comm: optim.clip_by_global_norm(optimizer.stages, 0.5, comm),
    "a scale of 1": lambda optimizer, comm: optim.scaled_step(optimizer, optim.LossScaler(1.0), 1.0, comm=comm),
    "a fixed scale": lambda optimizer, comm: optim.scaled_step(
        optimizer, optim.LossScaler(64.0, dynamic=False), 1.0, comm=comm
    ),
}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_gradient_that_is_not_finite_is_named_on_all_ranks_and_no_step_is_made(comm, call, value):
    stage, guilty = model(comm.rank), comm.size - 1
    before, optimizer = stage.parameters.flat.tobytes(), optim.SGD([stage], lr=0.1)
    if comm.rank == guilty:
        stage.gradients[f"{2 * guilty}.bias"][2] = value
    with pytest.raises(NonFiniteError, match=rf"rank {guilty}, stage {guilty}.*{2 * guilty}\.bias") as caught:
        call(optimizer, comm)
    assert (caught.value.rank, caught.value.stage) == (guilty, guilty)
    assert comm.allgather(caught.value.reported_elsewhere).count(False) == 1
    assert stage.parameters.flat.tobytes() == before and optimizer.steps == 0


def test_a_dynamic_scale_gives_up_when_it_has_fallen_to_one():
    stage, scaler = model(0), optim.LossScaler(8.0)
    optimizer = optim.SGD([stage], 0.1)
    stage.gradients.flat[0] = math.inf
    assert [optim.scaled_step(optimizer, scaler) for _ in range(3)] == [None] * 3
    assert scaler.scale == 1
    with pytest.raises(NonFiniteError, match=r"0\.weight"):
        optim.scaled_step(optimizer, scaler)


def test_squares_of_all_sizes_are_gathered_where_their_sum_is_too_long(comm):
    """One bit in each of 200 sizes: more numbers than a rank sends in a row."""
    sizes = 2.0 ** -np.arange(0, 200.0)
    stages = [nn.Stage([nn.Linear(1, 1, bias=False)], "float64", first=200 * comm.rank + k) for k in range(200)]
    for stage, size in zip(stages, sizes):
        stage.gradients.flat[...] = size * 2.0**-300 * 3.0**7
    norm = gradient_norm(stages, comm)
    assert optim.scaled_step(optim.SGD(stages, lr=0.1), UNSCALED, 1.0, comm=comm) == norm > 0


@pytest.mark.mpi(min_size=2)
def test_a_stage_that_cannot_be_measured_is_an_error_everywhere(comm):
    class Broken:
        steps = 0
        stages = [object()] if comm.rank == 0 else [model(comm.rank)]

    with pytest.raises(ArgumentError, match="without flat parameters"):
        optim.scaled_step(Broken(), UNSCALED, 1.0, comm=comm)


# -- scaling of the loss ----------------------------------------------------------------------------------------------


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


def test_the_step_with_which_the_scale_grows_has_the_scale_of_its_gradients():
    stage = nn.Stage([nn.RMSNorm(2)])
    optimizer, scaler = optim.SGD([stage], lr=0.5), optim.LossScaler(8.0, interval=1)
    stage.gradients.flat[...] = 8
    optim.scaled_step(optimizer, scaler)
    assert scaler.scale == 16 and stage.parameters["0.gain"].tolist() == [0.5, 0.5]
