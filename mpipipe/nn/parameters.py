"""Parameters: their description before a stage exists, and the flat buffers with named views after."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from mpipipe import arrays
from mpipipe.arrays import Array, Shape
from mpipipe.arrays.memory import ALIGNMENT

Draw: TypeAlias = Callable[[np.random.Generator, Shape], np.ndarray]


@dataclass(frozen=True)
class Parameter:
    """What a layer says about one of its arrays before the array exists.

    Parameters
    ----------
    shape : tuple of int
        Shape of the array.
    draw : callable
        `draw(generator, shape)` returns the initial values, of float64.
    decay : bool
        Whether weight decay applies. Layers here set it for matrices, and not for biases and gains.
    tie : str, optional
        Parameters with the same key, anywhere in the model, are one parameter. They start equal, because their initial
        values are drawn for the key and not for the name, and the pipeline sums their gradients.

    Examples
    --------
    >>> from mpipipe import nn
    >>> nn.Parameter((2, 3), lambda generator, shape: generator.uniform(-1, 1, shape)).size
    6
    """

    shape: Shape
    draw: Draw
    decay: bool = True
    tie: str | None = None

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def normal(std: float) -> Draw:
    """Draw initial values from a normal distribution of mean 0."""
    return lambda generator, shape: generator.standard_normal(shape) * std


def zeros(_generator: np.random.Generator, shape: Shape) -> np.ndarray:
    """Start with zeros."""
    return np.zeros(shape)


def ones(_generator: np.random.Generator, shape: Shape) -> np.ndarray:
    """Start with ones."""
    return np.ones(shape)


class FlatBuffer(Mapping[str, Any]):
    """Named arrays that are views of one buffer.

    `flat` is one-dimensional and starts on a 64-byte boundary, as does every array in it. The gaps between the arrays
    are zero at the start, and stay zero under everything that maps zeros to zeros.

    Parameters
    ----------
    shapes : of the arrays, by name
    dtype : of the buffer
    device : where it is
    narrowest : the narrowest dtype of the buffers that are to have the same offsets; default `dtype`
    """

    def __init__(
        self, shapes: Mapping[str, Shape], dtype: np.dtype, device: str = "cpu", narrowest: np.dtype | None = None
    ):
        step = ALIGNMENT // (dtype if narrowest is None else narrowest).itemsize
        self.offsets: dict[str, int] = {}
        end = 0
        for name, shape in shapes.items():
            self.offsets[name] = end
            end += -(-math.prod(shape) // step) * step
        self.flat = arrays.zeros(end, dtype, device)
        self._views = {
            name: self.flat[start : start + math.prod(shapes[name])].reshape(shapes[name])
            for name, start in self.offsets.items()
        }

    def __getitem__(self, name: str) -> Array:
        return self._views[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._views)

    def __len__(self) -> int:
        return len(self._views)


def decay_ranges(offsets: Mapping[str, int], decays: Mapping[str, bool], end: int) -> list[tuple[int, int, bool]]:
    """Cut a flat buffer of `end` elements, gaps included, into the longest (start, stop, decay) of equal decay."""
    ranges: list[tuple[int, int, bool]] = []
    for name, start in offsets.items():
        if ranges and ranges[-1][2] == decays[name]:
            continue
        if ranges:
            ranges[-1] = (ranges[-1][0], start, ranges[-1][2])
        ranges.append((start, end, decays[name]))
    return ranges
