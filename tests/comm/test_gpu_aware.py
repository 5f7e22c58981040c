"""Whether device memory goes to MPI: each piece of evidence, one verdict for all ranks; choosing GPUs."""

from __future__ import annotations

import pytest
from gpu_emulator.fixture import an_emulated_gpu

from mpipipe import arrays
from mpipipe.comm import describe as description
from mpipipe.comm.mesh import describe, select_device
from mpipipe.comm.transport import gpu_aware
from mpipipe.comm.transport.gpu_aware import ROCM, GpuAwareness, asks_by_type, combine, judge
from mpipipe.errors import ArgumentError, BackendError, MismatchError
from mpipipe.job import inprocess
from mpipipe.job.group import group_of

MPICH = "MPICH Version:      5.0.2\nMPICH Release date: ..."
MPICH3 = "MPICH Version:\t3.4.3"
CRAY = "MPI VERSION    : CRAY MPICH version 8.1.28.15 (ANL base 3.4a2)"
OPEN5 = "Open MPI v5.0.11, package: Open MPI"
OPEN4 = "Open MPI v4.1.6, package: Open MPI"
INTEL = "Intel(R) MPI Library 2021.18.1 for Linux* OS"
MVAPICH = "MVAPICH2 Version      :\t2.3.7"
PARASTATION = "ParaStation MPI 5.9.2-1 (MPICH 4.1.1)"
GTL = "7f00-7f01 r-xp 0 0:0 0 /opt/cray/pe/lib64/libmpi_gtl_cuda.so.0"
CUDA = "7f00-7f01 r-xp 0 0:0 0 /usr/lib/libcuda.so.580"
ZE = "7f00-7f01 r-xp 0 0:0 0 /usr/lib/libze_loader.so.1"


def no_gpus(monkeypatch):
    for module in (arrays, arrays.devices):
        monkeypatch.setattr(module, "device_count", lambda: 0)
    monkeypatch.setattr(arrays.device_checks, "visible_gpus", lambda: 0)


def verdict(version=MPICH, maps="", query=0, kinds="", pool=False, platform=gpu_aware.CUDA, **environment):
    return judge(version, environment, maps, query, kinds, pool, platform)


