"""Products by cublasLt: cuBLAS's numbers, the fastest proposal for each product, and when it is left alone."""

from __future__ import annotations

import inspect
import re
import sys
import types
from importlib.util import find_spec

import numpy as np
import pytest
from gpu_emulator import cublaslt
from gpu_emulator.fixture import an_emulated_gpu
from support.tolerance import close

from mpipipe import arrays, nn
from mpipipe.arrays import gemm
from mpipipe.errors import ArgumentError, BackendError

RANDOM = np.random.default_rng(4)
CALLED = (
    "create matmul_desc_create matmul_desc_set_attribute matrix_layout_create matmul_preference_create "
    "matmul_preference_destroy matmul_preference_set_attribute matmul_algo_get_heuristic matmul"
).split()


@pytest.fixture
def measured(emulated_gpu, monkeypatch):
    """Products go to the emulated cublasLt; the list of the algorithms that it was told."""
    for name in ("nvmath", "nvmath.bindings"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setattr(sys.modules["nvmath.bindings"], "cublasLt", cublaslt, raising=False)
    monkeypatch.setenv("MPIPIPE_PRODUCTS", "cublaslt")
    cublaslt.used.clear()
    return cublaslt.used


def times(monkeypatch, **seconds):
    """Let each algorithm take so long: a7=3 for the algorithm 7."""
    by_number = {int(name[1:]): value for name, value in seconds.items()}

    def pretend(product, algorithm, *rest):
        return by_number[int(algorithm.held.view(np.uint64)[(algorithm.where - algorithm.held.ctypes.data) // 8])]

    monkeypatch.setattr(gemm, "_seconds", pretend)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize("transpose_a", [False, True])
def test_one_product(measured, dtype, transpose_a, transpose_b, add):
    kind = arrays.dtype(dtype)
    a, b = RANDOM.normal(size=(4, 5)).astype(kind), RANDOM.normal(size=(5, 7)).astype(kind)
    exact, size = a.astype(float) @ b.astype(float), np.abs(a.astype(float)) @ np.abs(b.astype(float))
    given = [arrays.upload(x.T if turned else x) for x, turned in ((a, transpose_a), (b, transpose_b))]
    for result in {kind, arrays.accumulator(kind)}:
        c = RANDOM.normal(size=(4, 7)).astype(result)
        target = arrays.upload(c)
        gemm.gemm(*given, target, transpose_a, transpose_b, add)
        expected = exact + c.astype(float) if add else exact
        terms = size + np.abs(c.astype(float))
        close(arrays.download(target), expected, 5 + 2, terms, dtype=arrays.accumulator(kind))
    assert measured


def test_the_fastest_proposal_is_taken_from_then_on(measured, monkeypatch):
    times(monkeypatch, a7=3, a8=1, a9=2)
    x, c = arrays.upload(np.eye(8, dtype=np.float32)), arrays.zeros((8, 8), np.dtype(np.float32), "cuda")
    for _ in range(3):
        gemm.gemm(x, x, c, add=True)
    assert measured == [8, 8, 8]
    np.testing.assert_array_equal(arrays.download(c), 3 * np.eye(8))


def test_measuring_adds_nothing_and_happens_once(measured, emulated_gpu):
    x, c = arrays.upload(np.eye(8, dtype=np.float32)), arrays.zeros((8, 8), np.dtype(np.float32), "cuda")
    gemm.gemm(x, x, c, add=True)
    assert len(measured) == 3 * (1 + gemm.RUNS) + 1 and emulated_gpu.synchronisations
    emulated_gpu.reset()
    gemm.gemm(x, x, c, add=True)
    assert len(measured) == 3 * (1 + gemm.RUNS) + 2 and not emulated_gpu.synchronisations
    np.testing.assert_array_equal(arrays.download(c), 2 * np.eye(8))


def test_addresses_choose_what_is_proposed(measured, monkeypatch):
    times(monkeypatch, a7=1, a8=2, a9=3)
    room = arrays.upload(np.ones(65, np.float32))
    c = arrays.zeros((8, 8), np.dtype(np.float32), "cuda")
    for start in (0, 1, 0):
        x = room[start : start + 64].reshape(8, 8)
        gemm.gemm(x, x, c)
        np.testing.assert_array_equal(arrays.download(c), np.full((8, 8), 8.0))
    assert measured == [7, 8, 7]


def test_the_first_proposal_unmeasured_where_runs_shall_be_alike(measured, monkeypatch):
    monkeypatch.setenv("MPIPIPE_DETERMINISTIC", "1")
    times(monkeypatch, a7=3, a8=1, a9=2)
    x, c = arrays.upload(np.eye(8, dtype=np.float32)), arrays.zeros((8, 8), np.dtype(np.float32), "cuda")
    gemm.gemm(x, x, c)
    assert measured == [7]


def test_what_cublaslt_does_not_propose_is_left_to_cublas(measured, monkeypatch):
    x, c = arrays.upload(np.eye(8)), arrays.zeros((8, 8), np.dtype(np.float64), "cuda")
    gemm.gemm(x, x, c)
    monkeypatch.setattr(gemm, "MOST", 1)
    single = arrays.upload(np.eye(8, dtype=np.float32))
    gemm.gemm(single, single, arrays.zeros((8, 8), np.dtype(np.float32), "cuda"))
    assert not measured
    np.testing.assert_array_equal(arrays.download(c), np.eye(8))


def test_layers_give_the_numbers_of_cublas(measured, monkeypatch):
    found = []
    for name in ("cublaslt", "cublas"):
        monkeypatch.setenv("MPIPIPE_PRODUCTS", name)
        gemm._library.cache_clear()
        cuda, draw = nn.kernels.of("cuda"), np.random.default_rng(2)
        x, weight, dy = (arrays.upload(draw.normal(size=s).astype(np.float32)) for s in ((6, 8), (16, 8), (6, 16)))
        grad = arrays.zeros((16, 8), np.dtype(np.float32), "cuda")
        for _ in range(2):
            cuda.linear_backward_weight(dy, x, grad)
        made = cuda.linear(x, weight), cuda.linear_backward_input(dy, weight), grad
        found.append([y.tobytes() for y in map(arrays.download, made)])
    assert found[0] == found[1] and measured


def test_without_the_switch_nothing_is_asked(measured, monkeypatch):
    monkeypatch.delenv("MPIPIPE_PRODUCTS")
    x = arrays.upload(np.eye(8, dtype=np.float32))
    gemm.gemm(x, x, arrays.zeros((8, 8), np.dtype(np.float32), "cuda"))
    assert not measured


def test_a_switch_that_cannot_be_followed_is_an_error(emulated_gpu, monkeypatch):
    def product():
        x = arrays.upload(np.eye(8, dtype=np.float32))
        gemm.gemm(x, x, arrays.zeros((8, 8), np.dtype(np.float32), "cuda"))

    monkeypatch.setenv("MPIPIPE_PRODUCTS", "cublaslt")
    monkeypatch.setitem(sys.modules, "nvmath", None)
    with pytest.raises(BackendError, match="nvmath cannot be imported"):
        product()
    monkeypatch.setenv("MPIPIPE_PRODUCTS", "magma")
    gemm._library.cache_clear()
    with pytest.raises(ArgumentError, match="MPIPIPE_PRODUCTS"):
        product()
    with an_emulated_gpu(amd=True):
        monkeypatch.setenv("MPIPIPE_PRODUCTS", "cublaslt")
        with pytest.raises(BackendError, match="AMD GPUs have no cublasLt"):
            product()


@pytest.mark.skipif(find_spec("nvmath") is None, reason="no nvmath: pip install nvmath-python")
def test_the_emulated_functions_have_the_parameters_of_the_real_ones():
    from nvmath.bindings import cublasLt

    for name in CALLED:
        words = re.match(rf"{name}\((.*?)\)", getattr(cublasLt, name).__doc__)[1].split(", ")
        parameters = [word.split()[-1] for word in words if word]
        assert parameters == list(inspect.signature(getattr(cublaslt, name)).parameters), name
    for ours in (cublaslt.MatmulDescAttribute, cublaslt.MatmulPreferenceAttribute):
        theirs = getattr(cublasLt, ours.__name__)
        assert {one.name: int(one) for one in ours} == {one.name: int(theirs[one.name]) for one in ours}
    assert issubclass(cublasLt.cuBLASLtError, Exception)
    assert cublasLt.matmul_heuristic_result_dtype == cublaslt.matmul_heuristic_result_dtype
    preference = cublaslt.MatmulPreferenceAttribute
    widths = {name: np.dtype(cublasLt.get_matmul_preference_attribute_dtype(name)).itemsize for name in preference}
    assert widths.pop(preference.MAX_WORKSPACE_BYTES) == 8 and set(widths.values()) == {4}
    desc = cublaslt.MatmulDescAttribute
    assert np.dtype(cublasLt.get_matmul_desc_attribute_dtype(desc.TRANSA)).itemsize == 4
