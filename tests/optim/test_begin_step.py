"""A step of the optimizer that is begun and finished: the bits of clipping and a step, and no wait between the two."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpipipe import nn, optim
from mpipipe.errors import ArgumentError, MismatchError, NonFiniteError, PeerError
from mpipipe.job import inprocess
from mpipipe.optim.norm import expansion

OPTIMIZERS = {"adamw": lambda stages: optim.AdamW(stages, lr=0.01), "sgd": lambda stages: optim.SGD(stages, lr=0.1)}
NUMBERS = st.lists(st.floats(0, 1e300), max_size=40)


@given(NUMBERS)
def test_an_expansion_is_the_exact_sum_in_few_numbers(numbers):
    parts = expansion(numbers)
    assert sum(map(Fraction, parts)) == sum(map(Fraction, numbers))
    assert all(abs(small) <= math.ulp(large) / 2 for large, small in pairwise(parts))


@given(NUMBERS, NUMBERS)
def test_sums_of_expansions_round_as_the_sum_of_all_numbers(some, others):
    assert math.fsum([*expansion(some), *expansion(others)]) == math.fsum([*some, *others])


def model(rank, step=0):
    stage = nn.Stage([nn.Linear(7, 5), nn.RMSNorm(5)], seed=rank, first=2 * rank)
    draw(stage, rank, step)
    return stage


def draw(stage, rank, step):
    rng = np.random.default_rng((rank, step))
    stage.gradients.flat[...] = rng.normal(size=stage.gradients.flat.size) * 10.0 ** rng.integers(-3, 4)


def trained(comm, make, update, steps=4):
    """(norms, parameters) after some steps with drawn gradients."""
    stage = model(comm.rank)
    optimizer, norms = make([stage]), []
    for step in range(steps):
        draw(stage, comm.rank, step)
        norms.append(update(optimizer, stage, comm))
    return norms, stage.parameters.flat.tobytes()


def clip_and_step(optimizer, stage, comm):
    norm = optim.clip_by_global_norm([stage], 0.7, comm)
    optimizer.step()
    return norm


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_begin_and_finish_have_the_bits_of_clipping_and_a_step(ranks, make):
    begun = inprocess.run(
        ranks, lambda comm: trained(comm, make, lambda o, s, c: optim.begin_step(o, 0.7, comm=c).finish())
    )
    assert begun == inprocess.run(ranks, lambda comm: trained(comm, make, clip_and_step))


def test_they_have_those_of_a_scaled_step_too(comm):
    """With overflows on one rank: no rank makes the step then, and all scales shrink."""

    def runs(update):
        stage, scaler = model(comm.rank), optim.LossScaler(1024.0, interval=2)
        optimizer, found = optim.AdamW([stage], lr=0.01), []
        for step in range(6):
            draw(stage, comm.rank, step)
            if step in (1, 4) and comm.rank == comm.size - 1:
                stage.gradients.flat[3] = np.inf
            found.append((update(optimizer, scaler, comm), scaler.scale, scaler.skipped))
        return found, stage.parameters.flat.tobytes(), optimizer.steps

    begun = runs(lambda o, s, c: optim.begin_step(o, 0.5, scaler=s, comm=c).finish())
    assert begun == runs(lambda o, s, c: optim.scaled_step(o, s, 0.5, comm=c))
    assert begun[0][1][0] is None and begun[0][4][2] == 2


def test_a_norm_over_kept_ranks_and_names_to_skip(comm):
    stage = model(comm.rank)
    optimizer, skip = optim.SGD([stage], lr=0.1), [f"{2 * comm.rank}.bias"]
    norm = optim.gradient_norm([stage], comm, skip)
    assert optim.begin_step(optimizer, 1.0, comm=comm, skip=skip).finish() == norm
    with optim.GlobalNorm([stage], comm, skip) as over:
        draw(stage, comm.rank, 0)
        update = optim.begin_step(optimizer, math.inf, over=over)
        assert update.finish() == norm and update.finish() == norm


def test_a_gradient_that_is_not_finite_is_named_on_all_ranks(comm):
    stage = model(comm.rank)
    before = stage.parameters.flat.tobytes()
    if comm.rank == comm.size - 1:
        stage.gradients.flat[0] = np.nan
    update = optim.begin_step(optim.SGD([stage], lr=0.1), 1.0, comm=comm)
    with pytest.raises(NonFiniteError, match=f"parameter {2 * (comm.size - 1)}") as caught:
        update.finish()
    assert comm.allgather(caught.value.reported_elsewhere).count(False) == 1
    assert stage.parameters.flat.tobytes() == before


def test_squares_of_all_sizes_are_gathered_where_their_sum_is_too_long(comm):
    """One bit in each of 200 sizes: more numbers than a rank sends in a row."""
    sizes = 2.0 ** -np.arange(0, 200.0)
    stages = [nn.Stage([nn.Linear(1, 1, bias=False)], "float64", first=200 * comm.rank + k) for k in range(200)]
    for stage, size in zip(stages, sizes):
        stage.gradients.flat[...] = size * 2.0**-300 * 3.0**7
    norm = optim.gradient_norm(stages, comm)
    assert optim.begin_step(optim.SGD(stages, lr=0.1), 1.0, comm=comm).finish() == norm > 0


def test_without_clipping_no_rank_is_asked(comm):
    """Rank 0 alone makes its step."""
    stage = model(comm.rank)
    expected = stage.parameters.flat - np.float32(0.1) * stage.gradients.flat
    if comm.rank == 0:
        assert optim.begin_step(optim.SGD([stage], lr=0.1), comm=comm).finish() is None
        np.testing.assert_array_equal(stage.parameters.flat, expected)


@pytest.mark.mpi(min_size=2)
def test_the_begin_waits_for_nobody(comm):
    """By the order of events: the last rank begins when it has heard that rank 0 has begun."""
    stage = model(comm.rank)
    optimizer, token = optim.SGD([stage], lr=0.1), np.zeros(1)
    optim.begin_step(optimizer, 1.0, comm=comm).finish()
    if comm.rank == comm.size - 1:
        comm.Recv(token, 0)
    update = optim.begin_step(optimizer, 1.0, comm=comm)
    if comm.rank == 0:
        comm.Send(token, comm.size - 1)
    assert update.finish() > 0


@pytest.mark.mpi(min_size=2)
def test_a_rank_that_clips_at_once_while_others_begin(comm):
    stage = model(comm.rank)
    with pytest.raises((MismatchError, PeerError), match="different calls"):
        if comm.rank == 0:
            optim.clip_by_global_norm([stage], 1.0, comm)
        else:
            optim.begin_step(optim.SGD([stage], lr=0.1), 1.0, comm=comm).finish()


@pytest.mark.mpi(min_size=2)
def test_a_stage_that_cannot_be_measured_is_an_error_everywhere(comm):
    class Broken:
        steps = 0
        stages = [object()] if comm.rank == 0 else [model(comm.rank)]

    with pytest.raises(ArgumentError, match="without flat parameters"):
        optim.begin_step(Broken(), 1.0, comm=comm).finish()


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan])
def test_a_wrong_limit_is_refused(bad):
    with pytest.raises(ArgumentError, match="max_norm"):
        optim.begin_step(optim.SGD([model(0)], lr=0.1), bad)


@pytest.mark.parametrize("gradient", [8.0, math.inf])
def test_a_step_that_is_refused_leaves_the_scaler_as_it_was(gradient):
    """What `finish` divides by is the scale that is in the gradients."""
    stage = nn.Stage([nn.RMSNorm(4)])
    optimizer, scaler = optim.SGD([stage], lr=0.5), optim.LossScaler(initial=8.0, interval=1)
    stage.gradients["0.gain"][...] = gradient
    update = optim.begin_step(optimizer, scaler=scaler)
    with pytest.raises(ArgumentError, match="has begun, and not ended"):
        optim.scaled_step(optimizer, scaler)
    assert scaler.scale == 8.0
    update.finish()
    np.testing.assert_array_equal(stage.parameters["0.gain"], 0.5 if math.isfinite(gradient) else 1.0)
