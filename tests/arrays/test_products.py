"""The setting for TF32 in products of device arrays; nn/test_kernel_formulas.py has the numbers."""

import numpy as np
import pytest

from mpipipe import arrays
from mpipipe.arrays import products


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
