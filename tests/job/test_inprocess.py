"""Ranks as threads: the same pipeline without MPI, strict about every rule of message passing."""

import numpy as np
import pytest

from mpipipe import Pipeline, nn, schedules
from mpipipe.errors import ArgumentError, PeerError
from mpipipe.job import inprocess
from mpipipe.job.inprocess import InProcessError


def finish(*requests):
    for request in requests:
        while not request.Test():
            pass


def of_another_length(comm):
    finish(comm.Isend(np.zeros(3), 1, 7) if comm.rank == 0 else comm.Irecv(np.zeros(4), 0, 7))


@pytest.mark.parametrize(
    ("match", "job"),
    [
        ("does not fit", of_another_length),
        ("never received", lambda comm: finish(comm.Isend(np.zeros(3), 1 - comm.rank, 7))),
        ("nothing came", lambda comm: comm.Irecv(np.zeros(1), 0, 3) and None),
        ("different collectives", lambda comm: comm.allgather(1) if comm.rank else finish(comm.Ibcast(np.zeros(1)))),
        ("tag out of range", lambda comm: comm.Isend(np.zeros(1), 0, 40_000)),
        ("no such rank", lambda comm: comm.Isend(np.zeros(1), 5, 0)),
    ],
)
def test_a_broken_rule_of_message_passing_is_an_error(match, job):
    with pytest.raises(InProcessError, match=match):
        inprocess.run(2, job)


def test_synchronous_send_completes_only_once_received():
    def job(comm):
        if comm.rank == 0:
            request = comm.Issend(np.ones(1), 1, 0)
            assert not request.Test()
            comm.Barrier()
            finish(request)
        else:
            comm.Barrier()
            box = np.zeros(1)
            finish(comm.Irecv(box, 0, 0))
            assert box[0] == 1

    inprocess.run(2, job)


def test_number_of_ranks_must_be_a_count():
    with pytest.raises(ArgumentError, match="at least 1"):
        inprocess.run(0, lambda comm: None)


WITHOUT_MPI = """
import sys
sys.modules["mpi4py"] = None  # importing it fails
import numpy as np
from mpipipe import Pipeline, attention, nn, schedules
from mpipipe.job import inprocess, threads

def job(comm):
    stage = nn.Stage([nn.Linear(4, 4)], first=comm.rank)
    x = np.ones((4, 4), np.float32)
    with Pipeline([stage], schedules.gpipe(2, 2), comm, loss=nn.mean_squared_error) as pipeline:
        loss = pipeline.step(x if comm.rank == 0 else None, x if comm.rank == 1 else None).loss
    q = np.ones((1, 4, 2, 4))
    out, saved = attention.ring_attention(q, q, q, comm)
    attention.ring_attention_backward(out, saved)
    return loss

print(len(set(inprocess.run(2, job))))
"""


def test_ranks_as_threads_need_no_mpi(launch):
    job = launch(0, WITHOUT_MPI)
    assert (job.returncode, job.stdout) == (0, "1\n"), job.stderr


@pytest.mark.parametrize("where", ["before", "between"])
def test_a_rank_whose_function_returns_early_ends_those_that_wait_for_it(where):
    def job(comm):
        if where == "before" and comm.rank == 1:
            return
        x = np.ones((4, 4), np.float32)
        stage = nn.Stage([nn.Linear(4, 4)], first=comm.rank)
        pipeline = Pipeline([stage], schedules.gpipe(2, 2), comm, loss=nn.mean_squared_error)
        if where == "between" and comm.rank == 1:
            return
        pipeline.step(*(x if comm.rank == rank else None for rank in (0, 1)))

    with pytest.raises(PeerError, match=r"rank 1 .*(has returned|left the job)"):
        inprocess.run(2, job)
