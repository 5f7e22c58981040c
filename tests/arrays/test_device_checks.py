"""What a GPU needs besides its driver: missing parts are named before the first step, all at once, on every rank."""

import sys

import numpy as np
import pytest

from mpipipe import arrays, nn, select_device
from mpipipe.cli.info import info
from mpipipe.errors import BackendError, MismatchError
from mpipipe.job import inprocess

SAYS = {
    "driver": "no GPU can be used (cudaErrorInsufficientDriver",
    "compiler": 'the first kernel does not compile: Failure finding "libnvrtc.so.13',
    "headers": "the first kernel does not compile: Failed to find CUDA headers",
    "cublas": 'the library cuBLAS: Failure finding "libcublasLt.so.13',
    "two cudas": "the first kernel does not compile: cuda_fp16.hpp(1): error",
}


@pytest.fixture
def machine(emulated_gpu):
    return emulated_gpu.machine


@pytest.mark.parametrize("fault", SAYS)
def test_a_missing_part_is_named_with_its_remedy(machine, fault):
    machine.faults.add(fault)
    for attempt in (lambda: arrays.check_device("cuda"), lambda: nn.Stage([nn.Linear(2, 2)], device="cuda")):
        with pytest.raises(BackendError) as caught:
            attempt()
        assert SAYS[fault] in str(caught.value)
        assert ("nvidia-smi" if fault == "driver" else "pip install 'cupy-cuda13x[ctk]'") in caught.value.remedy
    assert arrays.check_device("cpu") == "cpu"


def test_all_that_is_missing_is_named_at_once(machine):
    machine.faults |= {"headers", "cublas"}
    with pytest.raises(BackendError) as caught:
        arrays.check_device("auto")  # a GPU is there: what is missing is no reason to take the CPU in silence
    lines = caught.value.found.split("\n    ")[1:]
    assert len(lines) == 2 and all(any(SAYS[fault] in line for line in lines) for fault in machine.faults)


@pytest.mark.parametrize("version", ["13.6.0", "9.0.0rc1"])
def test_a_cupy_that_is_too_old_is_refused_and_no_reason_to_take_the_cpu(machine, monkeypatch, version):
    monkeypatch.setattr(sys.modules["cupy"], "__version__", version)
    for name in ("cuda", "auto", "cuda:0"):
        with pytest.raises(BackendError, match="CuPy is too old") as caught:
            arrays.check_device(name)
        assert caught.value.found == f"CuPy {version}" and caught.value.expected == "CuPy 14 or newer"
        assert "pip install" in caught.value.remedy
    assert arrays.device_count() == 0 and arrays.check_device("cpu") == "cpu"
    machine.devices = 0
    assert arrays.check_device("auto") == "cpu"


def test_nothing_is_looked_for_twice(machine):
    assert arrays.check_device("cuda") == "cuda" and arrays.missing_parts() == []
    machine.faults |= {"headers", "cublas"}
    assert arrays.check_device("cuda") == "cuda" and len(arrays.missing_parts()) == 1  # the kernel is compiled already


def test_rocm_has_no_compiler_and_no_headers_of_cuda(machine, monkeypatch):
    monkeypatch.setattr(sys.modules["cupy.cuda.runtime"], "is_hip", True)
    machine.faults |= {"headers", "cublas"}
    with pytest.raises(BackendError, match="ROCm module") as caught:
        arrays.check_device("cuda")
    assert "the first kernel does not compile: Failed to find CUDA headers" in caught.value.found  # says the emulator
    assert "NVRTC" not in caught.value.found and len(caught.value.found.split("\n    ")) == 3


def test_a_machine_that_lacks_a_part_on_one_rank_stops_all_ranks(machine, comm):
    fault, last = "headers", comm.rank == comm.size - 1
    if last:
        machine.faults.add(fault)
    with pytest.raises(BackendError) as caught:
        select_device("cuda", comm)
    assert SAYS[fault] in str(caught.value)
    assert caught.value.reported_elsewhere == (not last)


@pytest.mark.mpi(min_size=2)
def test_ranks_with_and_without_a_gpu_are_refused_on_all_of_them(machine, comm):
    if comm.rank == 0:
        machine.devices = 0
    with pytest.raises(MismatchError, match="some ranks have a GPU, and some have none") as caught:
        select_device("auto", comm)
    assert caught.value.found == f"no GPU on rank 0 of {comm.size}"
    with pytest.raises(BackendError, match="this process sees no GPU"):
        select_device("cuda", comm)


