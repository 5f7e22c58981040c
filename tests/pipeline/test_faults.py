"""Wrong arguments and failures inside a step: every rank raises, none waits, and the text says where and what to do."""

from dataclasses import replace

import numpy as np
import pytest
from support import dense
from support.rings import refused
from support.tolerance import within

from mpipipe import Pipeline
from mpipipe.errors import ArgumentError, MismatchError, NonFiniteError, PeerError, ScheduleError, StageError
from mpipipe.job import communicators, context
from mpipipe.job.group import RankGroup
from mpipipe.schedules import Schedule, gpipe, one_f_one_b


def make(comm, schedule, **options):
    stages = options.pop("stages", None) or dense.model(schedule, comm.rank)
    return Pipeline(stages, schedule, comm, loss=options.pop("loss", dense.mean_squared), **options)


def test_schedule_for_another_number_of_ranks(comm):
    refused(comm, ArgumentError, "another number of ranks", lambda: make(comm, gpipe(comm.size + 1, 2), stages=[None]))


def test_a_refused_pipeline_leaves_no_communicator_behind(comm, monkeypatch):
    """MPICH has 2 046 of them."""
    made, freed = [], []

    def make(*arguments):
        result = original(*arguments)
        made.append(result[0])
        return result

    original = communicators.make
    monkeypatch.setattr(communicators, "make", make)
    monkeypatch.setattr(
        RankGroup, "close", lambda group, close=RankGroup.close: freed.append(group.comm) or close(group)
    )
    schedule = gpipe(comm.size, 2)
    for stages in ([], [None], dense.model(schedule, comm.rank) if comm.rank else [object()]):
        refused(comm, ArgumentError, "stage", lambda stages=stages: Pipeline(stages, schedule, comm))
    assert len(made) == 3 and freed == made and all(group.comm not in made for group in context.current_rank().groups)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    "match, schedule, options",
    [
        # of the same name, so that the order of its actions alone is another one
        ("different pipelines", lambda p: replace(gpipe(p, 4), name="one_f_one_b"), {}),
        ("different pipelines", lambda p: one_f_one_b(p, 3), {}),
        ("recompute True", lambda p: one_f_one_b(p, 4), {"recompute": True}),
        ("check True", lambda p: one_f_one_b(p, 4), {"check": True}),
        ("input_grads False", lambda p: one_f_one_b(p, 4), {"input_grads": False}),
    ],
)
def test_ranks_with_different_pipelines(comm, match, schedule, options):
    odd = comm.rank == 1
    schedule = schedule(comm.size) if odd else one_f_one_b(comm.size, 4)
    refused(comm, MismatchError, match, lambda: make(comm, schedule, **(options if odd else {})))


@pytest.mark.parametrize("name, orders", [
    ("backwards", lambda good: [order[::-1] for order in good]), ("short", lambda good: [good[0][:-1], *good[1:]]),
])  # fmt: skip
def test_a_schedule_that_cannot_run_is_refused_with_the_grid(comm, name, orders):
    good = gpipe(comm.size, 2)
    wrong = Schedule(name, good.placement, 2, tuple(orders(good.orders)))
    refused(comm, ScheduleError, "0B1", lambda: make(comm, wrong))


WRONG_CALLS = [
    ("inputs are missing", lambda x, t: (None, t)),
    ("targets are missing", lambda x, t: (x, None)),
    ("fewer rows|smaller than", lambda x, t: (x[:2], t[:2])),
    ("not C-contiguous", lambda x, t: (np.asfortranarray(x), t)),
    ("cannot be sent", lambda x, t: (x.astype(object), t)),
    ("neither an array", lambda x, t: ("text", t)),
    ("neither an array nor a tuple", lambda x, t: ([x[:2], 3, x[:2]], t)),
    ("wrong length", lambda x, t: ([x], t)),
    ("rows", lambda x, t: (x[:5], t)),
]


@pytest.mark.parametrize("match, arguments", WRONG_CALLS, ids=[match for match, _ in WRONG_CALLS])
def test_wrong_arguments_raise_everywhere_and_the_pipeline_lives_on(comm, match, arguments):
    schedule = one_f_one_b(comm.size, 3)
    x, t = dense.batch(6, schedule.stages)
    wrong = dense.placed(schedule, comm.rank, *arguments(x, t))
    with make(comm, schedule) as pipeline:
        for _ in range(2):
            refused(comm, ArgumentError, match, lambda: pipeline.step(*wrong))
        result = pipeline.step(*dense.placed(schedule, comm.rank, x, t))
        within(result.loss, dense.reference(schedule.stages, x, t)[0], dense.bounds(schedule.stages, x, t)[0], "loss")


