"""Bytes and numbers of activations, as measured: what forwards saved and what was received, each memory once."""

from __future__ import annotations

import numpy as np
import pytest
from support import dense

from mpipipe import Pipeline, arrays, nn
from mpipipe.schedules import gpipe, looped_bfs, one_f_one_b, with_recompute

ROWS = 2  # of a micro-batch


def sizes(schedule, stage, rows=ROWS):
    """Bytes of the input and of the output of a micro-batch at a stage."""
    return [8 * rows * width for width in dense.widths(schedule.stages)[stage : stage + 2]]


def feeds(schedule, rank, rows=ROWS):
    return dense.placed(schedule, rank, *dense.batch(rows * schedule.microbatches, schedule.stages))


def replayed(schedule, rank, rows):
    """Peak of the bytes of tanh stages: (x, y) is saved, and (x, dz) for a weight gradient, with a dy that came."""
    x, y = sizes(schedule, rank, rows)
    after = {"F": x + y, "B": 0, "I": x + y + (y if rank < schedule.stages - 1 else 0), "W": 0}
    held, peak = {}, 0
    for action in schedule.orders[rank]:
        held[action.microbatch] = after[action.op]
        peak = max(peak, sum(held.values()))
    return peak


@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b", "zero_bubble_h1"])
def test_the_peak_is_that_of_a_replay(comm, name):
    schedule = dense.build(name, comm.size, 1, 2 * comm.size)
    with Pipeline(dense.model(schedule, comm.rank), schedule, comm, dense.mean_squared) as pipeline:
        assert pipeline.activation_bytes == (0, 0) and pipeline.live_activations == 0
        for rows in (ROWS, 3 * ROWS, ROWS):
            expected = replayed(schedule, comm.rank, rows)
            for _ in range(2):
                pipeline.step(*feeds(schedule, comm.rank, rows))
                assert pipeline.activation_bytes == (0, expected)
            pipeline.evaluate(*feeds(schedule, comm.rank, rows))
            assert pipeline.activation_bytes == (0, expected)


def test_of_shapes_that_are_new_in_every_step_few_are_measured(comm):
    schedule = dense.build("gpipe", comm.size, 1, 2)
    with Pipeline(dense.model(schedule, comm.rank), schedule, comm, dense.mean_squared) as pipeline:
        expected = 0
        for number, rows in enumerate(range(1, 25)):
            pipeline.step(*feeds(schedule, comm.rank, rows))
            if number < 4 or number == 3 + 16:
                expected = replayed(schedule, comm.rank, rows)
            assert pipeline.activation_bytes == (0, expected)


@pytest.mark.parametrize("everything", [False, True])
def test_recomputation_keeps_inputs_and_one_output(comm, everything):
    schedule = one_f_one_b(comm.size, 2 * comm.size)
    plan = schedule if everything else with_recompute(schedule)
    x, y = sizes(schedule, comm.rank)
    with Pipeline(dense.model(plan, comm.rank), plan, comm, dense.mean_squared, recompute=everything) as pipeline:
        pipeline.step(*feeds(plan, comm.rank))
        assert pipeline.activation_bytes.peak == (comm.size - comm.rank) * x + y


def test_an_output_that_is_the_input_of_the_next_stage_of_the_rank_counts_once(comm):
    alone = comm.Split(comm.rank, 0)
    schedule = looped_bfs(1, 3, 4)
    with Pipeline(dense.model(schedule, 0), schedule, alone, dense.mean_squared) as pipeline:
        pipeline.step(*feeds(schedule, 0))
        assert pipeline.activation_bytes.peak == 4 * 8 * ROWS * sum(dense.widths(3))
    alone.Free()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_is_held_now_and_without_parameters(gpu, comm, device, monkeypatch):
    """A linear layer saves its input alone, whatever its weights take; a graph would keep its output, too."""
    monkeypatch.setenv("MPIPIPE_GRAPHS", "0")
    schedule = gpipe(comm.size, 3)
    stage = nn.Stage([nn.Linear(8, 8)], "float64", first=comm.rank, device=device)
    x = np.ones((6, 8))
    with Pipeline([stage], schedule, comm) as pipeline:
        for _ in range(2):
            y = pipeline.forward_train(x if comm.rank == 0 else None)
            assert pipeline.live_activations == 3 and pipeline.activation_bytes.now == x.nbytes
            pipeline.backward(y)
            assert pipeline.live_activations == 0 and pipeline.activation_bytes == (0, x.nbytes)
    assert arrays.download(stage.gradients.flat).any()


def test_a_view_takes_what_it_reaches(comm):
    """A broadcast array has the memory of its one row."""

    class Broadcasting(dense.Identity):
        def forward(self, x):
            return x * 1.0, {"mask": np.broadcast_to(np.ones(4), (1000, 4)), "again": [np.ones((4, 4)).T]}

    schedule = gpipe(comm.size, 2)
    x = np.ones((4, 3))
    with Pipeline([Broadcasting()], schedule, comm, dense.mean_squared) as pipeline:
        pipeline.step(*dense.placed(schedule, comm.rank, x, x))
        received = 48 if comm.rank else 0  # an input that was received is held until the backward
        assert pipeline.activation_bytes.peak == 2 * (32 + 128 + received)


def test_parameters_and_what_is_saved_twice_do_not_count(comm):
    class Viewing(dense.Identity):
        def __init__(self):
            self.parameters = self.gradients = nn.FlatBuffer({"w": (100,)}, "float64")

        def forward(self, x):
            y = x * 1.0
            return y, (y[:2], y[1:], self.parameters["w"][10:], x)

    schedule = gpipe(comm.size, 2)
    x = np.ones((6, 3))
    with Pipeline([Viewing()], schedule, comm, dense.mean_squared) as pipeline:
        pipeline.step(*dense.placed(schedule, comm.rank, x, x))
        assert pipeline.activation_bytes.peak == 2 * (72 + 72)
