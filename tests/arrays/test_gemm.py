"""Matrix products of device arrays, and the one setting for TF32."""

from __future__ import annotations

import numpy as np
import pytest
from support.tolerance import close

from mpipipe import arrays
from mpipipe.arrays import gemm

RANDOM = np.random.default_rng(3)


@pytest.fixture
def fresh():
    """What gemm keeps about cuBLAS is forgotten before and after."""
    gemm._library.cache_clear()
    yield
    gemm._library.cache_clear()


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize("transpose_a", [False, True])
def test_one_product(gpu, dtype, transpose_a, transpose_b, add):
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


@pytest.mark.parametrize(("setting", "expected"), [(None, "32F"), ("0", "32F"), ("1", "32F_FAST_TF32")])
def test_one_setting_rules_tf32_in_all_products(emulated_gpu, fresh, monkeypatch, setting, expected):
    if setting is None:
        monkeypatch.delenv("CUPY_TF32", raising=False)
    else:
        monkeypatch.setenv("CUPY_TF32", setting)
    cublas, computed = arrays.cupy().cuda.cublas, []
    for name in ("gemmEx", "gemmStridedBatchedEx"):
        call = getattr(cublas, name)
        monkeypatch.setattr(cublas, name, lambda *args, call=call: (computed.append(args[-2]), call(*args))[1])
    x = {name: arrays.upload(np.ones((2, 4, 4), arrays.dtype(name))) for name in ("float32", "float64", "bfloat16")}
    for name, y in x.items():
        c = arrays.zeros((2, 4, 4), arrays.accumulator(arrays.dtype(name)), "cuda")
        gemm.gemm(y[0], y[1], c[0])
        gemm.batched_gemm(y, y, c)
    names = [expected, expected, "64F", "64F", "32F", "32F"]
    assert computed == [getattr(cublas, f"CUBLAS_COMPUTE_{name}") for name in names]
