"""Rotary tables: their angles, on host and device, and how a stage keeps them."""

from dataclasses import asdict

import numpy as np
import pytest
from support import reference_rope
from support.tolerance import bound, close, within

from mpipipe import arrays, nn
from mpipipe.errors import ArgumentError
from mpipipe.nn import rope
from mpipipe.nn.rope import TABLES, RopeTables, scaling_of

POSITIONS = np.array([0, 1, 5, 4095, 100000])


def tables():
    return RopeTables(nn.kernels.of("cpu").rope_table, np.dtype(np.float64))


def test_equal_positions_share_one_table():
    kept = tables()
    assert kept.of([1, 2], 4, 10.0) is kept.of(np.array([1, 2], np.int32), 4, 10.0)
    assert kept.of([1, 2], 4, 10.0) is not kept.of([1, 2], 4, 20.0)
    assert kept.of([1, 2], 4, 10.0) is not kept.of([2, 1], 4, 10.0)
    both = [kept.of(5, 4, 10.0, scaling) for scaling in (None, nn.LinearScaling(2.5), nn.LinearScaling(2.5))]
    assert both[0].base is not both[1].base is both[2].base
    assert len({kept.of(5, 8, 1e6, scaling).tobytes() for scaling in (None, *SCALINGS)}) == 1 + len(SCALINGS)


def test_tables_that_were_not_used_for_long_are_dropped():
    kept = tables()
    first = kept.of([0], 4, 10.0)
    assert all(kept.of([position], 4, 10.0) is not first for position in range(1, TABLES + 1))
    assert kept.of([0], 4, 10.0) is not first


def test_a_table_cannot_be_written():
    with pytest.raises(ValueError, match="read-only"):
        tables().of(4, 4, 10.0)[...] = 0


# -- Scalings of rotary frequencies against the formulas written out pair by pair, and numbers that make no sense -----


SCALINGS = [
    nn.LinearScaling(2.5),
    nn.Llama3Scaling(8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_positions=8192),
    nn.Llama3Scaling(32.0, low_freq_factor=0.5, high_freq_factor=2.0, original_positions=64),
    nn.YarnScaling(4.0, original_positions=32768),
    nn.YarnScaling(16.0, original_positions=4096, beta_fast=20.0, beta_slow=2.0, attention_factor=1.25),
    nn.YarnScaling(2.0, original_positions=8, beta_fast=1.2),  # the ramp is one step
]


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
@pytest.mark.parametrize("head_dim, base", [(128, 1e6), (6, 1e4)])
def test_frequencies_and_amplitude_are_the_formulas(scaling, head_dim, base):
    expected, amplitude = reference_rope.frequencies(head_dim, base, scaling)
    found = scaling.scaled(base ** (-np.arange(0, head_dim, 2) / head_dim), base)
    close(found, expected, 20)
    close(scaling.amplitude, amplitude, 5)
    assert (found < reference_rope.frequencies(head_dim, base)[0]).any() or head_dim < 64


@pytest.mark.parametrize("scaling", [None, *SCALINGS], ids=str)
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_tables_on_host_and_device_have_scaled_angles_and_amplitude(gpu, scaling, dtype):
    kind = arrays.dtype(dtype)
    wide = arrays.accumulator(kind)
    host = RopeTables(nn.kernels.of("cpu", kind).rope_table, kind).of(POSITIONS, 6, 100.0, scaling)
    device = RopeTables(nn.kernels.of("cuda").rope_table, kind).of(POSITIONS, 6, 100.0, scaling)
    frequencies, amplitude = reference_rope.frequencies(6, 100.0, scaling)
    angles = POSITIONS[:, None] * frequencies
    for part, turn, there in ((host.real, np.cos, 0), (host.imag, np.sin, 1)):
        expected = amplitude * turn(angles)
        allowed = bound(wide, 2, amplitude) + bound(np.float64, 20, amplitude * angles)
        within(part[:, 0], expected, allowed)
        within(arrays.download(device)[..., there], expected, allowed)


def test_tables_of_coordinates_are_those_of_each_axis_side_by_side(gpu):
    coordinates = np.array([[0.0, 1.0], [2.5, -7.0], [90.0, 359.0]])
    for device in ("cpu", "cuda"):
        kept = RopeTables(nn.kernels.of(device).rope_table, np.dtype(np.float64))
        found = kept.of(coordinates, 12, 100.0)
        assert kept.of(coordinates.tolist(), 12, 100.0) is found
        assert kept.of(np.array([2, 5]), 12, 100.0) is not kept.of([[2], [5]], 12, 100.0)
        if device == "cuda":
            found = arrays.download(found)
        expected = np.concatenate([np.exp(1j * rope.angles(axis, 6, 100.0)[0]) for axis in coordinates.T], 1)
        close(found.view(np.float64).reshape(3, 12), expected.view(np.float64), 2, 1)


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
def test_a_scaling_comes_back_from_its_numbers(scaling):
    assert scaling_of(asdict(scaling)) == scaling


@pytest.mark.parametrize(
    "make, match",
    [
        (lambda: nn.LinearScaling(0.5), "factor"),
        (lambda: nn.LinearScaling("2"), "factor"),
        (lambda: nn.Llama3Scaling(8.0, 4.0, 1.0, 8192), "low_freq_factor"),
        (lambda: nn.Llama3Scaling(8.0, 1.0, 4.0, 8192.0), "original_positions"),
        (lambda: nn.YarnScaling(4.0, 0), "original_positions"),
        (lambda: nn.YarnScaling(4.0, 64, beta_fast=1.0, beta_slow=1.0), "beta_fast"),
        (lambda: scaling_of({"factor": 2.0}), "unknown"),
        (lambda: scaling_of({"kind": "yarn", "factor": 2.0}), "original_positions"),
    ],
)
def test_numbers_that_make_no_sense_are_refused_by_name(make, match):
    with pytest.raises(ArgumentError, match=match) as caught:
        make()
    assert caught.value.found
