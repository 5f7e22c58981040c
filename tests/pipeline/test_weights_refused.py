"""Weights of losses that make no sense, and losses that do not say what they are means over: refused on all ranks."""

from __future__ import annotations

import numpy as np
import pytest
from support import dense
from support.weighted import WIDTH, Tanh, dense_step, masked, near

from mpipipe import Mesh, Pipeline, nn
from mpipipe.errors import ArgumentError, MismatchError, PeerError
from mpipipe.schedules import gpipe, one_f_one_b


def pipeline_of(mesh, loss, microbatches=2, stages=None):
    schedule = one_f_one_b(mesh.pipe.size, microbatches)
    stages = [Tanh(mesh.pipe.rank)] if stages is None else stages
    return schedule, Pipeline(stages, schedule, mesh.pipe, loss, replicas=mesh.replicas)


def mesh_of(comm):
    return Mesh(comm, pipe=comm.size // 2 or 1)


def batch_of(mesh, schedule, length=2):
    """This rank's part of a batch of ones; `length` may be a list, for each micro-batch one."""
    shapes = [(2, each, WIDTH) for each in length] if isinstance(length, list) else (4, length, WIDTH)
    x = list(map(np.ones, shapes)) if isinstance(shapes, list) else np.ones(shapes)
    return dense.placed(schedule, mesh.pipe.rank, x, x)


def fails(mesh, pipeline, batch, match):
    """A rank of the last stage raises an error that says so, and all others hear of it."""
    with pytest.raises((ArgumentError, PeerError), match=match) as caught:
        pipeline.step(*batch)
    kinds = mesh.comm.allgather((type(caught.value), mesh.pipe.rank == mesh.pipe.size - 1))
    assert (ArgumentError, True) in kinds and (ArgumentError, False) not in kinds


@pytest.mark.parametrize("weight", [-1, -0.5, np.nan, np.inf, 10**400, None, "3", True, [1.0], np.ones(2), 1j])
def test_a_weight_is_a_finite_number_of_at_least_zero(comm, weight):
    mesh = mesh_of(comm)
    schedule, pipeline = pipeline_of(mesh, lambda output, target: (1.0, output, weight))
    fails(mesh, pipeline, batch_of(mesh, schedule), "the weight of a loss")


@pytest.mark.parametrize("weight", [3, 3.0, np.int32(3), np.float32(3), np.array(3.0)])
def test_kinds_of_numbers(comm, weight):
    def loss(output, target):
        return (*nn.mean_squared_error(output, target), weight)

    with mesh_of(comm) as mesh:
        schedule, pipeline = pipeline_of(mesh, loss)
        with pipeline:
            batch = batch_of(mesh, schedule)
            assert pipeline.step(*batch).loss == pytest.approx(pipeline.evaluate(*batch), rel=1e-15)


@pytest.mark.parametrize("first", [0, 1])
def test_weights_of_some_micro_batches_only(comm, first):
    calls = []

    def loss(output, target):
        calls.append(1)
        return (1.0, output, 2.0) if len(calls) % 2 == first else (1.0, output)

    mesh = mesh_of(comm)
    schedule, pipeline = pipeline_of(mesh, loss)
    fails(mesh, pipeline, batch_of(mesh, schedule), "for some micro-batches only")


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("call", ["step", "launch", "evaluate"])
def test_weights_on_some_replicas_only(comm, call):
    with mesh_of(comm) as mesh:
        odd = mesh.data.rank == 1
        schedule, pipeline = pipeline_of(mesh, lambda y, t: (1.0, y, 2.0) if odd else (1.0, y))
        with pipeline, pytest.raises(MismatchError, match="on some replicas only") as caught:
            getattr(pipeline, call)(*batch_of(mesh, schedule))
        assert comm.allgather(caught.value.reported_elsewhere).count(False) == 1


def test_a_batch_without_anything_valid_is_refused_on_all_ranks_and_the_next_one_is_right(comm):
    with mesh_of(comm) as mesh:
        schedule, pipeline = pipeline_of(mesh, masked())
        x = np.random.default_rng(mesh.data.rank).normal(size=(4, 2, WIDTH))
        nothing, all_of_it = ((x, (x + 1, np.full(x.shape, valid))) for valid in (False, True))
        with pipeline:
            for call in ("evaluate", "step", "launch", "step"):
                with pytest.raises(ArgumentError, match=r"add up to 0\.0") as caught:
                    getattr(pipeline, call)(*dense.placed(schedule, mesh.pipe.rank, *nothing))
                assert comm.allgather(caught.value.reported_elsewhere).count(False) == 1
            result = pipeline.step(*dense.placed(schedule, mesh.pipe.rank, *all_of_it))
        whole = [np.random.default_rng(rank).normal(size=(4, 2, WIDTH)) for rank in range(mesh.data.size)]
        near(result.loss, dense_step(schedule.stages, [(x, (x + 1, np.ones(x.shape))) for x in whole])[0])


def test_a_stage_that_does_not_show_its_gradients(comm):
    hidden = Tanh(0)
    del hidden.gradients
    alone = comm.Split(comm.rank, 0)
    pipeline = Pipeline([hidden], gpipe(1, 2), alone, lambda y, t: (1.0, y, 2.0))
    batch = np.ones((4, 2, WIDTH))
    assert pipeline.evaluate(batch, batch) == 1.0
    with pytest.raises(ArgumentError, match="does not show its gradients"):
        pipeline.step(batch, batch)
    alone.Free()


# -- losses of two values ----------------------------------------------------------------------------------------------


def mean_of_squares(output, target):
    return nn.mean_squared_error(output, target)


def by_rows(output, target):
    return nn.mean_squared_error(output, target)


by_rows.mean_over_entries = False


@pytest.mark.parametrize("lengths", [[1, 3], "by replica"])
def test_a_loss_that_does_not_say_what_it_is_a_mean_over(comm, lengths):
    """Refused where rows differ in their target entries, between micro-batches or replicas; never a mean of means."""
    mesh = mesh_of(comm)
    if lengths == "by replica" and mesh.data.size == 1:
        pytest.skip("needs replicas")
    schedule, pipeline = pipeline_of(mesh, mean_of_squares)
    pipeline.evaluate(*batch_of(mesh, schedule))
    fails(
        mesh,
        pipeline,
        batch_of(mesh, schedule, 1 + mesh.data.rank if lengths == "by replica" else lengths),
        "more target",
    )


@pytest.mark.parametrize("loss, shares", [(nn.mean_squared_error, [1, 3]), (by_rows, [1, 1])])
def test_a_loss_that_says_what_it_is_a_mean_over(comm, loss, shares):
    with mesh_of(comm) as mesh:
        schedule, pipeline = pipeline_of(mesh, loss)
        with pipeline:
            result = pipeline.step(*batch_of(mesh, schedule, [1, 3]))
        assert result.loss == pytest.approx(np.average(result.losses, weights=shares), rel=1e-15)


def test_a_loss_that_says_it_twice(comm):
    def loss(output, target):
        return (*nn.mean_squared_error(output, target), target.size)

    loss.mean_over_entries = True
    mesh = mesh_of(comm)
    schedule, pipeline = pipeline_of(mesh, loss)
    fails(mesh, pipeline, batch_of(mesh, schedule), "returns a weight as well")


@pytest.mark.mpi(min_size=2)
def test_losses_of_replicas_that_are_means_over_different_things(comm):
    with mesh_of(comm) as mesh:
        schedule, pipeline = pipeline_of(mesh, by_rows if mesh.data.rank else nn.mean_squared_error)
        with pipeline, pytest.raises(MismatchError, match="means over different things"):
            pipeline.step(*batch_of(mesh, schedule))
