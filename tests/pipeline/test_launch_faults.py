"""Failures around launched steps: every rank raises in seconds, whatever it does meanwhile, and the text says why.

Messages are larger than what MPI sends at once, and what stops messages is met with plain and with synchronous sends.
"""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pytest
from support import dense

from mpipipe import Pipeline, nn, optim
from mpipipe.errors import ArgumentError, MismatchError, MpipipeError, PeerError, StageError
from mpipipe.schedules import one_f_one_b

ROWS, MICROBATCHES = 40_000, 4  # 240 kB and more in a message


@pytest.fixture(params=["0", "1"], ids=["sends", "synchronous sends"])
def sends(request, monkeypatch):
    monkeypatch.setenv("MPIPIPE_SYNC_SENDS", request.param)


def make(comm, stages=None, loss=dense.mean_squared, **options):
    """(pipeline, this rank's batch), behind one launched step whose loss nobody has asked for."""
    schedule = one_f_one_b(comm.size, MICROBATCHES)
    pipeline = Pipeline(stages or dense.model(schedule, comm.rank), schedule, comm, loss, **options)
    mine = dense.placed(schedule, comm.rank, *dense.batch(ROWS, schedule.stages))
    pending = pipeline.launch(*mine)
    comm.Barrier()  # else a rank might hear of what comes next in the end of this step
    return pipeline, mine, pending


def ends(comm, pipeline, act, match, kind=MpipipeError):
    """`act()` raises on every rank; somebody is left to report it, and with the right text."""
    with pytest.raises(kind, match=match) as caught:
        act()
    assert not comm.allgather(caught.value.reported_elsewhere).count(False) == 0
    with suppress(PeerError):  # where the error was agreed on, or came outside of a call, it has yet to be heard of
        pipeline.close()
    return caught.value


OTHER_CALLS = {  # and the rank that makes it
    "step": (0, lambda pipeline, mine: pipeline.step(*mine)),
    "evaluate": (-1, lambda pipeline, mine: pipeline.evaluate(*mine)),
    "forward": (0, lambda pipeline, mine: pipeline.forward(mine[0])),
    "durations": (-1, lambda pipeline, mine: pipeline.durations()),
    "close": (0, lambda pipeline, mine: pipeline.close()),
    "other scale": (-1, lambda pipeline, mine: pipeline.launch(*mine, scale=2.0)),
}


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("other", OTHER_CALLS)
def test_a_rank_that_makes_another_call(comm, sends, other):
    odd, call = OTHER_CALLS[other]
    pipeline, mine, _pending = make(comm)

    def act():
        if comm.rank == odd % comm.size:
            call(pipeline, mine)
        else:
            pipeline.launch(*mine)
        raise AssertionError("the call has returned")

    ends(comm, pipeline, act, "different methods|scale", (MismatchError, PeerError))


