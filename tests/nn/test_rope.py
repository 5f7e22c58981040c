"""Rotary tables: their angles, on host and device, and how a stage keeps them."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mpipipe import arrays, nn
from mpipipe.nn import rope
from mpipipe.nn.layers.layer import TABLES, RopeTables

POSITIONS = np.array([0, 1, 5, 4095])


def test_angles_are_the_formula():
    expected = [[p * 100.0 ** (-2 * i / 6) for i in range(3)] for p in POSITIONS]
    np.testing.assert_allclose(rope.angles(POSITIONS, 6, 100.0), expected, rtol=1e-15)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_host_and_device_tables_hold_the_same_numbers(gpu, dtype):
    kind = arrays.dtype(dtype)
    host = nn.kernels.of("cpu", kind).rope_table(POSITIONS, 6, 100.0, kind)
    device = arrays.download(nn.kernels.of("cuda").rope_table(POSITIONS, 6, 100.0, kind))
    assert host.shape == (4, 1, 3) and device.dtype == arrays.accumulator(kind)
    np.testing.assert_allclose(host[:, 0].real, device[..., 0], rtol=0, atol=np.finfo(device.dtype).eps)
    np.testing.assert_allclose(host[:, 0].imag, device[..., 1], rtol=0, atol=np.finfo(device.dtype).eps)
    assert host[2, 0, 1].real == pytest.approx(math.cos(5 * 100.0 ** (-1 / 3)), rel=1e-6)


def tables():
    return RopeTables(nn.kernels.of("cpu"), np.dtype(np.float64), "cpu")


def test_equal_positions_share_one_table():
    kept = tables()
    assert kept.of([1, 2], 4, 10.0) is kept.of(np.array([1, 2], np.int32), 4, 10.0)
    assert kept.of([1, 2], 4, 10.0) is not kept.of([1, 2], 4, 20.0)
    assert kept.of([1, 2], 4, 10.0) is not kept.of([2, 1], 4, 10.0)


def test_tables_that_were_not_used_for_long_are_dropped():
    kept = tables()
    first = kept.of([0], 4, 10.0)
    for position in range(1, TABLES):
        kept.of([position], 4, 10.0)
    assert kept.of([0], 4, 10.0) is first
    for position in range(1, TABLES + 1):
        kept.of([position], 4, 10.0)
    assert kept.of([0], 4, 10.0) is not first


def test_a_table_cannot_be_written():
    with pytest.raises(ValueError, match="read-only"):
        tables().first(4, 4, 10.0)[...] = 0
