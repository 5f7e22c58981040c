"""The protocol of a user's stage: what it is told, and what it is asked for."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from support import dense
from support.tolerance import within

from mpipipe import Mesh, Pipeline, nn, schedules
from mpipipe.errors import ArgumentError, MismatchError, PeerError, StageError
from mpipipe.job import inprocess


class Flat(dense.TanhStage):
    """A tanh layer with flat buffers, which notes what it is told."""

    index = poll = None

    def __init__(self, number, inputs, outputs):
        super().__init__(number, inputs, outputs)
        shapes = {f"{number}.weight": self.weight.shape}
        self.parameters = nn.FlatBuffer(shapes, self.weight.dtype)
        self.parameters[f"{number}.weight"][...] = self.weight
        self.weight = self.parameters[f"{number}.weight"]
        self.gradients = nn.FlatBuffer(shapes, self.weight.dtype)
        self.gradient = self.gradients[f"{number}.weight"]
        self.positions, self.refreshed = [], 0

    def forward(self, x, position):
        self.positions.append(position)
        return super().forward(x)

    def refresh(self):
        self.refreshed += 1


def stages_of(schedule, rank):
    extents = dense.widths(schedule.stages)
    return [Flat(number, *extents[number : number + 2]) for number in schedule.stages_of(rank)]


@pytest.mark.parametrize("recompute", [False, True])
def test_a_stage_is_told_where_the_training_stands(subcomm, recompute):
    """Each forward has its position, also the one that is made again for its backward."""
    pair = subcomm(2)
    if pair is None:
        return
    schedule = schedules.interleaved_1f1b(2, 2, 3)
    stages, (x, t) = stages_of(schedule, pair.rank), dense.batch(6, 4)
    own = dense.placed(schedule, pair.rank, x, t)
    with Pipeline(stages, schedule, pair, loss=dense.mean_squared, recompute=recompute) as pipeline:
        assert [stage.index for stage in stages] == [pair.rank, pair.rank + 2]
        assert all(stage.poll is not None for stage in stages)
        for _ in range(2):
            pipeline.step(*own)
        pipeline.evaluate(*own)
        pipeline.forward(own[0])
    for stage in stages:
        trained, rest = stage.positions[: 6 * (1 + recompute)], stage.positions[6 * (1 + recompute) :]
        expected = [nn.Position(step, m, 0, True) for step in range(2) for m in range(3) for _ in range(1 + recompute)]
        assert sorted(trained) == expected
        assert [(position.microbatch, position.training) for position in rest] == [(m, False) for m in range(3)] * 2
        assert stage.poll is None and stage.refreshed == 4


def test_a_stage_knows_its_replica(subcomm):
    pair = subcomm(2)
    if pair is None:
        return
    alone, schedule = pair.Split(pair.rank, 0), schedules.gpipe(1, 2)
    (stage,), (x, t) = stages_of(schedule, 0), dense.batch(4, 1)
    with Pipeline([stage], schedule, alone, loss=dense.mean_squared, replicas=pair) as pipeline:
        pipeline.step(x, t)
    assert {position.replica for position in stage.positions} == {pair.rank}
    alone.Free()


def test_a_forward_that_takes_no_position_may_take_the_place_of_one_that_does():
    (stage,), (x, t) = stages_of(schedules.gpipe(1, 2), 0), dense.batch(4, 1)
    plain = dense.TanhStage(0, *dense.widths(1))

    def job(comm):
        with Pipeline([stage], schedules.gpipe(1, 2), comm, loss=dense.mean_squared) as pipeline:
            before = pipeline.step(x, t).loss
            stage.forward = plain.forward
            assert pipeline.step(x, t).loss == before

    inprocess.run(1, job)
    assert len(stage.positions) == 2


def replaced(stage):
    stage.gradients = SimpleNamespace(flat=np.zeros_like(stage.gradients.flat))


def set_to_none(stage):
    stage.gradients = None


def shortened(stage):
    stage.gradients = SimpleNamespace(flat=stage.gradients.flat[:-1])


@pytest.mark.parametrize("change", [replaced, set_to_none, shortened])
def test_gradients_that_were_replaced_are_an_error_on_all_ranks(subcomm, change):
    """Otherwise they would be summed over the replicas as they were never written, or not at all, without a word."""
    pair = subcomm(2)
    if pair is None:
        return
    schedule = schedules.one_f_one_b(2, 2)
    (stage,), (x, t) = stages_of(schedule, pair.rank), dense.batch(4, 2)
    own, kept = dense.placed(schedule, pair.rank, x, t), stage.gradients
    with Pipeline([stage], schedule, pair, loss=dense.mean_squared) as pipeline:
        before = pipeline.step(*own).loss
        if pair.rank == 1:
            change(stage)
        with pytest.raises(ArgumentError, match="have been replaced") as caught:
            pipeline.step(*own)
        assert "rank 1, stage 1" in str(caught.value)
        stage.gradients = kept
        assert pipeline.step(*own).loss == before  # all ranks raised together, so all go on


def test_gradients_that_are_replaced_within_a_step_are_an_error_too(subcomm):
    pair = subcomm(2)
    if pair is None:
        return
    schedule = schedules.one_f_one_b(2, 2)
    (stage,), (x, t) = stages_of(schedule, pair.rank), dense.batch(4, 2)
    backward = stage.backward
    if pair.rank == 0:
        stage.backward = lambda dy, saved: replaced(stage) or backward(dy, saved)
    with (
        pytest.raises((ArgumentError, PeerError), match="have been replaced") as caught,
        Pipeline([stage], schedule, pair, loss=dense.mean_squared) as pipeline,
    ):
        pipeline.step(*dense.placed(schedule, pair.rank, x, t))
    assert "rank 0, stage 0, micro-batch 1" in str(caught.value)


def test_replicas_of_a_users_stage_start_from_the_same_parameters(subcomm):
    pair = subcomm(2)
    if pair is None:
        return
    alone, schedule = pair.Split(pair.rank, 0), schedules.gpipe(1, 2)
    (stage,) = stages_of(schedule, 0)
    stage.parameters.flat[0] += pair.rank
    with pytest.raises(MismatchError, match="parameters' values"):
        Pipeline([stage], schedule, alone, loss=dense.mean_squared, replicas=pair)
    alone.Free()


def test_gradients_of_replicas_are_summed(subcomm):
    pair = subcomm(2)
    if pair is None:
        return
    alone, schedule = pair.Split(pair.rank, 0), schedules.gpipe(1, 2)
    (stage,), (x, t) = stages_of(schedule, 0), dense.batch(8, 1)
    loss, (gradient,), _, _ = dense.reference(1, x, t)
    mine = slice(4 * pair.rank, 4 * pair.rank + 4)
    with Pipeline([stage], schedule, alone, loss=dense.mean_squared, replicas=pair) as pipeline:
        found = pipeline.step(x[mine], t[mine]).loss
    allowed = dense.bounds(1, x, t)
    within(found, loss, allowed[0], "loss")
    within(stage.gradient, gradient, allowed[1][0], "gradient")
    alone.Free()


def test_an_error_of_refresh_names_the_rank(subcomm):
    pair = subcomm(2)
    if pair is None:
        return
    schedule = schedules.one_f_one_b(2, 2)
    (stage,), (x, t) = stages_of(schedule, pair.rank), dense.batch(4, 2)
    if pair.rank == 1:
        stage.refresh = lambda: 1 / 0
    with (
        pytest.raises((StageError, PeerError), match="division by zero") as caught,
        Pipeline([stage], schedule, pair, loss=dense.mean_squared) as pipeline,
    ):
        pipeline.step(*dense.placed(schedule, pair.rank, x, t))
    assert "rank 1, stage 1" in str(caught.value)


class Half(Flat):
    """Buffers in bfloat16, beside what is frozen and known to `state_dict` alone."""

    def __init__(self, number, frozen):
        super().__init__(number, 3, 3)
        self.parameters, self.gradients = (nn.FlatBuffer({"weight": (3, 3)}, "bfloat16") for _ in range(2))
        self.frozen = np.full((2, 2), frozen)

    def state_dict(self):
        return {**self.parameters, "frozen": self.frozen}


def test_replicas_start_with_the_same_frozen_parameters(subcomm):
    pair = subcomm(2)
    if pair is None:
        return
    loss, schedule = dense.mean_squared, schedules.gpipe(1, 1)
    with Mesh(pair, pipe=1) as mesh:
        with Pipeline([Half(0, 0.0)], schedule, mesh.pipe, loss=loss, replicas=mesh.replicas):
            pass
        with pytest.raises(MismatchError, match="parameters' values"):
            Pipeline([Half(0, float(mesh.rank))], schedule, mesh.pipe, loss=loss, replicas=mesh.replicas)


def test_a_state_that_cannot_be_read_is_an_error_on_all_ranks(subcomm):
    pair = subcomm(2)
    if pair is None:
        return
    stage = Half(0, 0.0)
    if pair.rank == 1:
        del stage.frozen
    with Mesh(pair, pipe=1) as mesh, pytest.raises(ArgumentError, match=r"rank 1.*frozen"):
        Pipeline([stage], schedules.gpipe(1, 1), mesh.pipe, loss=dense.mean_squared, replicas=mesh.replicas)
