"""Schedules drawn at random: whatever has no cycle runs, and gives the gradients of the model; nothing else starts."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from support import dense
from support.late_messages import late_messages
from support.random_schedules import runnable_schedules

from mpipipe import Pipeline
from mpipipe.job import inprocess
from mpipipe.nn import Position
from mpipipe.schedules import check, simulate

WIDTH, ROWS = 3, 2


class Whole(dense.Halves):
    """y = max(0, x W) * mask, in whole numbers: sums of them are exact in any order, so gradients have the same bits.

    The mask is drawn from the position, as dropout is.
    """

    def __init__(self, number):
        self.number = number
        self.weight = np.random.default_rng(number).integers(-1, 2, (WIDTH, WIDTH)).astype(float) + np.eye(WIDTH)
        self.gradient = np.zeros((WIDTH, WIDTH))
        self.forwards = 0

    def forward(self, x, position):
        self.forwards += 1
        place = (self.number, position.microbatch, position.step)
        mask = np.random.default_rng(place).integers(0, 2, x.shape)
        y = np.maximum(0, x @ self.weight) * mask
        return y, (x, y > 0)

    def backward_input(self, dy, saved):
        x, passed = saved
        return (dy * passed) @ self.weight.T, (x, dy * passed)

    def backward_weight(self, pending):
        x, dy = pending
        self.gradient += x.T @ dy


def loss(output, target, factor):
    """Its gradient is in whole numbers: the share of a micro-batch in the mean, `factor`, is left out."""
    return float((output * target).sum()), target


def batch(microbatches):
    return np.random.default_rng(microbatches).integers(-2, 3, (2, ROWS * microbatches, WIDTH)).astype(float)


def expected_of(schedule):
    """Gradients of all stages, micro-batch by micro-batch and stage by stage, without a pipeline."""
    stages = [Whole(number) for number in range(schedule.stages)]
    inputs, targets = batch(schedule.microbatches)
    for m in range(schedule.microbatches):
        x, kept = inputs[m * ROWS : (m + 1) * ROWS], []
        for stage in stages:
            x, saved = stage.forward(x, Position(0, m, 0, True))
            kept.append(saved)
        dy = targets[m * ROWS : (m + 1) * ROWS]
        for stage, saved in zip(stages[::-1], kept[::-1]):
            dy = stage.backward(dy, saved)
    return [stage.gradient for stage in stages]


@settings(max_examples=40)
@given(
    schedule=runnable_schedules(),
    synchronous=st.booleans(),
    late=st.sampled_from([0.0, 0.9]),
    tag_ub=st.sampled_from([31, 32767]),
    seed=st.integers(0, 99),
)
def test_every_schedule_without_a_cycle_runs_and_gives_the_same_gradients(schedule, synchronous, late, tag_ub, seed):
    inputs, targets = batch(schedule.microbatches)

    def job(comm):
        stages = [Whole(number) for number in schedule.stages_of(comm.rank)]
        with Pipeline(stages, schedule, comm, loss=loss) as pipeline:
            pipeline.step(*dense.placed(schedule, comm.rank, inputs, targets))
            return stages, pipeline.peak_activations

    expected = expected_of(schedule)
    check(schedule)
    with late_messages(seed, late):
        found = inprocess.run(schedule.ranks, job, synchronous=synchronous, tag_ub=tag_ub)
    for rank, (stages, peak) in enumerate(found):
        assert peak == simulate(schedule).peak_activations[rank]
        for stage in stages:
            assert stage.gradient.tobytes() == expected[stage.number].tobytes()
            again = sum(action.op == "R" and action.stage == stage.number for action in schedule.orders[rank])
            assert stage.forwards == schedule.microbatches + again
