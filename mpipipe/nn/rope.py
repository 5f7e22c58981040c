"""Rotary position embedding (Su et al., "RoFormer", 2021).

Neighbouring elements (2i, 2i + 1) of a head are one complex number, turned by position * base^(-2i / head_dim). A turn
is one complex product, and its adjoint is the product with the conjugate.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

TABLES = 16  # of one stage at most, each for its own positions


def complex_of(dtype: np.dtype) -> np.dtype:
    """complex128 for float64, complex64 for all others."""
    return np.dtype(np.complex128 if dtype == np.float64 else np.complex64)


def angles(positions: np.ndarray, head_dim: int, base: float) -> np.ndarray:
    """The angle of each position and pair, float64 (seq, head_dim / 2)."""
    frequencies = base ** (-np.arange(0, head_dim, 2) / head_dim)
    return np.asarray(positions, np.float64)[:, None] * frequencies


def rope_table(positions: np.ndarray, head_dim: int, base: float, dtype: np.dtype) -> np.ndarray:
    """exp(i * angle), complex, shape (seq, 1, head_dim / 2): the factor of each position and pair, for every head."""
    table = np.exp(1j * angles(positions, head_dim, base)).astype(complex_of(dtype))[:, None, :]
    table.flags.writeable = False
    return table


def pairs(x: np.ndarray) -> np.ndarray:
    """x (..., head_dim) as complex (..., head_dim / 2), a view."""
    return x.view(complex_of(x.dtype))


class Tables:
    """The tables of one stage, made where it computes; layers that turn the same positions share one."""

    def __init__(self, kernels, dtype: np.dtype, device: str):
        self.kernels, self.dtype, self.device = kernels, dtype, device
        self._kept = lru_cache(maxsize=TABLES)(self._make)

    def of(self, positions: np.ndarray, head_dim: int, base: float):
        """The table of any positions, for `kernels.apply_rope`."""
        return self._kept(np.ascontiguousarray(positions, np.int64).tobytes(), head_dim, base)

    def first(self, seq: int, head_dim: int, base: float):
        """The table of the positions 0 ... seq - 1, a part of that of the next power of two."""
        length = 1 << max(seq - 1, 0).bit_length()
        return self._kept(length, head_dim, base)[:seq]

    def _make(self, where, head_dim, base):
        positions = np.arange(where) if isinstance(where, int) else np.frombuffer(where, np.int64)
        return self.kernels.rope_table(positions, head_dim, base, self.dtype, self.device)
