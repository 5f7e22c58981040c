"""The part of `bench gpu` that measures matrix products."""

from __future__ import annotations

import os
import sys
import types
from importlib.machinery import ModuleSpec

import pytest
from gpu_emulator import cublaslt

from mpipipe.arrays import gemm
from mpipipe.bench.gpu import products

SIZES = dict(repeats=1, rows=8, dim=8, hidden=8, vocab=16)


@pytest.fixture
def nvmath(emulated_gpu, monkeypatch):
    """The emulated cublasLt, as if its package were installed; the algorithms that it was told."""
    for name in ("nvmath", "nvmath.bindings"):
        module = types.ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(sys.modules["nvmath.bindings"], "cublasLt", cublaslt, raising=False)
    cublaslt.used.clear()
    return cublaslt.used


def test_each_product_is_measured_by_both_libraries(nvmath, monkeypatch):
    monkeypatch.delenv("MPIPIPE_PRODUCTS", raising=False)
    rows = list(products.measure(**SIZES))
    assert len(rows) == 9 and all(row.value > 0 and row.peer == "cuBLAS" and row.ratio > 0 for row in rows)
    assert len(nvmath) > 9 and "MPIPIPE_PRODUCTS" not in os.environ and not gemm._library().measured


def test_without_nvmath_cublas_alone_is_measured(emulated_gpu, monkeypatch):
    monkeypatch.setattr(products, "find_spec", lambda name: None)
    rows = list(products.measure(**SIZES))
    assert len(rows) == 9 and all(row.peer_value is None and "not measured" in row.goal for row in rows)
