"""cuDNN on real machines: where it starts, where it does not, and that it is said which."""

import os
import sys
import warnings

import pytest
from support.device_attention import agrees, make, reference, through_local

from mpipipe import arrays
from mpipipe.attention import kernels
from mpipipe.attention.kernels import cudnn, cudnn_graph
from mpipipe.attention.kernels import cupy as cupy_kernel
from mpipipe.errors import BackendError


@pytest.fixture
def machine(emulated_gpu, monkeypatch):
    """The emulated machine; like most real ones it has the CUDA runtime in a pip package alone."""
    monkeypatch.delenv("MPIPIPE_ATTENTION", raising=False)
    cudnn_graph._mine.plan.cache_clear()
    yield emulated_gpu.machine
    cudnn_graph._mine.plan.cache_clear()


def chosen(dtype="bfloat16", **sizes):
    return kernels.chosen(*(arrays.upload(x) for x in make(dtype, seq=4, **sizes)[:3]))


def test_a_plan_names_the_capability_and_needs_no_runtime(machine):
    machine.faults.add("libcudart")
    assert cudnn_graph.available() == (True, "cuDNN 9.24.0", (9, 24, 0)) and chosen() is cudnn
    assert kernels.describe() == "cudnn 9.24.0"


@pytest.mark.parametrize("named", [None, "/site/libcudart.so.12"])
def test_cudnn_gets_the_runtime_of_cupys_version_unless_the_user_names_one(machine, monkeypatch, named):
    if named is not None:
        monkeypatch.setenv("CUDNN_FRONTEND_CUDART_LIB_NAME", named)
    assert cudnn_graph.available().usable
    expected = named or "/site-packages/nvidia/cu13/lib/libcudart.so.13"
    assert os.environ["CUDNN_FRONTEND_CUDART_LIB_NAME"] == expected


def test_a_cudnn_that_makes_no_plan_is_not_called_usable(machine, monkeypatch):
    def refuse(graph):
        raise RuntimeError("CUDNN_STATUS_SUBLIBRARY_LOADING_FAILED\nmore")

    monkeypatch.setattr(sys.modules["cudnn"].pygraph, "build_plans", refuse)
    machine.faults.add("libcudart")
    with pytest.warns(UserWarning, match="slower kernels") as warned:
        verdict = cudnn_graph.available()
    assert not verdict.usable
    assert "makes no plan (CUDNN_STATUS_SUBLIBRARY_LOADING_FAILED; libcudart.so.13" in verdict.reason
    assert kernels.describe() == f"cupy because {verdict.reason}"
    assert chosen() is cupy_kernel and len(warned) == 1  # said once
    whole = make("bfloat16", seq=6)
    agrees(through_local(whole)[0], reference(whole), "bfloat16")
    monkeypatch.setenv("MPIPIPE_ATTENTION", "cudnn")
    with pytest.raises(BackendError, match="makes no plan"):
        chosen()


def test_a_backward_that_makes_no_plan_counts_too(machine, monkeypatch):
    real = sys.modules["cudnn"].pygraph.check_support

    def refuse(graph):
        if graph._facts["backward"]:
            raise sys.modules["cudnn"].cudnnGraphNotSupportedError("No execution plans support the graph.")
        real(graph)

    monkeypatch.setattr(sys.modules["cudnn"].pygraph, "check_support", refuse)
    with pytest.warns(UserWarning, match="No execution plans"):
        assert not cudnn_graph.available().usable


def test_the_users_choice_is_told_and_that_without_a_gpu_the_host_computes(machine, monkeypatch):
    monkeypatch.setenv("MPIPIPE_ATTENTION", "cupy")
    assert kernels.describe() == "cupy because MPIPIPE_ATTENTION says so"
    monkeypatch.delenv("MPIPIPE_ATTENTION")
    machine.faults.add("driver")
    assert kernels.describe() == "host, as there is no GPU (cuDNN 9.24.0 is installed)"


def test_a_cupy_without_pathfinder_is_told_where_that_matters(machine, monkeypatch):
    """It is no dependency of a CuPy that was built from its sources. A plan that names the capability needs none."""
    monkeypatch.setitem(sys.modules, "cuda", None)
    monkeypatch.setitem(sys.modules, "cuda.pathfinder", None)
    with pytest.raises(BackendError, match=r"libcudart\.so\.13 is not found .*cuda"):
        arrays.load_cuda_runtime()
    assert cudnn_graph.available().usable and chosen() is cudnn


def test_whatever_prepares_cudnn_may_fail_and_our_own_kernels_compute(machine, monkeypatch):
    def fail():
        raise OSError("a damaged library")

    monkeypatch.setattr(arrays, "load_cuda_runtime", fail)
    with pytest.warns(UserWarning, match=r"makes no plan \(a damaged library"):
        assert not cudnn_graph.available().usable
    assert chosen() is cupy_kernel


def test_gpus_before_ampere_are_refused_without_a_warning(machine):
    machine.capability = 75
    verdict = cudnn_graph.available()
    assert not verdict.usable and "compute capability 8.0 and newer" in verdict.reason and chosen() is cupy_kernel


BACKWARDS = {  # (capability, cuDNN) -> head dimensions of a backward, of 64, 128, 136, 192, 256
    (80, 92400): (64, 128),
    (89, 92400): (64, 128),
    (90, 92400): (64, 128, 136, 192, 256),
    (100, 92200): (64, 128),
    (100, 92400): (64, 128, 256),
    (120, 92400): (64, 128),
}


@pytest.mark.parametrize("capability, version", BACKWARDS, ids=str)
def test_a_backward_is_asked_for_what_the_gpu_does(machine, monkeypatch, capability, version):
    """The forward is cuDNN's with every dimension; what its backward refuses is not asked of it."""
    machine.capability = capability
    monkeypatch.setattr(sys.modules["cudnn"], "backend_version", lambda: version)
    monkeypatch.setattr(sys.modules["gpu_emulator.cudnn"], "VERSION", version)
    for dim in (64, 128, 136, 192, 256):
        whole = make("bfloat16", seq=6, heads=2, dim=dim)
        machine.launches.clear()
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="cuDNN refuses")
            found, _ = through_local(whole)
        agrees(found, reference(whole), "bfloat16")
        assert "sdpa" in machine.launches
        assert ("sdpa_backward" in machine.launches) == (dim in BACKWARDS[capability, version]), dim
