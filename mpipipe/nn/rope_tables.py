"""The rotary tables of one stage, made where it computes; layers that turn the same positions share one."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike

from mpipipe import arrays
from mpipipe.arrays import Array
from mpipipe.nn.kernels.interface import Kernels
from mpipipe.nn.rope_scaling import RopeScaling

TABLES = 16  # of one stage at most, each for its own positions


class RopeTables:
    """Tables for `kernels.apply_rope` on arrays of one dtype and device, kept for the next use."""

    def __init__(self, kernels: Kernels, dtype: np.dtype, device: str):
        self.kernels, self.dtype, self.device = kernels, dtype, device
        self._kept = lru_cache(maxsize=TABLES)(self._make)

    def of(self, positions: ArrayLike, head_dim: int, base: float, scaling: RopeScaling | None = None) -> Array:
        """Return the table of any positions: its i-th row turns the i-th row of the sequence."""
        return self._held(np.ascontiguousarray(positions, np.int64).tobytes(), head_dim, base, scaling)

    def first(self, seq: int, head_dim: int, base: float, scaling: RopeScaling | None = None) -> Array:
        """Return the table of the positions 0 ... seq - 1, a part of that of the next power of two."""
        length = 1 << max(seq - 1, 0).bit_length()
        return self._held(length, head_dim, base, scaling)[:seq]

    def _held(self, positions: int | bytes, head_dim: int, base: float, scaling: RopeScaling | None) -> Array:
        """Return a table that is kept, and that lives as long as a graph which is recorded now."""
        return arrays.hold(self._kept(positions, head_dim, base, scaling))

    def _make(self, positions: int | bytes, head_dim: int, base: float, scaling: RopeScaling | None) -> Array:
        """Make the table of the first positions, or of those whose int64 values these bytes are."""
        numbers = np.arange(positions) if isinstance(positions, int) else np.frombuffer(positions, np.int64)
        return self.kernels.rope_table(numbers, head_dim, base, self.dtype, self.device, scaling)
