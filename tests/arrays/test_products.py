"""Products of device arrays by cuBLAS: the numbers, and the setting for TF32."""

from itertools import product

import numpy as np
import pytest
from support.tolerance import close

from mpipipe import arrays
from mpipipe.arrays import products

RANDOM = np.random.default_rng(4)


def agrees(found, a, b, c, factor=1.0, add=False):
    """`found` is factor a b, with `add` plus c, summed in the accumulator of a."""
    a, b, before = a.astype(float), b.astype(float), c.astype(float)
    size = factor * np.abs(a) @ np.abs(b) + np.abs(before)
    close(found, factor * a @ b + add * before, a.shape[-1] + 2, size, dtype=arrays.accumulator(c.dtype))


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("transpose_a, transpose_b, add", product([False, True], repeat=3))
def test_one_product(gpu, dtype, transpose_a, transpose_b, add):
    kind = arrays.dtype(dtype)
    a, b = RANDOM.normal(size=(4, 5)).astype(kind), RANDOM.normal(size=(5, 7)).astype(kind)
    given = [arrays.upload(x.T if turned else x) for x, turned in ((a, transpose_a), (b, transpose_b))]
    for result in {kind, arrays.accumulator(kind)}:
        c = RANDOM.normal(size=(4, 7)).astype(result)
        target = arrays.upload(c if add else np.full_like(c, np.nan))  # what is set is not read
        products.gemm(*given, target, transpose_a, transpose_b, add)
        agrees(arrays.download(target), a, b, c, add=add)


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
