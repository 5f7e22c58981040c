"""Parameters: their description before a stage exists, and the flat buffers with named views after."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from mpipipe import arrays
from mpipipe.arrays.memory import ALIGNMENT


@dataclass(frozen=True)
class Parameter:
    """What a layer says about one of its arrays before the array exists.

    Parameters
    ----------
    shape : of the array
    draw : draw(generator, shape) -> float64 array of initial values; see `normal`, `zeros`, `ones`
    decay : whether weight decay applies (matrices: yes; biases and gains: no)
    tie : parameters with the same key, anywhere in the model, are one parameter: they start equal (the initial values
        are drawn for the key, not for the name) and the pipeline sums their gradients
    """

    shape: tuple[int, ...]
    draw: Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]
    decay: bool = True
    tie: str | None = None

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def normal(std: float):
    """Initial values from a normal distribution of mean 0."""
    return lambda generator, shape: generator.standard_normal(shape) * std


def zeros(_generator, shape):
    return np.zeros(shape)


def ones(_generator, shape):
    return np.ones(shape)


class FlatBuffer(Mapping):
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
        self,
        shapes: Mapping[str, tuple[int, ...]],
        dtype: np.dtype,
        device: str = "cpu",
        narrowest: np.dtype | None = None,
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

    def __getitem__(self, name: str) -> np.ndarray:
        return self._views[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._views)

    def __len__(self) -> int:
        return len(self._views)


def decay_ranges(offsets: Mapping[str, int], decays: Mapping[str, bool], end: int) -> list[tuple[int, int, bool]]:
    """Cut a flat buffer of `end` elements into the longest runs (start, stop, decay) of equal decay, gaps included."""
    runs: list[tuple[int, int, bool]] = []
    for name, start in offsets.items():
        if runs and runs[-1][2] == decays[name]:
            continue
        if runs:
            runs[-1] = (runs[-1][0], start, runs[-1][2])
        runs.append((start, end, decays[name]))
    return runs
