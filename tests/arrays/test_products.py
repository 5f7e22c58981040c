"""Products of device arrays by cuBLAS and by cublasLt: the numbers, the setting for TF32, the fastest proposal."""

from __future__ import annotations

import inspect
import re
import sys
import types
from importlib.util import find_spec
from itertools import product

import numpy as np
import pytest
from gpu_emulator import cublaslt
from gpu_emulator.fixture import an_emulated_gpu
from support.tolerance import close

from mpipipe import arrays, nn
from mpipipe.arrays import products
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

    def pretend(run):
        algorithm = run.args[1]
        return by_number[int(algorithm.held.view(np.uint64)[(algorithm.where - algorithm.held.ctypes.data) // 8])]

    monkeypatch.setattr(products, "_seconds", pretend)


@pytest.fixture(params=["cublas", "cublaslt"])
def library(request):
    """The name of the library that multiplies."""
    request.getfixturevalue("gpu" if request.param == "cublas" else "measured")
    return request.param


def agrees(found, a, b, c, factor=1.0, add=False):
    """`found` is factor a b, with `add` plus c, summed in the accumulator of a."""
    a, b, before = a.astype(float), b.astype(float), c.astype(float)
    size = factor * np.abs(a) @ np.abs(b) + np.abs(before)
    close(found, factor * a @ b + add * before, a.shape[-1] + 2, size, dtype=arrays.accumulator(c.dtype))


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("transpose_a, transpose_b, add", product([False, True], repeat=3))
def test_one_product(library, dtype, transpose_a, transpose_b, add):
    kind = arrays.dtype(dtype)
    a, b = RANDOM.normal(size=(4, 5)).astype(kind), RANDOM.normal(size=(5, 7)).astype(kind)
    given = [arrays.upload(x.T if turned else x) for x, turned in ((a, transpose_a), (b, transpose_b))]
    for result in {kind, arrays.accumulator(kind)}:
        c = RANDOM.normal(size=(4, 7)).astype(result)
        target = arrays.upload(c if add else np.full_like(c, np.nan))  # what is set is not read
        products.gemm(*given, target, transpose_a, transpose_b, add)
        agrees(arrays.download(target), a, b, c, add=add)
    assert library == "cublas" or cublaslt.used or dtype == "float64"  # it proposes nothing for float64


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("transpose_a, transpose_b, add", product([False, True], repeat=3))
def test_products_of_a_batch(gpu, dtype, transpose_a, transpose_b, add):
    kind = arrays.dtype(dtype)
    a, b, c = (RANDOM.normal(size=shape).astype(kind) for shape in ((3, 4, 5), (3, 5, 7), (3, 4, 7)))
    turned = [x.swapaxes(1, 2) if turn else x for x, turn in ((a, transpose_a), (b, transpose_b))]
    sums = c.astype(arrays.accumulator(kind))
    result = arrays.upload(sums if add else np.full_like(sums, np.nan))
    products.batched_gemm(*map(arrays.upload, turned), result, transpose_a, transpose_b, add, 0.5)
    agrees(arrays.download(result), a, b, sums, 0.5, add)


@pytest.mark.parametrize(("setting", "expected"), [(None, "32F"), ("0", "32F"), ("1", "32F_FAST_TF32")])
def test_one_setting_rules_tf32_in_all_products(emulated_gpu, monkeypatch, setting, expected):
    if setting is None:
        monkeypatch.delenv("CUPY_TF32", raising=False)
    else:
        monkeypatch.setenv("CUPY_TF32", setting)
    products._library.cache_clear()
    cublas, computed = arrays.cupy().cuda.cublas, []
    for name in ("gemmEx", "gemmStridedBatchedEx"):
        call = getattr(cublas, name)
        monkeypatch.setattr(cublas, name, lambda *args, call=call: (computed.append(args[-2]), call(*args))[1])
    x = {name: arrays.upload(np.ones((2, 4, 4), arrays.dtype(name))) for name in ("float32", "float64", "bfloat16")}
    for name, y in x.items():
        c = arrays.zeros((2, 4, 4), arrays.accumulator(arrays.dtype(name)), "cuda")
        products.gemm(y[0], y[1], c[0])
        products.batched_gemm(y, y, c)
    names = [expected, expected, "64F", "64F", "32F", "32F"]
    assert computed == [getattr(cublas, f"CUBLAS_COMPUTE_{name}") for name in names]


@pytest.mark.parametrize("alike", [False, True])
def test_the_fastest_proposal_is_taken_from_then_on_or_the_first_where_runs_shall_be_alike(
    measured, monkeypatch, alike
):
    monkeypatch.setenv("MPIPIPE_DETERMINISTIC", str(int(alike)))
    times(monkeypatch, a7=3, a8=1, a9=2)
    x, c = arrays.upload(np.eye(8, dtype=np.float32)), arrays.zeros((8, 8), np.dtype(np.float32), "cuda")
    for _ in range(3):
        products.gemm(x, x, c, add=True)
    assert measured == [7 if alike else 8] * 3
    np.testing.assert_array_equal(arrays.download(c), 3 * np.eye(8))


def test_measuring_adds_nothing_and_happens_once(measured, emulated_gpu):
    x, c = arrays.upload(np.eye(8, dtype=np.float32)), arrays.zeros((8, 8), np.dtype(np.float32), "cuda")
    products.gemm(x, x, c, add=True)
    assert len(measured) == 3 * (1 + products.RUNS) + 1 and emulated_gpu.synchronisations
    emulated_gpu.reset()
    products.gemm(x, x, c, add=True)
    assert len(measured) == 3 * (1 + products.RUNS) + 2 and not emulated_gpu.synchronisations
    np.testing.assert_array_equal(arrays.download(c), 2 * np.eye(8))


def test_addresses_choose_what_is_proposed(measured, monkeypatch):
    times(monkeypatch, a7=1, a8=2, a9=3)
    room = arrays.upload(np.ones(65, np.float32))
    c = arrays.zeros((8, 8), np.dtype(np.float32), "cuda")
    for start in (0, 1, 0):
        x = room[start : start + 64].reshape(8, 8)
        products.gemm(x, x, c)
        np.testing.assert_array_equal(arrays.download(c), np.full((8, 8), 8.0))
    assert measured == [7, 8, 7]


def test_what_cublaslt_does_not_propose_is_left_to_cublas(measured, monkeypatch):
    x, c = arrays.upload(np.eye(8)), arrays.zeros((8, 8), np.dtype(np.float64), "cuda")
    products.gemm(x, x, c)
    monkeypatch.setattr(products, "MOST", 1)
    single = arrays.upload(np.eye(8, dtype=np.float32))
    products.gemm(single, single, arrays.zeros((8, 8), np.dtype(np.float32), "cuda"))
    assert not measured
    np.testing.assert_array_equal(arrays.download(c), np.eye(8))


def test_layers_give_the_numbers_of_cublas_which_asks_nobody(measured, monkeypatch):
    found, counts = [], []
    for name in ("cublaslt", "cublas", ""):
        monkeypatch.setenv("MPIPIPE_PRODUCTS", name)
        products._library.cache_clear()
        cuda, draw = nn.kernels.of("cuda"), np.random.default_rng(2)
        x, weight, dy = (arrays.upload(draw.normal(size=s).astype(np.float32)) for s in ((6, 8), (16, 8), (6, 16)))
        grad = arrays.zeros((16, 8), np.dtype(np.float32), "cuda")
        for _ in range(2):
            cuda.linear_backward_weight(dy, x, grad)
        made = cuda.linear(x, weight), cuda.linear_backward_input(dy, weight), grad
        found.append([y.tobytes() for y in map(arrays.download, made)])
        counts.append(len(measured))
    assert found[0] == found[1] == found[2] and counts[0] == counts[1] == counts[2] > 0


def test_a_switch_that_cannot_be_followed_is_an_error(emulated_gpu, monkeypatch):
    def product():
        x = arrays.upload(np.eye(8, dtype=np.float32))
        products.gemm(x, x, arrays.zeros((8, 8), np.dtype(np.float32), "cuda"))

    monkeypatch.setenv("MPIPIPE_PRODUCTS", "cublaslt")
    monkeypatch.setitem(sys.modules, "nvmath", None)
    with pytest.raises(BackendError, match="nvmath cannot be imported"):
        product()
    monkeypatch.setenv("MPIPIPE_PRODUCTS", "magma")
    products._library.cache_clear()
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
