"""Names of types that stand in annotations."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

DeviceArray: TypeAlias = Any  # cupy.ndarray: CuPy may be missing, and has no types
Array: TypeAlias = "np.ndarray | DeviceArray"
Tree: TypeAlias = "Array | tuple[Array, ...] | dict[str, Array]"  # what travels between two stages
Shape: TypeAlias = "tuple[int, ...]"
Stream: TypeAlias = Any  # cupy.cuda.Stream
Event: TypeAlias = Any  # cupy.cuda.Event