YES = [
    (dict(MPIPIPE_GPU_DIRECT="1"), "MPIPIPE_GPU_DIRECT=1"),
    (dict(MPIPIPE_GPU_DIRECT="1", UCX_TLS="rc"), "MPIPIPE_GPU_DIRECT=1"),
    (dict(kinds="mpi,system,cuda"), "mpi_memory_alloc_kinds"),
    (dict(kinds="system, cuda:device, mpi", query=None), "mpi_memory_alloc_kinds"),
    (dict(version=OPEN5, query=1), "says yes"),
    (dict(version=OPEN4, query=1), "says yes"),
    (dict(version=OPEN4, query=1, CONDA_PREFIX="/c", OMPI_MCA_opal_cuda_support="true"), "says yes"),
    (dict(version=OPEN5, query=1, CONDA_PREFIX="/c"), "says yes"),
    (dict(version=CRAY, query=None, maps=GTL, MPICH_GPU_SUPPORT_ENABLED="1"), "libmpi_gtl_cuda is loaded"),
    (dict(version=MVAPICH, MV2_USE_CUDA="1"), "MV2_USE_CUDA"),
    (dict(version=MVAPICH, query=None, MVP_USE_CUDA="1"), "MVP_USE_CUDA"),
    (dict(version=PARASTATION, PSP_CUDA="1"), "PSP_CUDA"),
    (dict(version=INTEL, I_MPI_OFFLOAD="1", I_MPI_OFFLOAD_MODE="cuda"), "I_MPI_OFFLOAD"),
    (dict(version=INTEL, I_MPI_OFFLOAD="1", maps=CUDA), "I_MPI_OFFLOAD"),
    (dict(query=1, UCX_TLS="rc,sm,cuda_copy,cuda_ipc"), "says yes"),
    (dict(query=1, UCX_TLS="all"), "says yes"),
    (dict(query=1, UCX_TLS="^posix"), "says yes"),
    (dict(query=1, UCX_TLS=""), "says yes"),
]
NO = [
    (dict(), "says no"),
    (dict(query=None), "does not say"),
    (dict(MPIPIPE_GPU_DIRECT="0", query=1), "MPIPIPE_GPU_DIRECT=0"),
    (dict(MPIPIPE_GPU_DIRECT="1", pool=True), "asynchronous"),
    (dict(kinds="cuda", pool=True), "asynchronous"),
    (dict(kinds="mpi,system"), "says no"),
    (dict(version=OPEN4, query=1, OMPI_MCA_opal_cuda_support="false"), "opal_cuda_support=false"),
    (dict(version=OPEN4, query=1, CONDA_PREFIX="/c"), "conda"),
    (dict(version=OPEN4, query=0, OMPI_MCA_opal_cuda_support="true"), "says no"),
    (dict(version=CRAY, query=None, maps=GTL), "without MPICH_GPU_SUPPORT_ENABLED"),
    (dict(version=CRAY, query=None, maps=GTL, MPICH_GPU_SUPPORT_ENABLED="0"), "without MPICH_GPU_SUPPORT_ENABLED"),
    (dict(version=CRAY, query=None, MPICH_GPU_SUPPORT_ENABLED="1"), "transport layer"),
    (dict(maps=GTL, MPICH_GPU_SUPPORT_ENABLED="1"), "says no"),
    (dict(version=MVAPICH, MV2_USE_CUDA="0"), "says no"),
    (dict(version=OPEN5, MV2_USE_CUDA="1", PSP_CUDA="1", I_MPI_OFFLOAD="1", maps=CUDA), "says no"),
    (dict(version=INTEL), "without I_MPI_OFFLOAD"),
    (dict(version=INTEL, I_MPI_OFFLOAD="1"), "not CUDA"),
    (dict(version=INTEL, I_MPI_OFFLOAD="1", maps=CUDA + ZE), "not CUDA"),
    (dict(version=INTEL, I_MPI_OFFLOAD="1", I_MPI_OFFLOAD_MODE="level_zero", maps=CUDA), "level_zero"),
    (dict(query=1, UCX_TLS="rc,sm"), "leaves out cuda_copy"),
    (dict(query=1, UCX_TLS="^cuda_copy"), "leaves out cuda_copy"),
    (dict(kinds="cuda", UCX_TLS="tcp"), "leaves out cuda_copy"),
]
HSA = "7f00-7f01 r-xp 0 0:0 0 /opt/cray/pe/lib64/libmpi_gtl_hsa.so.0"

AMD_YES = [
    (dict(MPIPIPE_GPU_DIRECT="1"), "MPIPIPE_GPU_DIRECT=1"),
    (dict(kinds="mpi,system,rocm:device"), "mpi_memory_alloc_kinds"),
    (dict(version=OPEN5, query=1), "MPIX_Query_rocm_support or MPIX_Query_hip_support says yes"),
    (dict(version=OPEN5, query=1, CONDA_PREFIX="/c"), "says yes"),
    (dict(version=CRAY, query=None, maps=HSA, MPICH_GPU_SUPPORT_ENABLED="1"), "libmpi_gtl_hsa is loaded"),
    (dict(version=MVAPICH, query=None, MV2_USE_ROCM="1"), "MV2_USE_ROCM"),
    (dict(query=1, UCX_TLS="rc,sm,rocm"), "says yes"),
]
AMD_NO = [
    (dict(), "MPIX_Query_rocm_support or MPIX_Query_hip_support says no"),
    (dict(kinds="mpi,system,cuda"), "says no"),
    (dict(version=CRAY, query=None, maps=GTL, MPICH_GPU_SUPPORT_ENABLED="1"), "(libmpi_gtl_hsa)"),
    (dict(version=MVAPICH, query=None, MV2_USE_CUDA="1"), "does not say"),
    (dict(version=PARASTATION, PSP_CUDA="1"), "says no"),
    (dict(version=INTEL, I_MPI_OFFLOAD="1", I_MPI_OFFLOAD_MODE="cuda"), "AMD"),
    (dict(query=1, UCX_TLS="rc,cuda_copy"), "leaves out rocm_copy"),
]
EVIDENCE = [
    (platform, *row, direct)
    for platform, yes, no in ((gpu_aware.CUDA, YES, NO), (ROCM, AMD_YES, AMD_NO))
    for rows, direct in ((yes, True), (no, False))
    for row in rows
]