def test_each_rank_looks_at_its_own_gpu_alone(machine, monkeypatch):
    """A look makes a context, which takes memory: not on the first GPU of the host for every rank."""
    machine.devices, seen = 3, []
    handle = sys.modules["cupy.cuda.device"].get_cublas_handle
    noting = lambda: seen.append(arrays.current_gpu()) or handle()  # noqa: E731
    monkeypatch.setattr(sys.modules["cupy.cuda.device"], "get_cublas_handle", noting)
    assert inprocess.run(3, lambda comm: select_device("auto", comm)) == ["cuda"] * 3
    assert sorted(seen) == [0, 1, 2]


def printed_info(capsys):
    info()
    return " ".join(capsys.readouterr().out.split())  # its lines are folded


def test_info_says_what_works_and_by_what_attention_is_computed(machine, comm, capsys):
    printed = printed_info(capsys)
    if comm.rank == 0:
        assert "attention by cudnn 9.24.0 " in printed and "compiler, headers and cuBLAS work" in printed


def test_info_says_of_a_cupy_that_is_too_old(machine, comm, capsys, monkeypatch):
    monkeypatch.setattr(sys.modules["cupy"], "__version__", "13.6.0")
    printed = printed_info(capsys)
    if comm.rank == 0:
        assert "CuPy a GPU was asked for, and CuPy is too old found: CuPy 13.6.0" in printed
        assert "GPU toolkit not looked for: no GPU" in printed


def test_info_names_what_is_missing(machine, comm, capsys):
    machine.faults |= {"headers", "cublas", "cudnn"}
    printed = printed_info(capsys)
    if comm.rank == 0:
        assert SAYS["headers"] in printed and SAYS["cublas"] in printed
        assert "attention by cupy because the library libcudnn.so.9 cannot be loaded" in printed
        assert "parts of the GPU's toolkit that CuPy needs cannot be used" in printed
    machine.faults.clear()


WITH_FAULTS = """
import os
from mpi4py import MPI
last = MPI.COMM_WORLD.rank == MPI.COMM_WORLD.size - 1
os.environ["MPIPIPE_TEST_GPU_FAULTS"] = "headers,cublas" if last else ""
import mpipipe
from mpipipe import nn
nn.Stage([nn.Linear(2, 2)], device=mpipipe.select_device("cuda"))
print("went on")
"""


def test_a_job_on_machines_of_two_kinds_ends_with_one_report(launch, emulated_gpu, tmp_path):
    script = tmp_path / "job.py"
    script.write_text(WITH_FAULTS)
    job = launch(2, ["-m", "mpipipe", "run", str(script)], env=emulated_gpu.environment)
    assert job.returncode not in (0, None), job.stdout
    assert job.stderr.count(SAYS["headers"]) == 1 and "remedy: " in job.stderr, job.stderr
    assert job.stderr.count("job ended by rank") == 1 and "went on" not in job.stdout


# -- a stream of its own


def test_work_before_within_and_behind_is_in_order(gpu):
    with arrays.cupy().cuda.Stream.null:  # also where the test itself has a stream of its own
        values = np.arange(1000, dtype=np.float32)
        x = arrays.upload(values)
        y, z = arrays.zeros_like(x), arrays.empty_like(x)
        outside = arrays.stream()
        with arrays.own_stream():
            inside = arrays.stream()
            assert inside != outside
            arrays.copy_into(y, x)  # x was uploaded on the other stream
            np.testing.assert_array_equal(arrays.download(y), values)
            with arrays.own_stream():
                assert arrays.stream() == inside
        arrays.copy_into(z, y)
        np.testing.assert_array_equal(arrays.download(z), values)
        with arrays.own_stream():
            assert arrays.stream() == inside  # CuPy keeps memory by stream
        with pytest.raises(ZeroDivisionError), arrays.own_stream():
            arrays.copy_into(x, arrays.upload(values + 1))
            1 / 0  # noqa: B018
        assert arrays.stream() == outside
        arrays.copy_into(z, x)
        np.testing.assert_array_equal(arrays.download(z), values + 1)


def test_an_error_of_the_device_is_not_hidden_by_the_end_of_the_block(machine):
    with pytest.raises(RuntimeError, match="in a broken kernel"), arrays.own_stream():
        machine.put(arrays.stream().queue, "a broken kernel", lambda: 1 / 0)
        arrays.stream().synchronize()
    assert "division by zero" in machine.errors.pop()


def test_a_stream_for_each_thread_and_none_on_the_host(machine, monkeypatch):
    def mine(comm):
        with arrays.own_stream():
            return arrays.stream().ptr

    assert len({*inprocess.run(3, mine), 0}) == 4
    monkeypatch.setitem(sys.modules, "cupy", None)
    with arrays.own_stream("cpu"):
        assert arrays.zeros(3, "float32").sum() == 0
