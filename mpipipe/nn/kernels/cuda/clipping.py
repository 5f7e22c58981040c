"""Clipping by the norm on a GPU, with a factor that the host need not know."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mpipipe import arrays
from mpipipe.arrays import DeviceArray
from mpipipe.arrays.launch import launch, vector_width
from mpipipe.nn.kernels.cuda.checks import check_contiguous

CLIPPING = Path(__file__).with_name("clipping.cu")
FLOAT64 = np.dtype(np.float64)


def clip_factor(squares: DeviceArray, max_norm: float, scale: float, divisor: float) -> DeviceArray:
    """Return c / divisor () in float64, where c = max_norm / norm if norm is above max_norm, else 1.

    The norm is sqrt(sum of squares) / scale, of squares (count,) in float64. Where it is not finite the result is NaN.
    The sum is as good as exact: it is rounded once, after more than 100 bits.
    """
    check_contiguous("clip_factor", squares)
    factor = arrays.empty((), FLOAT64, "cuda")
    numbers = map(np.float64, (max_norm, scale, divisor))
    kernel = arrays.cuda_function(CLIPPING, "clip_factor", T=FLOAT64, V=1)
    kernel((1,), (32,), (squares, factor, np.int64(squares.size), *numbers))
    return factor


def rescale(x: DeviceArray, factor: DeviceArray) -> None:
    """X *= factor, of what `clip_factor` returned; x is float32 or float64, and stays as it is where that is NaN."""
    check_contiguous("rescale", x)
    launch(CLIPPING, "rescale", x.size, (x, factor, np.int64(x.size)), T=x.dtype, V=vector_width(x))