@pytest.mark.mpi(min_size=2)
def test_an_error_of_all_ranks_that_only_some_handle_leaves_nobody_waiting(comm):
    """Rank 0 leaves the block with it, the others go on: they call different things, and are told."""
    schedule = one_f_one_b(comm.size, 3)
    x, t = dense.placed(schedule, comm.rank, *dense.batch(6, schedule.stages))
    short = x[:2] if x is not None else None
    if comm.rank == 0:
        with pytest.raises(ArgumentError, match="smaller than"):
            with make(comm, schedule) as pipeline:
                pipeline.step(short, t)
    else:
        with pytest.raises((MismatchError, PeerError)):
            with make(comm, schedule) as pipeline:
                with pytest.raises(ArgumentError, match="smaller than"):
                    pipeline.step(short, t)
                pipeline.step(x, t)
    comm.Barrier()


@pytest.mark.parametrize("scale", [0, float("inf"), float("nan"), None, "2"])
def test_a_scale_that_is_no_scale_and_no_loss(comm, scale):
    schedule = gpipe(comm.size, 2)
    mine = dense.placed(schedule, comm.rank, *dense.batch(2, schedule.stages))
    with Pipeline(dense.model(schedule, comm.rank), schedule, comm) as pipeline:
        refused(comm, ArgumentError, "no loss", lambda: pipeline.step(*mine))
    with make(comm, schedule) as pipeline:
        refused(comm, ArgumentError, "scale", lambda: pipeline.step(*mine, scale=scale))


@pytest.mark.mpi(min_size=2)
def test_calls_that_differ_from_rank_to_rank(comm):
    schedule, odd = gpipe(comm.size, 2), comm.rank == 1
    x, t = dense.batch(2, schedule.stages)
    with make(comm, schedule) as pipeline:
        mine = dense.placed(schedule, comm.rank, x, t)
        call = pipeline.evaluate if odd else pipeline.step
        refused(comm, MismatchError, "different methods", lambda: call(*mine))
        scale = 2.0 if odd else 1.0
        refused(comm, MismatchError, r"scale 2\.0", lambda: pipeline.step(*mine, scale=scale))
        refused(comm, MismatchError, "accumulate", lambda: pipeline.step(*mine, accumulate=odd))
        refused(comm, ArgumentError, "wrong rank", lambda: pipeline.step(x, mine[1]))
        pipeline.step(*mine, scale=2.0)


class Fails(dense.TanhStage):
    def backward_input(self, dy, saved):
        raise ValueError("wet paint")


class Half(dense.TanhStage):
    def backward_input(self, dy, saved):
        dx, pending = super().backward_input(dy, saved)
        return dx.astype(np.float32), pending


def no_number(output, target):
    value, gradient = dense.mean_squared(output, target)
    return value * np.nan, gradient


FAILURES = {  # (stage of the guilty rank, loss, its error and the text, which rank it is)
    "an exception in a backward": (Fails, dense.mean_squared, StageError, "ValueError: wet paint", 0.5),
    "a loss that is no number": (dense.TanhStage, no_number, NonFiniteError, "the loss is not finite", 1),
    "an input gradient of a wrong dtype": (Half, dense.mean_squared, ArgumentError, "float32", 1),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_failure_inside_a_step_reaches_every_rank(comm, name):
    """The guilty rank names the place, the others say the same, and the pipeline refuses further work."""
    kind, loss, error, match, share = FAILURES[name]
    if kind is Half and comm.size == 1:
        pytest.skip("needs 2 ranks")
    schedule, where = one_f_one_b(comm.size, 4), min(int(share * comm.size), comm.size - 1)
    extents = dense.widths(schedule.stages)[comm.rank : comm.rank + 2]
    stages = [(kind if comm.rank == where else dense.TanhStage)(comm.rank, *extents)]
    pipeline = make(comm, schedule, stages=stages, loss=loss)
    with pytest.raises((error, PeerError), match=match) as caught:
        pipeline.step(*dense.placed(schedule, comm.rank, *dense.batch(40_000, schedule.stages)))
    found = caught.value
    assert isinstance(found, error if comm.rank == where else PeerError)
    assert found.reported_elsewhere is (comm.rank != where)
    if comm.rank == where:
        assert found.rank == where and found.stage == where and found.microbatch is not None
    with pytest.raises(ArgumentError, match="failed"):
        pipeline.step(None, None)
    pipeline.close()


def test_error_outside_a_step_but_inside_the_block_is_told_to_waiting_peers(comm):
    schedule = gpipe(comm.size, 2)
    x, t = dense.batch(2, schedule.stages)
    with pytest.raises((KeyError, PeerError), match="lost"):
        with make(comm, schedule) as pipeline:
            if comm.rank == 0:
                raise KeyError("lost")
            pipeline.step(*dense.placed(schedule, comm.rank, x, t))
