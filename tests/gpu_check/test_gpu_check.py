"""The parts of jobs/gpu_check.sh that ask the real libraries, and what is said beside its numbers."""

from __future__ import annotations

import ctypes
import sys

import numpy as np
import pytest
from gpu_emulator import warm_kernels

from mpipipe import arrays
from mpipipe.attention.kernels import cudnn_graph
from mpipipe.gpu_check import check, extra
from mpipipe.language.models import GPT


@pytest.fixture
def plain(monkeypatch):
    """Small sizes, and no choice of a kernel."""
    monkeypatch.delenv("MPIPIPE_ATTENTION", raising=False)
    monkeypatch.setattr(extra, "SIZES", ((128, 64), (40, 128)))
    cudnn_graph._mine.plan.cache_clear()
    yield monkeypatch
    cudnn_graph._mine.plan.cache_clear()


def test_the_real_cudnn_is_asked_for_both_ways(emulated_gpu, plain, capsys):
    assert extra.main("attention") == 0
    first, *lines, last = capsys.readouterr().out.splitlines()
    assert first == "attention by: ok; cudnn 9.24.0" and len(lines) == 4 and last == "all as expected"
    assert all(": ok; error " in line for line in lines) and "float16 sequence 40 dim 128" in lines[-1]
    launches = emulated_gpu.machine.launches
    assert launches.count("sdpa") == launches.count("sdpa_backward") == 4


def test_a_machine_without_cudnn_fails_unless_cupy_is_asked_for(emulated_gpu, plain, capsys):
    emulated_gpu.machine.faults.add("cudnn")
    assert extra.main("attention") == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == f"1 wrong: {lines[0]}" and "attention by: WRONG; cupy because the library libcudnn" in lines[0]
    assert all(": ok; error " in line for line in lines[1:-1])  # our own kernels are right
    plain.setenv("MPIPIPE_ATTENTION", "cupy")
    assert extra.main("attention") == 0


def test_a_size_that_cudnn_refuses_fails(emulated_gpu, plain, capsys):
    real = sys.modules["cudnn"].pygraph.check_support

    def refuse(graph):
        if graph._facts["q"].dim[2] == 40:
            raise RuntimeError("No execution plans support the graph.")
        real(graph)

    plain.setattr(sys.modules["cudnn"].pygraph, "check_support", refuse)
    assert extra.main("attention") == 1 and "see above: cuDNN refuses" in capsys.readouterr().out


def test_a_wrong_result_fails(emulated_gpu, plain, capsys):
    real = extra._results
    plain.setattr(extra, "_results", lambda whole: [x * np.asarray(1.05, x.dtype) for x in real(whole)]
                  if arrays.is_device(whole[0]) else real(whole))  # fmt: skip
    assert extra.main("attention") == 1 and capsys.readouterr().out.count("WRONG") == 5


def test_every_source_is_compiled_before_the_tests(emulated_gpu, capsys, monkeypatch):
    work = warm_kernels.sources()
    assert len(work) > 180 and len({path for path, _ in work}) > 15
    some = [next(each for each in work if each[0].endswith(name)) for name in ("fill.cu", "swiglu.cu")]
    monkeypatch.setattr(warm_kernels, "sources", lambda: some)
    assert warm_kernels.main(1) == 0 and "2 of 2 sources compiled by 1 processes in" in capsys.readouterr().out
    emulated_gpu.machine.faults.add("headers")
    arrays.cuda._module.cache_clear()
    assert warm_kernels.main(1) == 1 and "Failed to find CUDA headers" in capsys.readouterr().out


@pytest.mark.long
def test_kernels_are_compiled_by_several_processes(launch, emulated_gpu):
    """Each is a process of its own, which finds the same device."""
    script = "import sys\nfrom gpu_emulator import warm_kernels as warm\nwork = warm.sources\n"
    script += "warm.sources = lambda: [each for each in work() if each[0].endswith(('fill.cu', 'rope.cu'))]\n"
    script += "if __name__ == '__main__':\n    sys.exit(warm.main(2))\n"
    job = launch(0, script, env=emulated_gpu.environment)
    assert job.returncode == 0, job.stderr
    assert " sources compiled by 2 processes" in job.stdout and job.stdout.count("\n") == 1