@pytest.mark.parametrize("platform, facts, reason, direct", EVIDENCE)
def test_device_memory_goes_to_mpi_where_there_is_evidence_for_this_platform_and_no_reason_against(
    platform, facts, reason, direct
):
    found = verdict(platform=platform, **facts)
    assert found.direct is direct and reason in found.reason


def test_the_library_is_asked_about_the_platform_of_cupy(comm, monkeypatch):
    asked = []
    monkeypatch.delenv("MPIPIPE_GPU_DIRECT", raising=False)
    monkeypatch.setattr(gpu_aware, "_query", asked.append)
    for amd in (False, True):
        with an_emulated_gpu(amd=amd):
            gpu_aware.detect(comm)
    assert asked == [gpu_aware.CUDA, ROCM]


def test_libraries_whose_question_would_end_the_process_are_asked_otherwise():
    assert asks_by_type(MPICH3) and asks_by_type(CRAY)
    assert not any(asks_by_type(version) for version in (MPICH, OPEN4, OPEN5, INTEL, MVAPICH, PARASTATION))


def test_one_rank_against_is_all_against_and_an_override_is_yes_or_no():
    with pytest.raises(ArgumentError, match="MPIPIPE_GPU_DIRECT"):
        verdict(MPIPIPE_GPU_DIRECT="maybe")
    yes, no = GpuAwareness(True, "it can"), GpuAwareness(False, "it cannot")
    assert combine([yes, yes]) == yes
    assert combine([no, no]) == no
    assert combine([yes, yes, no, no]) == GpuAwareness(False, "on rank 2: it cannot")


def test_the_verdict_is_the_same_on_all_ranks_and_this_mpi_answers(comm, monkeypatch):
    monkeypatch.setenv("MPIPIPE_GPU_DIRECT", "0" if comm.rank == comm.size - 1 else "1")
    found = comm.allgather(gpu_aware.detect(comm))
    place = f"on rank {comm.size - 1}: " if comm.size > 1 else ""
    assert found == [GpuAwareness(False, f"{place}MPIPIPE_GPU_DIRECT=0")] * comm.size
    monkeypatch.setenv("MPIPIPE_GPU_DIRECT", "1")
    assert gpu_aware.detect(comm).direct
    monkeypatch.delenv("MPIPIPE_GPU_DIRECT")
    for platform in (gpu_aware.CUDA, ROCM):
        assert gpu_aware._query(platform) in (0, 1, None)
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
    assert description.describe()["GPU-aware MPI"] == "staged through the host: MPIPIPE_GPU_DIRECT=0"
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


def test_gpus_on_some_ranks_only_are_an_error_that_names_the_others(gpu, comm, monkeypatch):
    if comm.size < 2:
        pytest.skip("needs two ranks")
    if comm.rank == 1:
        no_gpus(monkeypatch)
    with pytest.raises(MismatchError, match=r"no GPU on rank 1 of"):
        select_device("auto", comm)


def test_a_gpu_that_fails_on_one_rank_is_an_error_on_all(gpu, comm, monkeypatch):
    def busy(device):
        raise RuntimeError("cudaErrorDevicesUnavailable: all CUDA-capable devices are busy or unavailable")

    if comm.rank == comm.size - 1:
        monkeypatch.setattr(arrays, "check_device", busy)
    with pytest.raises(BackendError, match="cudaErrorDevicesUnavailable") as caught:
        select_device("cuda", comm)
    assert caught.value.remedy is not None


def test_ranks_in_one_process_choose_too_and_stage(gpu):
    assert inprocess.run(2, lambda comm: select_device("auto", comm)) == ["cuda", "cuda"]
    assert inprocess.run(2, gpu_aware.detect) == [GpuAwareness(False, "the ranks are threads of one process")] * 2