BATCHES = {
    "no inputs": (0, "inputs are missing", lambda x, t: (None, t)),
    "no targets": (-1, "targets are missing", lambda x, t: (x, None)),
    "other inputs": (0, "another batch", lambda x, t: (None if x is None else x[: ROWS // 2], t)),
    "other targets": (-1, "another batch", lambda x, t: (x, None if t is None else t[: ROWS // 2])),
    "another dtype": (0, "another batch", lambda x, t: (None if x is None else x.astype(np.float32), t)),
    "larger inputs": (0, "another batch", lambda x, t: (None if x is None else np.concatenate([x, x]), t)),
}


@pytest.mark.parametrize("case", BATCHES)
def test_a_batch_that_is_wrong_on_one_rank(comm, sends, case):
    where, match, change = BATCHES[case]
    pipeline, mine, _pending = make(comm)
    error = ends(comm, pipeline, lambda: pipeline.launch(*change(*mine)), match, (ArgumentError, PeerError))
    odd = where % comm.size
    assert isinstance(error, ArgumentError if comm.rank == odd else PeerError)
    if comm.rank == odd:
        assert error.rank == odd
    with pytest.raises(ArgumentError, match="the pipeline is failed"):
        pipeline.launch(*mine)


def test_the_first_launch_refuses_wrong_arguments_as_step_does(comm):
    schedule = one_f_one_b(comm.size, MICROBATCHES)
    x, t = dense.placed(schedule, comm.rank, *dense.batch(8, schedule.stages))
    with Pipeline(dense.model(schedule, comm.rank), schedule, comm, dense.mean_squared) as pipeline:
        for _ in range(2):
            with pytest.raises(ArgumentError, match="inputs are missing"):
                pipeline.launch(None, t)
        assert np.isfinite(pipeline.launch(x, t).wait().loss)


class Fails(dense.TanhStage):
    """Fails in the backward of the last micro-batch of step 1, or in the forward of its first one."""

    forwards = backwards = 0
    op = "B"

    def forward(self, x):
        self.forwards += 1
        if self.op == "F" and self.forwards == MICROBATCHES + 1:
            raise ValueError("wet paint")
        return super().forward(x)

    def backward_input(self, dy, saved):
        self.backwards += 1
        if self.op == "B" and self.backwards == 2 * MICROBATCHES:
            raise ValueError("wet paint")
        return super().backward_input(dy, saved)


@pytest.mark.parametrize("op", "FB")
@pytest.mark.parametrize("where", [0, -1])
def test_an_exception_in_a_stage(comm, sends, where, op):
    """Other ranks are in the next step, or ask for a loss that never comes, or for one that has come."""
    extents, odd = dense.widths(comm.size), where % comm.size
    stage = (Fails if comm.rank == odd else dense.TanhStage)(comm.rank, *extents[comm.rank : comm.rank + 2])
    stage.op = op
    pipeline, mine, first = make(comm, [stage])

    def act():
        for _ in range(9):
            pipeline.launch(*mine)

    error = ends(comm, pipeline, act, "wet paint", (StageError, PeerError))
    assert isinstance(error, StageError if comm.rank == odd else PeerError)
    try:
        assert np.isfinite(first.wait().loss)
    except ArgumentError as problem:  # it had not come to this rank
        assert "the pipeline is failed" in str(problem)


@pytest.mark.mpi(min_size=2)
def test_a_loss_that_never_comes(comm, sends):
    """The last rank computes a loss that is no number; the others have launched nothing more, and ask for it."""
    calls = []

    def loss(output, target):
        calls.append(0)
        value, gradient = dense.mean_squared(output, target)
        return value * (np.nan if len(calls) == 2 * MICROBATCHES else 1.0), gradient

    pipeline, mine, _first = make(comm, loss=loss)

    def act():
        pending = pipeline.launch(*mine)
        pending.wait()

    ends(comm, pipeline, act, "not finite", MpipipeError)


@pytest.mark.mpi(min_size=2)
def test_an_error_outside_of_a_step_reaches_ranks_that_are_in_the_next_one(comm, sends):
    with pytest.raises((KeyError, PeerError), match="lost"):
        pipeline, mine, _pending = make(comm)
        with pipeline:
            if comm.rank == comm.size - 1:
                raise KeyError("lost")
            pipeline.launch(*mine)
            pipeline.launch(*mine)
            pipeline.evaluate(*mine)


@pytest.mark.mpi(min_size=2)
def test_a_pipeline_within_its_own_step(comm):
    """A stage that launches, or asks for a loss that is not there, is refused; it may ask for one that is."""
    schedule, asked = one_f_one_b(comm.size, 2), []

    class Asks(dense.TanhStage):
        def forward(self, x):
            if asked:
                asked.append(asked[0].wait().loss)
            if len(asked) == 4:
                pipeline.launch(*mine)
            return super().forward(x)

    stages = [Asks(comm.rank, *dense.widths(comm.size)[comm.rank : comm.rank + 2])]
    mine = dense.placed(schedule, comm.rank, *dense.batch(4, schedule.stages))
    pipeline = Pipeline(stages, schedule, comm, dense.mean_squared)
    first = pipeline.launch(*mine)
    expected = first.wait().loss
    if comm.rank == 0:
        asked.append(first)
    pipeline.launch(*mine)
    ends(comm, pipeline, lambda: pipeline.launch(*mine), "within another call", (ArgumentError, PeerError))
    assert set(asked[1:]) <= {expected}


@pytest.mark.long
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("odd", [0, -1])
def test_a_rank_that_leaves_the_optimizer_out(comm, odd):
    """It is in the next step, and the others in the sum of the norm: they find that they wait for each other."""
    stages = [nn.Stage([nn.Linear(64, 64)], first=comm.rank)]
    schedule = one_f_one_b(comm.size, 2)
    x, t = np.ones((2, 2000, 64), np.float32)
    mine = dense.placed(schedule, comm.rank, x, t)
    pipeline, optimizer = Pipeline(stages, schedule, comm, nn.mean_squared_error), optim.SGD(stages, lr=0.1)

    def act():
        for step in range(3):
            pipeline.launch(*mine)
            if step < 1 or comm.rank != odd % comm.size:
                optim.begin_step(optimizer, 1.0, comm=comm).wait()
        raise AssertionError("the steps have ended")

    ends(comm, pipeline, act, "wait for each other|different calls", (MismatchError, PeerError))


REPLICA_FAULTS = {
    "evaluate": ("different methods", lambda pipeline, mine: pipeline.evaluate(*mine)),
    "scale": ("scale", lambda pipeline, mine: pipeline.launch(*mine, scale=2.0)),
    "batch": (
        "another batch",
        lambda pipeline, mine: pipeline.launch(*(None if each is None else each[:2000] for each in mine)),
    ),
}


@pytest.mark.mpi(min_size=4)
@pytest.mark.parametrize("fault", REPLICA_FAULTS)
def test_one_replica_that_does_something_else(comm, sends, fault):
    """All ranks of it, so that its pipeline agrees."""
    match, act = REPLICA_FAULTS[fault]
    half, across = comm.Split(comm.rank // 2, comm.rank), comm.Split(comm.rank % 2, comm.rank)
    if comm.size % 2 or half.size != 2:
        pytest.skip("two pipelines of two ranks")
    stages = [nn.Stage([nn.Linear(64, 64)], first=half.rank)]
    pipeline = Pipeline(stages, one_f_one_b(2, MICROBATCHES), half, nn.mean_squared_error, replicas=across)
    mine = dense.placed(pipeline.schedule, half.rank, *np.ones((2, 4000, 64), np.float32))
    pipeline.launch(*mine)
    comm.Barrier()

    def run():
        act(pipeline, mine) if comm.rank // 2 == 1 else pipeline.launch(*mine)
        raise AssertionError("the call has returned")

    ends(comm, pipeline, run, match, (MismatchError, ArgumentError, PeerError))


# -- Whole jobs with launched steps: ranks that die or leave, and ends of scripts with losses that nobody asked for ----


SCRIPT = """
import os, sys
import numpy as np
from mpipipe import Pipeline, nn, optim, schedules
from mpipipe.job import runtime

comm = runtime.world()
stages = [nn.Stage([nn.Linear(64, 64)], first=comm.rank)]
batch = np.ones((4000, 64), np.float32)
mine = batch if comm.rank == 0 else None, batch if comm.rank == comm.size - 1 else None
pipeline = Pipeline(stages, schedules.one_f_one_b(comm.size, 4), comm, nn.mean_squared_error)
optimizer = optim.SGD(stages, lr=0.1)
for step in range(5):
    if step == 3 and comm.rank == 1:
        ACT
    pending = pipeline.launch(*mine)
    optim.begin_step(optimizer, MAX_NORM, comm=comm).wait()
print("end", flush=True)
"""


@pytest.mark.parametrize(
    "act, max_norm, says",
    [
        ("os._exit(3)", "1.0", ""),
        ("sys.exit(0)", "None", "left the job"),
        pytest.param("sys.exit(0)", "1.0", "left the job", marks=pytest.mark.long),
    ],
)
def test_a_rank_that_dies_or_leaves_ends_the_job(launch, act, max_norm, says):
    job = launch(3, SCRIPT.replace("ACT", act).replace("MAX_NORM", max_norm), env={"MPIPIPE_SYNC_SENDS": "1"})
    assert job.returncode not in (0, None) and job.stdout.count("end") == 0
    assert says in job.stderr


def test_losses_that_nobody_has_asked_for_keep_no_job_from_ending(launch):
    """Nor does a pipeline that nobody has closed."""
    job = launch(3, SCRIPT.replace("ACT", "pass").replace("MAX_NORM", "None"))
    assert job.returncode == 0 and job.stdout.count("end") == 3, job.stderr