# -- graphs, NCCL, memory


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(extra, "MODEL", GPT(vocab=64, dim=16, layers=2, heads=2, seq=8, tied=True))
    monkeypatch.setattr(extra, "SUMMED", 1000)
    monkeypatch.setattr(extra, "STEPS", 3)
    monkeypatch.setattr(extra, "ROOM", 4000)
    return monkeypatch


@pytest.mark.long
def test_graphs_nccl_and_a_full_gpu_are_asked_for(emulated_gpu, small, capsys):
    assert extra.main("graphs", "nccl", "memory") == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert last == "all as expected" and all(": ok; " in line for line in lines) and len(lines) == 9
    for name in ("gpipe", "one_f_one_b", "zero_bubble_h1"):
        for dtype in ("float32", "bfloat16"):
            (line,) = (line for line in lines if line.startswith(f"CUDA graphs, {name}, {dtype}: "))
            assert "the same bits, " in line and " graphs, " in line and "ms a step" in line
    assert "version 22707" in lines[6] and "two sums in place" in lines[6]
    assert "ran out of memory on the GPU" in lines[7] and "bytes asked for" in lines[7]
    assert not emulated_gpu.machine.null_launches, "all of it belongs on a stream of its own"


def test_what_is_wrong_with_them_fails_and_the_others_go_on(emulated_gpu, small, capsys):
    def add_nothing(communicator, sendbuf, recvbuf, count, datatype, op, stream):
        machine = emulated_gpu.machine
        machine.put(machine.queue_of(stream), "damage", lambda: ctypes.memset(recvbuf, 0, 4 * count))

    small.setattr(sys.modules["cupy.cuda.nccl"].NcclCommunicator, "allReduce", add_nothing)
    small.setattr(extra, "_train", lambda *given: 1 // 0)
    small.setattr(extra, "ROOM", 1 << 30)
    assert extra.main("graphs", "nccl", "memory") == 1
    lines = capsys.readouterr().out.splitlines()
    starts = ["graphs: WRONG; it has failed", "NCCL on one rank: WRONG", "the report of a full GPU: WRONG; none",
              "a step after that: ok", "3 wrong: graphs: WRONG"]  # fmt: skip
    assert len(lines) == len(starts) and all(line.startswith(start) for line, start in zip(lines, starts)), lines


@pytest.mark.long
def test_graphs_that_were_not_recorded_are_wrong_and_a_missing_nccl_is_not(emulated_gpu, small, capsys, monkeypatch):
    small.setattr(extra, "SCHEDULES", extra.SCHEDULES[:1])
    monkeypatch.setattr(arrays.cupy().cuda.Stream, "begin_capture", lambda stream, mode=None: 1 / 0)
    monkeypatch.setattr(sys.modules["cupy.cuda.nccl"], "available", False)
    assert extra.main("graphs", "nccl", "memory") == 1
    lines = capsys.readouterr().out.splitlines()
    assert [": WRONG; " in line for line in lines[:2]] == [True] * 2 and "the recording of forward raised" in lines[0]
    assert lines[2].startswith("NCCL on one rank: ok; not there (CuPy does not find libnccl)")
    assert lines[-1].startswith("2 wrong: ")


def test_the_report_has_driver_clocks_and_versions(emulated_gpu, monkeypatch, tmp_path):
    smi = tmp_path / "nvidia-smi"
    smi.write_text('#!/bin/sh\necho "asked: $*"\necho "580.1, 1980 MHz, 2619 MHz, 345 MHz, 700.00 W"\n')
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    asked, card, libraries = check._machine()
    assert "driver_version,clocks.max.sm" in asked and card.startswith("580.1")
    assert libraries == "NVRTC 13.5, cuBLAS 130100, NCCL 22707"
    monkeypatch.setenv("PATH", "")
    emulated_gpu.machine.faults.add("cublas")
    vars(arrays.cupy().cuda).pop("cublas", None)
    assert check._machine() == ["NVRTC 13.5, no cuBLAS (ImportError), NCCL 22707"]
