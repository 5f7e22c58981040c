"""Whether device memory goes to MPI: each piece of evidence, one verdict for all ranks; choosing GPUs."""

from types import SimpleNamespace

import pytest
from gpu_emulator.fixture import an_emulated_gpu

from mpipipe import arrays
from mpipipe.comm import describe as description
from mpipipe.comm.mesh import describe, select_device
from mpipipe.comm.transport import gpu_aware
from mpipipe.comm.transport.gpu_aware import GpuAwareness, combine
from mpipipe.errors import ArgumentError, BackendError
from mpipipe.job import inprocess
from mpipipe.job.group import group_of

MPICH = "MPICH Version:      5.0.2\nMPICH Release date: ..."
MPICH3 = "MPICH Version:\t3.4.3"
CRAY = "MPI VERSION    : CRAY MPICH version 8.1.28.15 (ANL base 3.4a2)"
OPEN5 = "Open MPI v5.0.11, package: Open MPI"
PARASTATION = "ParaStation MPI 5.9.2-1 (MPICH 4.1.1)"


def no_gpus(monkeypatch):
    for module in (arrays, arrays.devices):
        monkeypatch.setattr(module, "device_count", lambda: 0)
    monkeypatch.setattr(arrays.device_checks, "visible_gpus", lambda: 0)


class Library:
    """Functions of an MPI library by their names; counts what it was asked."""

    def __init__(self, **answers):
        self.answers, self.asked = answers, []

    def __getattr__(self, name):
        if name not in self.answers:
            raise AttributeError(name)

        self.asked.append(name)
        return lambda: self.answers[name]


@pytest.mark.parametrize(
    "version, answers, maker, answer",
    [
        (OPEN5, {"MPIX_Query_cuda_support": 1}, "NVIDIA", 1),
        (OPEN5, {}, "NVIDIA", None),
        (MPICH, {"MPIX_Query_cuda_support": 1, "MPIX_Query_hip_support": 1}, "AMD", 1),
        (OPEN5, {"MPIX_Query_cuda_support": 1}, "AMD", None),
        (PARASTATION, {"MPIX_Query_cuda_support": 0}, "NVIDIA", 0),
        (CRAY, {"MPIX_Query_cuda_support": 1}, "NVIDIA", None),
        (MPICH3, {"MPIX_Query_cuda_support": 1}, "NVIDIA", None),
    ],
)
def test_the_library_answers_for_the_maker_of_the_gpus(monkeypatch, version, answers, maker, answer):
    library = Library(**answers)
    mpi = SimpleNamespace(__file__="", Get_library_version=lambda: version)
    monkeypatch.setattr(gpu_aware.runtime, "mpi", lambda: mpi)
    monkeypatch.setattr(gpu_aware.ctypes, "CDLL", lambda path: library)
    assert gpu_aware.ask_library(maker) == answer
    assert library.asked == [] or answer is not None  # the question would end the process


def test_the_library_is_asked_about_the_platform_of_cupy(comm, monkeypatch):
    asked = []
    monkeypatch.delenv("MPIPIPE_GPU_DIRECT", raising=False)
    monkeypatch.setattr(gpu_aware, "ask_library", asked.append)
    for amd in (False, True):
        with an_emulated_gpu(amd=amd):
            gpu_aware.detect(comm)
    assert asked == ["NVIDIA", "AMD"]


def test_one_rank_against_is_all_against_and_an_override_is_yes_or_no(comm, monkeypatch):
    monkeypatch.setenv("MPIPIPE_GPU_DIRECT", "maybe")
    with pytest.raises(ArgumentError, match="MPIPIPE_GPU_DIRECT"):
        gpu_aware.detect(comm)
    yes, no = GpuAwareness(True, "it can"), GpuAwareness(False, "it cannot")
    assert combine([yes, yes]) == yes
    assert combine([yes, yes, no, no]) == GpuAwareness(False, "on rank 2: it cannot")


def test_the_verdict_is_the_same_on_all_ranks_and_this_mpi_answers(comm, monkeypatch):
    monkeypatch.setenv("MPIPIPE_GPU_DIRECT", "0" if comm.rank == comm.size - 1 else "1")
    found = comm.allgather(gpu_aware.detect(comm))
    assert found == [GpuAwareness(False, f"on rank {comm.size - 1}: MPIPIPE_GPU_DIRECT=0")] * comm.size
    monkeypatch.setenv("MPIPIPE_GPU_DIRECT", "1")
    assert gpu_aware.detect(comm).direct
    monkeypatch.delenv("MPIPIPE_GPU_DIRECT")
    for maker in gpu_aware.QUESTIONS:
        assert gpu_aware.ask_library(maker) in (0, 1, None)
    assert gpu_aware.detect(comm).reason


def test_memory_of_an_asynchronous_pool_is_refused(gpu, comm, monkeypatch):
    monkeypatch.setenv("MPIPIPE_GPU_DIRECT", "1")
    assert gpu_aware.detect(comm).direct
    cuda = arrays.cupy().cuda
    before = cuda.get_allocator()
    cuda.set_allocator(cuda.MemoryAsyncPool().malloc)
    try:
        assert "asynchronous" in gpu_aware.detect(comm).reason
    finally:
        cuda.set_allocator(before)


def test_info_says_how_device_arrays_travel(gpu, comm, monkeypatch):
    monkeypatch.setenv("MPIPIPE_GPU_DIRECT", "0")
    assert description.describe()["GPU-aware MPI"] == "staged through the host: on rank 0: MPIPIPE_GPU_DIRECT=0"
    no_gpus(monkeypatch)
    assert description.describe()["GPU-aware MPI"] == "no GPU"


# -- devices ----------------------------------------------------------------------------------------------------------


def test_ranks_of_a_host_take_its_gpus_in_turn(comm):
    with an_emulated_gpu(devices=2):
        assert select_device("auto", comm) == "cuda"
        assert arrays.cupy().cuda.runtime.getDevice() == comm.rank % 2
        assert describe(group_of(comm), "cuda")[comm.rank].endswith(f"local rank {comm.rank}, cuda:{comm.rank % 2}")
        assert select_device("cuda:1", comm) == "cuda"
        assert arrays.cupy().cuda.runtime.getDevice() == 1
        assert select_device("cpu", comm) == "cpu"
        with pytest.raises(BackendError, match="no such GPU"):
            select_device("cuda:2", comm)


def test_without_gpus_auto_is_the_host_and_cuda_an_error(comm, monkeypatch):
    no_gpus(monkeypatch)
    assert select_device("auto", comm) == "cpu"
    assert describe(group_of(comm), "cpu")[0].endswith("local rank 0, cpu")
    with pytest.raises(BackendError, match="unknown device"):
        select_device("gpu", comm)


def test_a_gpu_that_fails_on_one_rank_is_an_error_on_all(gpu, comm, monkeypatch):
    def busy(device):
        raise RuntimeError("cudaErrorDevicesUnavailable: all CUDA-capable devices are busy or unavailable")

    if comm.rank == comm.size - 1:
        monkeypatch.setattr(arrays, "check_device", busy)
    with pytest.raises(ArgumentError, match="RuntimeError: cudaErrorDevicesUnavailable"):
        select_device("cuda", comm)


def test_ranks_in_one_process_choose_too_and_stage(gpu):
    assert inprocess.run(2, lambda comm: select_device("auto", comm)) == ["cuda", "cuda"]
    verdict = GpuAwareness(False, "on rank 0: the ranks are threads of one process")
    assert inprocess.run(2, gpu_aware.detect) == [verdict] * 2
