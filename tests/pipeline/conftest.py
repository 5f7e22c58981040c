"""Fixtures of pipelines on devices: both ways that device memory travels, and a GPU for each rank with NCCL."""

import pytest
from gpu_emulator.fixture import own_gpus
from mpi4py import MPI

from mpipipe.comm.transport import gpu_aware


@pytest.fixture
def alone():
    """A communicator of this rank: such a test runs on one of them, beside the tests of the others."""
    comm = MPI.COMM_SELF.Dup()
    yield comm
    comm.Free()


@pytest.fixture(params=["direct", "staged"])
def sending(request, gpu, comm, monkeypatch):
    """Both ways that device memory travels; the emulated device's memory can be handed to any MPI."""
    if request.param == "direct" and gpu.real and not gpu_aware.detect(comm).direct:
        pytest.skip("this MPI does not take device memory")
    monkeypatch.setenv("MPIPIPE_GPU_DIRECT", "1" if request.param == "direct" else "0")
    return request.param


@pytest.fixture(params=[False, True], ids=["streams", "one queue"])
def own(request, comm, monkeypatch):
    """An emulated GPU for each rank; with "one queue" it runs nothing before all that was issued earlier has begun."""
    monkeypatch.setenv("MPIPIPE_TIMEOUT", "60")  # a deadlock is to be an error
    with own_gpus(comm.rank, request.param) as device:
        yield device
