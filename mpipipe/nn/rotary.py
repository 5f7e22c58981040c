"""Rotary position embedding (Su et al., "RoFormer", 2021).

Neighbouring elements (2i, 2i + 1) of a head are one complex number, turned by position * base^(-2i / head_dim). A turn
is one complex product, and its adjoint is the product with the conjugate.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np


def complex_of(dtype: np.dtype) -> np.dtype:
    """complex64 for float32, complex128 for float64."""
    return np.result_type(dtype, np.complex64)


def turns(positions: np.ndarray, head_dim: int, base: float, dtype: np.dtype) -> np.ndarray:
    """exp(i * angle), complex, shape (seq, 1, head_dim / 2): the factor of each position and pair, for every head."""
    frequencies = base ** (-np.arange(0, head_dim, 2) / head_dim)
    angles = np.asarray(positions, np.float64)[:, None] * frequencies
    table = np.exp(1j * angles).astype(complex_of(dtype))[:, None, :]
    table.flags.writeable = False
    return table


@lru_cache(maxsize=16)
def _first_turns(length: int, head_dim: int, base: float, dtype: np.dtype) -> np.ndarray:
    return turns(np.arange(length), head_dim, base, dtype)


def first_turns(seq: int, head_dim: int, base: float, dtype: np.dtype) -> np.ndarray:
    """`turns` of the positions 0 ... seq - 1, from a table of the next power of two that all layers share."""
    length = 1 << max(seq - 1, 0).bit_length()
    return _first_turns(length, head_dim, base, dtype)[:seq]


def pairs(x: np.ndarray) -> np.ndarray:
    """x (..., head_dim) as complex (..., head_dim / 2), a view."""
    return x.view(complex_of(x.dtype))
