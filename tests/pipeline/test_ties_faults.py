"""A rank that ends while gradients of a tied parameter are under way: the job ends, and says so once."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
from faults.fault import HEADING
from gpu_emulator.fixture import own_gpus
from support import dense

from mpipipe import Pipeline, nn
from mpipipe.errors import MpipipeError, PeerError
from mpipipe.job.wait import wait_for
from mpipipe.pipeline.ties import TiedParameter
from mpipipe.schedules import one_f_one_b


class Aborted:
    """Whether every communicator of NCCL with kernels under way ends; aborts run on threads."""

    def __init__(self, machine):
        self.Test = lambda: all(each._aborted or not each._underway for each in machine.communicators)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("guilty", ["first", "last"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_an_error_in_mid_exchange_reaches_all_ranks(comm, monkeypatch, device, guilty):
    """Those that wait for a part hear of it, and so do those without a place, which are in their next step by then."""
    monkeypatch.setenv("MPIPIPE_TIMEOUT", "60")  # a rank that does not hear is to be an error
    guilty, places = (0 if guilty == "first" else comm.size - 1), (0, 1, comm.size - 1)
    send, broken = TiedParameter._send, False

    def breaks(parameter, *given):
        if broken and comm.rank == guilty:
            raise ValueError("wet paint")
        return send(parameter, *given)

    monkeypatch.setattr(TiedParameter, "_send", breaks)
    schedule, x = one_f_one_b(comm.size, 4), np.ones((8, 512), np.float32)
    with own_gpus(comm.rank) if device == "cuda" else nullcontext() as gpu:
        tied = dict(bias=False, tie="w") if comm.rank in places else {}
        stage = nn.Stage([nn.Linear(512, 512, **tied)], first=comm.rank, device=device)
        pipeline = Pipeline([stage], schedule, comm, loss=nn.mean_squared_error)
        assert pipeline.engine.nccl.messages == (device == "cuda")
        mine = dense.placed(schedule, comm.rank, x, x)
        for _ in range(2):
            pipeline.step(*mine)
        broken = True
        with pytest.raises((ValueError, MpipipeError), match="wet paint") as caught:
            for _ in range(2 - (comm.rank in places)):
                pipeline.step(*mine)
        assert comm.rank == guilty or isinstance(caught.value, PeerError)
        if gpu is not None:
            wait_for(Aborted(gpu.machine), "aborts")


# of three ranks or more one has no place of the parameter, and is in its next step by then; a part is 1 MB
JOB = """
import os, signal, sys
import numpy as np
from mpi4py import MPI
from mpipipe import Pipeline, nn
from mpipipe.job.exit import run_or_abort
from mpipipe.pipeline.ties import TiedParameter
from mpipipe.schedules import one_f_one_b

comm = MPI.COMM_WORLD
rank, last = comm.rank, comm.size - 1
pipeline, send = None, TiedParameter._send

def breaks(parameter, *given):
    request = send(parameter, *given)
    if pipeline is not None and pipeline.engine.steps_taken == 2:
        print("in mid-exchange", flush=True)
        {act}
    return request

def main():
    global pipeline
    tied = dict(bias=False, tie="w") if rank in (0, 1, last) else dict()
    stage = nn.Stage([nn.Linear(512, 512, **tied)], first=rank, device="{device}")
    if rank == {guilty}:
        TiedParameter._send = breaks
    x = np.ones((8, 512), np.float32)
    with Pipeline([stage], one_f_one_b(comm.size, 4), comm, loss=nn.mean_squared_error) as pipeline:
        assert pipeline.engine.nccl.messages == ("{device}" == "cuda"), pipeline.engine.nccl
        for step in range(5):
            pipeline.step(x if rank == 0 else None, x if rank == last else None)
    print("finished", flush=True)

sys.exit(run_or_abort(main))
"""
KILL, LEAVE, RAISE = "os.kill(os.getpid(), signal.SIGKILL)", "os._exit(3)", "raise ValueError('wet paint')"


@pytest.fixture
def start(request, launch):
    """start(ranks, act, guilty, device): the outcome of the job; "cuda" is an emulated GPU for each rank, with NCCL."""

    def job(ranks, act, guilty, device):
        env = {}
        if device == "cuda":
            env = {**request.getfixturevalue("emulated_gpu").environment, "MPIPIPE_TEST_GPU_OWN": "1"}
        found = launch(ranks, JOB.format(act=act, guilty=guilty, device=device), timeout=60, env=env)
        assert found.returncode not in (0, None) and "finished" not in found.stdout
        assert found.stdout.count("in mid-exchange") == 1, found.stderr
        assert "DeviceHangError" not in found.stderr, found.stderr
        return found

    return job


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("guilty", ["0", "last"])
def test_a_killed_rank_ends_the_job(start, ranks, guilty, device):
    assert start(ranks, KILL, guilty, device).stderr.count(HEADING) <= 1  # the launcher may be faster than a report


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("act, says", [(RAISE, "wet paint"), (LEAVE, "os._exit(3) was called")], ids=["raise", "leave"])
def test_all_other_ranks_end_with_one_report(start, ranks, act, says, device):
    job = start(ranks, act, "last", device)
    assert job.stderr.count(HEADING) == 1, job.stderr
    assert f"{HEADING} rank {ranks - 1}" in job.stderr and says in job.stderr, job.stderr
