"""Layers for fields, arrays (batch, *space, channels) with one to three axes of space: norm of groups, and sampling."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np

from mpipipe import arrays
from mpipipe.arrays import Array
from mpipipe.errors import ArgumentError
from mpipipe.nn.checks import check_axes, check_features, check_field, check_positive
from mpipipe.nn.layers.layer import Layer
from mpipipe.nn.parameters import ones, vector


class GroupNorm(Layer):
    """y = gain * (x - mean) / sqrt(variance + eps) + bias, with mean and variance over space and a group of channels.

    Wu and He, "Group normalization" (2018). x is ``(batch, *space, channels)``. One group
    normalises over all channels.

    Parameters
    ----------
    groups : int
        Number of groups that the channels are divided into, in order; it divides `channels`.
    channels : int
        Size of the last axis; the parameters `gain` and `bias` are (channels,), of ones and zeros at the start.
    eps : float
        Keeps the root away from 0.
    """

    takes_integers = False
    recordable = True
    freezes_parts = True

    gain: np.ndarray
    bias: np.ndarray

    def __init__(self, groups: int, channels: int, eps: float = 1e-5):
        check_positive(groups=groups, channels=channels)
        if channels % groups:
            raise ArgumentError("groups must divide the channels", found=f"{channels} channels, {groups} groups")
        self.groups, self.channels, self.eps = groups, channels, eps
        self.declared = {"gain": vector(channels, ones), "bias": vector(channels)}

    def forward(self, x: Array) -> tuple[Array, Any]:
        check_features(self, x, self.channels)
        y, saved = arrays.empty(x.shape, x.dtype, self.stage.device), []
        for group, target in enumerate(self._groups(y)):
            part = self._rows(x, group)
            gain, bias = (self._at_all_points(values, group, part.shape[1]) for values in (self.gain, self.bias))
            _, normal, scale = self.stage.kernels.norm(part, gain, bias, self.eps)
            self.stage.kernels.copy(normal.reshape(target.shape), target)
            saved.append((part, scale))
        return y, saved

    def backward_input(self, dy: Array, saved: Any) -> tuple[Array, Any]:
        dx, pending = arrays.empty(dy.shape, dy.dtype, self.stage.device), []
        for group, (target, (part, scale)) in enumerate(zip(self._groups(dx), saved)):
            gain = self._at_all_points(self.gain, group, part.shape[1])
            result, *parts = self.stage.kernels.norm_backward(self._rows(dy, group), part, scale, gain, True)
            self.stage.kernels.copy(result.reshape(target.shape), target)
            pending.append(parts)
        return dx, pending

    def backward_weight(self, pending: Any) -> None:
        for key, parts in zip(("gain", "bias"), zip(*pending)):
            self._add(key, self._add_groups, *parts)

    def _add_groups(self, *parts_and_grad: Array) -> None:
        *parts, grad = parts_and_grad
        for group, part in enumerate(parts):
            own = grad.reshape(self.groups, -1)[group]
            of_points = arrays.zeros((part.shape[1],), part.dtype, self.stage.device)
            self.stage.kernels.add_parts(part, of_points)
            self.stage.kernels.sum_rows(of_points.reshape(-1, own.size), own)

    def _groups(self, x: Array) -> list[Array]:
        """Return views (batch, points, channels of a group)."""
        size, points = self.channels // self.groups, x.reshape(len(x), -1, self.channels)
        return [points[..., group * size : (group + 1) * size] for group in range(self.groups)]

    def _rows(self, x: Array, group: int) -> Array:
        """Return a group with one row for each field."""
        part = self._groups(x)[group]
        if not part.flags.c_contiguous:
            part = arrays.empty(part.shape, x.dtype, self.stage.device)
            self.stage.kernels.copy(self._groups(x)[group], part)
        return part.reshape(len(x), -1)

    def _at_all_points(self, values: Array, group: int, width: int) -> Array:
        """Return the values of a group once for each point, (width,)."""
        own = values.reshape(self.groups, 1, -1)[group]
        points = arrays.zeros((width // own.shape[1],), np.dtype(np.int64), self.stage.device)
        return self.stage.kernels.embed(own, points).reshape(-1)


# -- Sampling: fewer points, more points, and points gathered into patches --------------------------------------------


class _Sampling(Layer):
    """Averages of boxes of points, or copies of a point over its box: each is the other's gradient, up to a factor."""

    takes_integers = False
    recordable = True

    def __init__(self, factor: tuple[int, ...]):
        check_axes("factor", factor)
        self.factor = factor

    def _coarse(self, fine: Array, factor: float) -> Array:
        """Return factor times the sum of each box, summed in the dtype of statistics and rounded once."""
        kernels, kind = self.stage.kernels, arrays.accumulator(fine.dtype)
        space = tuple(points // size for points, size in zip(fine.shape[1:-1], self.factor))
        total = arrays.empty((len(fine), *space, fine.shape[-1]), kind, self.stage.device)
        for place, box in enumerate(self._boxes()):
            kernels.copy(fine[box], total, add=place > 0)
        return arrays.cast(kernels.scale(total, factor, total), fine.dtype)

    def _fine(self, coarse: Array, factor: float) -> Array:
        """Return factor times the value of each box at all its points."""
        space = tuple(points * size for points, size in zip(coarse.shape[1:-1], self.factor))
        fine = arrays.empty((len(coarse), *space, coarse.shape[-1]), coarse.dtype, self.stage.device)
        coarse = coarse if factor == 1 else self.stage.kernels.scale(coarse, factor)
        for box in self._boxes():
            self.stage.kernels.copy(coarse, fine[box])
        return fine

    def _boxes(self) -> Iterator[tuple[slice, ...]]:
        """Yield, for each place in a box, the points at that place of all boxes."""
        for offset in product(*map(range, self.factor)):
            yield (slice(None), *(slice(start, None, step) for start, step in zip(offset, self.factor)))


class Downsample(_Sampling):
    """The average of each box of `factor` points; x is ``(batch, *space, channels)``, as y is, with fewer points.

    Parameters
    ----------
    factor : tuple of int
        Points of a box along each axis of space; they divide its length.

    Examples
    --------
    >>> import numpy as np
    >>> from mpipipe import nn
    >>> stage = nn.Stage([nn.Downsample((2,))], dtype="float64")
    >>> stage.forward(np.array([[[1.0], [3.0], [5.0], [6.0]]]))[0].ravel()
    array([2. , 5.5])
    """

    def forward(self, x: Array) -> tuple[Array, Any]:
        check_field(self, x, len(self.factor))
        if any(points % size for points, size in zip(x.shape[1:-1], self.factor)):
            raise ArgumentError(
                f"layer {self.name} (Downsample): the boxes do not fill the field",
                found=f"shape {x.shape}",
                expected=f"points of each axis as multiples of {self.factor}",
            )
        return self._coarse(x, 1 / math.prod(self.factor)), None

    def backward_input(self, dy: Array, saved: Any) -> tuple[Array, Any]:
        return self._fine(dy, 1 / math.prod(self.factor)), None


class Upsample(_Sampling):
    """The value of each point at `factor` points; x is ``(batch, *space, channels)``, as y is, with more points.

    Parameters
    ----------
    factor : tuple of int
        Points that a point becomes along each axis of space.

    Examples
    --------
    >>> import numpy as np
    >>> from mpipipe import nn
    >>> stage = nn.Stage([nn.Upsample((2,))], dtype="float64")
    >>> stage.forward(np.array([[[1.0], [3.0]]]))[0].ravel()
    array([1., 1., 3., 3.])
    """

    def forward(self, x: Array) -> tuple[Array, Any]:
        check_field(self, x, len(self.factor))
        return self._fine(x, 1), None

    def backward_input(self, dy: Array, saved: Any) -> tuple[Array, Any]:
        return self._coarse(dy, 1), None


class Patches(Layer):
    """A field ``(batch, *space, channels)`` as a sequence ``(batch, patches, points * channels)`` of patches, or back.

    Patches are in the order of C, as are the points in one. A Linear after it is the embedding of a vision transformer
    (Dosovitskiy et al., "An image is worth 16x16 words", 2020).

    Parameters
    ----------
    size : tuple of int
        Points of a patch along each axis of space.
    grid : tuple of int
        Patches along each axis.
    back : bool
        Whether the layer makes a field of a sequence.

    Examples
    --------
    >>> import numpy as np
    >>> from mpipipe import nn
    >>> patches = nn.Patches((2, 2), (4, 8))
    >>> stage = nn.Stage([patches, nn.Patches((2, 2), (4, 8), back=True)])
    >>> x = np.random.default_rng(0).random((1, 8, 16, 3)).astype("float32")
    >>> bool((stage.forward(x)[0] == x).all())
    True
    """

    takes_integers = False
    recordable = True
    ends = False

    def __init__(self, size: tuple[int, ...], grid: tuple[int, ...], back: bool = False):
        check_axes("size", size)
        check_axes("grid", grid)
        if len(size) != len(grid):
            raise ArgumentError("a patch has as many axes as the grid", found=f"size {size}, grid {grid}")
        self.size, self.grid, self.back = size, grid, back
        self.space = tuple(points * count for points, count in zip(size, grid))

    def forward(self, x: Array) -> tuple[Array, Any]:
        if self.back:
            points, patches = math.prod(self.size), math.prod(self.grid)
            fits = x.ndim == 3 and x.shape[1] == patches and x.shape[2] % points == 0
            expected = f"(batch, {patches}, {points} * channels)"
        else:
            fits = x.ndim == len(self.space) + 2 and x.shape[1:-1] == self.space
            expected = f"(batch, {', '.join(map(str, self.space))}, channels)"
        if not fits:
            raise ArgumentError(
                f"layer {self.name} (Patches): the input has the wrong shape", found=str(x.shape), expected=expected
            )
        return self._move(x, self.back), None

    def backward_input(self, dy: Array, saved: Any) -> tuple[Array, Any]:
        return self._move(dy, not self.back), None

    def _move(self, x: Array, back: bool) -> Array:
        """Return the field of a sequence of patches, or the sequence of a field."""
        points, patches, batch = math.prod(self.size), math.prod(self.grid), len(x)
        channels = x.shape[-1] // points if back else x.shape[-1]
        shape = (batch, *self.space, channels) if back else (batch, patches, points * channels)
        y = arrays.empty(shape, x.dtype, self.stage.device)
        field, sequence = (y, x) if back else (x, y)
        *outer, last = self.size
        lines = sequence.reshape(batch, *self.grid, math.prod(outer), last * channels)
        for place, offset in enumerate(product(*map(range, outer))):
            box = slice(None), *(slice(start, None, step) for start, step in zip(offset, outer))
            of_field = field[box].reshape(batch, *self.grid, last * channels)
            pair = (lines[..., place, :], of_field)
            self.stage.kernels.copy(*(pair if back else pair[::-1]))
        return y
