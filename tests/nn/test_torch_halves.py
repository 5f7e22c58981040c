"""Halves by PyTorch: how they are rounded, and what decides between PyTorch and numpy."""

import sys

import numpy as np
import pytest
from support.tolerance import within

from mpipipe import arrays, nn, processor
from mpipipe.arrays import half_precision
from mpipipe.errors import ArgumentError, BackendError
from mpipipe.nn import kernels
from mpipipe.nn.kernels.host import any_dtype

HALVES = ["float16", "bfloat16"]


@pytest.fixture
def torch_cpu(monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setenv(kernels.VARIABLE, "torch")
    return kernels.of("cpu", arrays.dtype("bfloat16"))


def half(dtype, *shape):
    return np.random.default_rng(3).standard_normal(shape).astype(arrays.dtype(dtype))


def wide(x):
    return x.astype(np.float64)


@pytest.mark.judges
@pytest.mark.parametrize("dtype", HALVES)
def test_it_rounds_to_the_bits_of_numpy(torch_cpu, dtype):
    bits = np.random.default_rng(1).integers(0, 1 << 32, 1 << 18, np.uint64).astype(np.uint32)
    halfway = np.arange(1 << 16, dtype=np.uint32) << 16 | 0x8000
    values = np.concatenate([bits, halfway, halfway + 1, halfway - 1]).view(np.float32)
    values = values[~np.isnan(values)]
    with np.errstate(over="ignore"):
        expected = values.astype(arrays.dtype(dtype))
    np.testing.assert_array_equal(
        half_precision.rounded(values, expected.dtype).view(np.uint16), expected.view(np.uint16)
    )
    assert np.isnan(wide(half_precision.rounded(np.full(3, np.nan, np.float32), expected.dtype))).all()


@pytest.mark.judges
def test_arrays_of_other_dtypes_are_left_to_numpy(torch_cpu):
    x, weight = np.random.default_rng(2).standard_normal((2, 40, 40))
    np.testing.assert_array_equal(torch_cpu.linear(x, weight), any_dtype.linear(x, weight))
    assert torch_cpu.norm is any_dtype.norm


@pytest.mark.judges
def test_a_stage_trains_with_it_and_leaves_read_only_inputs_as_they_are(torch_cpu):
    stage = nn.Stage([nn.Linear(24, 40), nn.Gelu(), nn.Linear(40, 24)], dtype="bfloat16")
    assert stage.kernels is torch_cpu
    x = half("bfloat16", 60, 24)
    before = x.copy()
    x.flags.writeable = False
    y, saved = stage.forward(x)
    stage.backward(np.ones_like(y), saved)
    np.testing.assert_array_equal(x, before)
    within(stage.gradients["2.bias"], np.full(24, 60.0), 0)


def test_pytorch_is_chosen_where_it_is_installed_and_the_processor_multiplies_halves(monkeypatch):
    kind = arrays.dtype("bfloat16")
    monkeypatch.delenv(kernels.VARIABLE, raising=False)
    for has, installed, words in (
        ({"avx2"}, True, "bfloat16 by numpy, in float32: this processor has no instructions"),
        ({"avx512_bf16"}, False, "bfloat16 by numpy, in float32: PyTorch is not installed, and could use avx512_bf16"),
    ):
        kernels._of_halves.cache_clear()
        monkeypatch.setattr(processor, "features", lambda has=has: frozenset(has))
        monkeypatch.setattr(kernels, "find_spec", lambda name, installed=installed: installed)
        assert kernels.of("cpu", kind) is kernels.of_array(np.zeros(1, kind)) is any_dtype
        assert words in kernels.describe()
    monkeypatch.setattr(kernels, "find_spec", lambda name: True)
    assert "bfloat16 by torch: this processor has avx512_bf16" in kernels.describe()
    kernels._of_halves.cache_clear()


def test_what_cannot_be_had_is_an_error(monkeypatch):
    monkeypatch.setenv(kernels.VARIABLE, "onednn")
    with pytest.raises(ArgumentError, match=r"MPIPIPE_HALVES.*\n.*onednn.*\n.*numpy or torch"):
        nn.Stage([nn.Linear(2, 2)], dtype="bfloat16")
    kernels._of_halves.cache_clear()
    monkeypatch.setenv(kernels.VARIABLE, "torch")
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "mpipipe.nn.kernels.torch_cpu", raising=False)
    with pytest.raises(BackendError, match=r"pip install torch, or set MPIPIPE_HALVES=numpy"):
        nn.Stage([nn.Linear(2, 2)], dtype="bfloat16")
    kernels._of_halves.cache_clear()
