"""Rotary positions on a GPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mpipipe import arrays
from mpipipe.arrays import DeviceArray
from mpipipe.arrays.launch import Call, bitwise_or, over, scalar_type, vector_width
from mpipipe.arrays.packed import Packed
from mpipipe.arrays.strided import element_strides
from mpipipe.nn.rope import angles
from mpipipe.nn.rope_scaling import RopeScaling

ROPE = Path(__file__).with_name("rope.cu")


def rope_table(
    positions: np.ndarray,
    head_dim: int,
    base: float,
    dtype: np.dtype,
    device: str = "cuda",
    scaling: RopeScaling | None = None,
) -> DeviceArray:
    """Return cosine and sine (seq, head_dim / 2, 2) of the angle of each position and pair, on the device."""
    turned = angles(positions, head_dim, base, scaling)
    table = np.stack([np.cos(turned), np.sin(turned)], axis=-1)
    if scaling is not None:
        table *= scaling.amplitude
    return arrays.upload(table.astype(arrays.accumulator(np.dtype(dtype))))


def apply_rope(x: DeviceArray, table: DeviceArray, target: DeviceArray, inverse: bool = False) -> None:
    """Target = each pair of neighbours of x turned by its factor, or back by it with `inverse`."""
    _turn((x, table, target), (), (inverse,))


def _pack_turn(x: DeviceArray, table: DeviceArray, target: DeviceArray, inverse: bool) -> Call | None:
    _, seq, heads, dim = x.shape
    x_strides, target_strides = element_strides(x), element_strides(target)
    width = 1
    if x_strides[3] == target_strides[3] == 1:
        width = vector_width(x, target, divides=bitwise_or((dim,), x_strides[:3], target_strides[:3]))
    count, sign = np.int64(x.size // max(width, 2)), scalar_type(x.dtype)(-1 if inverse else 1)
    numbers = map(np.int64, (seq, heads, dim, *x_strides, *target_strides))
    return over(ROPE, "apply_rope", x.size, (count, sign, *numbers), words=1, T=x.dtype, V=width)


_turn = Packed(_pack_turn)
