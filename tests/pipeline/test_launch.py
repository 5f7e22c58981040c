"""Launched steps: the bits of `step`, no barrier between them, and losses that come when they like."""

from __future__ import annotations

import time
from functools import partial

import numpy as np
import pytest
from support import dense

from mpipipe import Pipeline, nn, optim, schedules, tracing
from mpipipe.errors import ArgumentError, MpipipeError
from mpipipe.job import inprocess

STEPS, MICROBATCHES, WIDTH = 4, 6, 8
PATIENCE = 60.0  # seconds for what happens at once where there is no barrier
SCHEDULES = [("one_f_one_b", 1), ("interleaved_1f1b", 2), ("zero_bubble_h1", 1), ("zero_bubble_v", 2)]


def batch(step, schedule, rank, extra=()):
    """The batch of a step: another one each time."""
    rng = np.random.default_rng((step, *extra))
    x, t = rng.normal(size=(2, 2 * MICROBATCHES, WIDTH)).astype(np.float32)
    return dense.placed(schedule, rank, x, t)


def layers(number, stages):
    """A linear layer and a Gelu; the weight of the first stage is that of the last one, too, of so many."""
    tie = "ends" if stages > 1 and number in (0, stages - 1) else None
    return [nn.Linear(WIDTH, WIDTH, tie=tie), nn.Gelu()]


