"""Rotary position embedding (Su et al., "RoFormer", 2021).

Neighbouring elements (2i, 2i + 1) of a head are one complex number, turned by the angle position * base^(-2i/head_dim).
A turn is one complex product, and its adjoint is the product with the conjugate. Scalings of the frequencies, and of
the length of the factors, are in rope_scaling.py.

Other libraries pair element i of a head with element i + head_dim / 2. Rows of their projections to queries and keys
(and elements of biases, and of gains of norms of heads) come in another order within each head: theirs at i is ours at
2i, and theirs at i + head_dim / 2 is ours at 2i + 1.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from mpipipe.nn.rope_scaling import RopeScaling


def angles(positions: ArrayLike, head_dim: int, base: float, scaling: RopeScaling | None = None) -> np.ndarray:
    """Return the angle of each position and pair, float64 (seq, head_dim / 2)."""
    frequencies = base ** (-np.arange(0, head_dim, 2) / head_dim)
    if scaling is not None:
        frequencies = scaling.scaled(frequencies, base)
    return np.asarray(positions, np.float64)[:, None] * frequencies


def complex_of(dtype: np.dtype) -> np.dtype:
    """Return complex128 for float64, complex64 for all others."""
    return np.dtype(np.complex128 if dtype == np.float64 else np.complex64)


def rope_table(
    positions: ArrayLike, head_dim: int, base: float, dtype: np.dtype, scaling: RopeScaling | None = None
) -> np.ndarray:
    """Return exp(i * angle), complex (seq, 1, head_dim / 2): the factor of each position and pair, for every head.

    It is multiplied by the amplitude of the scaling.
    """
    table = np.exp(1j * angles(positions, head_dim, base, scaling))
    if scaling is not None:
        table *= scaling.amplitude
    table = table.astype(complex_of(dtype))[:, None, :]
    table.flags.writeable = False
    return table


def pairs(x: np.ndarray) -> np.ndarray:
    """Return x (..., head_dim) as complex (..., head_dim / 2), a view."""
    return x.view(complex_of(x.dtype))
