"""Rotary position embedding (Su et al., "RoFormer", 2021).

Neighbouring elements (2i, 2i + 1) of a head are one complex number, turned by the angle position * base^(-2i/head_dim).
A turn is one complex product, and its adjoint is the product with the conjugate.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike


def angles(positions: ArrayLike, head_dim: int, base: float) -> np.ndarray:
    """Return the angle of each position and pair, float64 (seq, head_dim / 2)."""
    frequencies = base ** (-np.arange(0, head_dim, 2) / head_dim)
    return np.asarray(positions, np.float64)[:, None] * frequencies


def complex_of(dtype: np.dtype) -> np.dtype:
    """Return complex128 for float64, complex64 for all others."""
    return np.dtype(np.complex128 if dtype == np.float64 else np.complex64)


def rope_table(positions: ArrayLike, head_dim: int, base: float, dtype: np.dtype) -> np.ndarray:
    """Return exp(i * angle), complex (seq, 1, head_dim / 2): the factor of each position and pair, for every head."""
    table = np.exp(1j * angles(positions, head_dim, base)).astype(complex_of(dtype))[:, None, :]
    table.flags.writeable = False
    return table


def pairs(x: np.ndarray) -> np.ndarray:
    """Return x (..., head_dim) as complex (..., head_dim / 2), a view."""
    return x.view(complex_of(x.dtype))