def train(comm, name, chunks, how, *, replicas=1, recompute=False, tied=False):
    """(losses, input gradients, parameters) on this rank after some steps, made in one of three ways."""
    pipe = comm.Split(comm.rank % replicas, comm.rank)
    across = comm.Split(comm.rank // replicas, comm.rank) if replicas > 1 else None
    schedule = dense.build(name, pipe.size, chunks, MICROBATCHES)
    stages = [
        nn.Stage(layers(s, schedule.stages if tied else 0), first=2 * s, seed=1) for s in schedule.stages_of(pipe.rank)
    ]
    results = []
    with Pipeline(stages, schedule, pipe, nn.mean_squared_error, recompute, across) as pipeline:
        optimizer = optim.AdamW(stages, lr=0.01)
        for step in range(STEPS):
            mine = batch(step, schedule, pipe.rank, (comm.rank % replicas,))
            if how == "step":
                results.append(pipeline.step(*mine))
                optim.scaled_step(optimizer, optim.LossScaler(1.0, dynamic=False), 0.5, comm=pipe)
                continue
            results.append(pipeline.launch(*mine))
            assert all(
                group.vote is None for group in pipeline.engine.partners.groups
            )  # gradients are of ranks that agree
            update = optim.begin_step(optimizer, 0.5, comm=pipe)
            if how == "launch, ask late" and step:
                results[-2] = results[-2].wait()
            update.wait()
        if how != "step":
            results[-1] = results[-1].wait()
    if how == "launch, ask at the end":
        results[:-1] = [pending.wait() for pending in results[:-1]]  # by now the pipeline is closed
    grads = [None if each.input_grads is None else [g.tobytes() for g in each.input_grads] for each in results]
    return [(r.loss, r.losses) for r in results], grads, [stage.parameters.flat.tobytes() for stage in stages]


@pytest.mark.parametrize(
    "name, chunks, options",
    [(*each, {}) for each in SCHEDULES]
    + [("one_f_one_b", 1, options) for options in ({"tied": True}, {"recompute": True}, {"replicas": 2})]
    + [("one_f_one_b", 1, {"replicas": 2, "tied": True})],
)
def test_launched_steps_have_the_bits_of_step(comm, name, chunks, options):
    if (comm.size < 2 and options) or comm.size % options.get("replicas", 1):
        pytest.skip("needs 2 ranks, or an even number for two replicas")
    how = "launch, ask late" if chunks == 1 else "launch, ask at the end"
    assert train(comm, name, chunks, how, **options) == train(comm, name, chunks, "step", **options)


def test_they_have_them_whatever_the_messages_do():
    """Ranks that are threads, whose sends are synchronous, or whose messages come after random times."""
    for ranks in (1, 2, 4):
        plain = inprocess.run(ranks, lambda comm: alone(comm, "step"))
        for options in ({"synchronous": True}, {"delay": 2e-3, "seed": ranks}):
            assert inprocess.run(ranks, lambda comm: alone(comm, "launch"), **options) == plain


def alone(comm, how):
    """(losses, weights) of a small pipeline without an optimizer of the package."""
    schedule = dense.build("one_f_one_b", comm.size, 1, 4)
    stages, found = dense.model(schedule, comm.rank), []
    with Pipeline(stages, schedule, comm, dense.mean_squared) as pipeline:
        for step in range(4):
            for stage in stages:
                stage.gradient[...] = 0
            x, t = dense.batch(8, schedule.stages, seed=step)
            found.append(getattr(pipeline, how)(*dense.placed(schedule, comm.rank, x, t)))
            for stage in stages:
                stage.weight -= 0.1 * stage.gradient
        if how == "launch":
            found = [pending.wait() for pending in found]
    return [result.loss for result in found], [stage.weight.tobytes() for stage in stages]


class Slow(nn.Stage):
    """The last stage: in step 1 its last weight gradient waits until rank 0 is in step 2."""

    comm = pipeline = None
    calls = 0

    def backward_weight(self, pending):
        self.calls += 1
        if self.calls == 2 * MICROBATCHES:
            start = time.monotonic()
            while not self.comm.Iprobe(0, 7):
                assert time.monotonic() < start + PATIENCE, "rank 0 waits for the end of step 1"
            self.comm.Recv(np.empty(1), 0, 7)
        super().backward_weight(pending)


@pytest.mark.mpi(min_size=2)
def test_a_rank_begins_the_next_step_while_another_is_in_the_last_one(comm):
    """By the order of events: with a barrier anywhere between the two, neither would go on."""
    schedule = dense.build("zero_bubble_h1", comm.size, 1, MICROBATCHES)
    last = comm.rank == comm.size - 1
    stage = (Slow if last else nn.Stage)([nn.Linear(WIDTH, WIDTH)], first=comm.rank)
    stage.comm, sent = comm, []
    forward, steps = stage.forward, []

    def look(x, position=None):
        if comm.rank == 0 and len(steps) == 3 and not sent:
            sent.append(comm.Isend(np.ones(1), comm.size - 1, 7))
        return forward(x, position)

    with Pipeline([stage], schedule, comm, nn.mean_squared_error) as pipeline:
        stage.forward = look
        optimizer, pending = optim.SGD([stage], lr=0.1), []
        for step in range(4):
            steps.append(step)
            pending.append(pipeline.launch(*batch(step, schedule, comm.rank)))
            optim.begin_step(optimizer).wait()
        assert [each.wait().loss for each in pending] == [each.wait().loss for each in pending]
    for request in sent:
        request.Wait()


def test_other_calls_come_between_launched_steps(comm):
    """Whose losses nobody has asked for yet, and some of which nobody ever asks for."""
    schedule = dense.build("one_f_one_b", comm.size, 1, 2)
    stages = dense.model(schedule, comm.rank)
    x, t = dense.batch(4, schedule.stages)
    mine = dense.placed(schedule, comm.rank, x, t)
    wide = dense.placed(schedule, comm.rank, *dense.batch(6, schedule.stages))
    with Pipeline(stages, schedule, comm, dense.mean_squared) as pipeline:
        expected = pipeline.step(*mine).loss
        first = pipeline.launch(*mine)
        value = pipeline.evaluate(*mine)
        second = pipeline.launch(*mine)
        pipeline.forward(mine[0])
        pipeline.durations()
        for _ in range(10):
            pipeline.launch(*mine)
        assert pipeline.step(*wide).loss != expected  # another shape
        third = pipeline.launch(*wide)
        assert pipeline.steps_taken == 15
    assert second.wait().loss == first.wait().loss == expected and abs(value - expected) < 1e-12
    assert third.wait() is third.wait() and len(third.wait().losses) == 2
    assert not pipeline.engine.weighing.underway


def test_a_launched_step_is_recorded_like_any_other(comm):
    schedule = dense.build("one_f_one_b", comm.size, 1, 2)
    mine = dense.placed(schedule, comm.rank, *dense.batch(4, schedule.stages))
    with Pipeline(dense.model(schedule, comm.rank), schedule, comm, dense.mean_squared) as pipeline:
        with tracing.recording(pipeline) as record:
            for _ in range(3):
                pipeline.launch(*mine)
        assert record.steps == 3
        assert len([span for span in record.spans if span.name.split()[0][-2] in "FB"]) == 12


def test_no_training_step_begins_before_the_update_of_the_last_one_has_ended(comm):
    """Its gradients would be of two steps; a validation may."""
    schedule = dense.build("one_f_one_b", comm.size, 1, MICROBATCHES)
    stages = [nn.Stage(layers(s, 0), first=2 * s) for s in schedule.stages_of(comm.rank)]
    mine = batch(0, schedule, comm.rank)
    with Pipeline(stages, schedule, comm, nn.mean_squared_error) as pipeline:
        optimizer = optim.AdamW(stages, lr=0.01)
        pipeline.step(*mine)
        update = optim.begin_step(optimizer, 0.5, comm=comm)
        before = pipeline.evaluate(*mine)
        with pytest.raises(ArgumentError, match=r"(?s)has begun, and not ended.*call wait\(\)"):
            pipeline.step(*mine)
        scaler = optim.LossScaler(1.0, dynamic=False)
        for step in (
            partial(optim.begin_step, optimizer, 0.5, comm=comm),
            partial(optim.scaled_step, optimizer, scaler, 0.5, comm=comm),
            optimizer.step,
            optim.SGD(stages, lr=0.1).step,
        ):
            with pytest.raises(ArgumentError, match="has begun, and not ended"):
                step()
        assert optimizer.steps == 0
        assert all(stage.update_begun is update for stage in stages)  # for who has lost it
        update.wait()
        assert pipeline.step(*mine).loss != before


def test_a_rank_that_forgets_its_update_ends_the_launch_on_all():
    """Where ranks run ahead, too."""

    def forgetful(comm):
        schedule = schedules.one_f_one_b(comm.size, MICROBATCHES)
        stages = [nn.Stage(layers(s, 0), first=2 * s) for s in schedule.stages_of(comm.rank)]
        mine = batch(0, schedule, comm.rank)
        pipeline = Pipeline(stages, schedule, comm, nn.mean_squared_error)
        pipeline.launch(*mine)
        update = optim.begin_step(optim.AdamW(stages, lr=0.01), 0.5, comm=comm)
        if comm.rank:
            update.wait()
        with pytest.raises(MpipipeError):
            pipeline.launch(*mine).wait()
            pipeline.launch(*mine).wait()
        return update

    inprocess.run(2, forgetful)
