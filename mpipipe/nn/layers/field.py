"""Fields (batch, *space, channels), with one to three axes of space, as sequences of patches."""

from __future__ import annotations

import math
from itertools import product

from mpipipe.arrays import Array
from mpipipe.errors import ArgumentError
from mpipipe.nn.checks import check_axes
from mpipipe.nn.layers.layer import Layer, Saved, WithPending, WithSaved


class Patches(Layer):
    """A field as a sequence (batch, patches, points * channels) of patches, or back.

    Patches are in the order of C, as are the points in one. A Linear after it is the embedding of a
    vision transformer (Dosovitskiy et al., "An image is worth 16x16 words", 2020).

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
        self.size = size
        self.grid = grid
        self.back = back
        self.space = tuple(points * count for points, count in zip(size, grid, strict=True))

    def forward(self, x: Array) -> WithSaved:
        if self.back:
            points = math.prod(self.size)
            patches = math.prod(self.grid)
            fits = x.ndim == 3 and x.shape[1] == patches and x.shape[2] % points == 0
            expected = f"(batch, {patches}, {points} * channels)"
        else:
            fits = x.ndim == len(self.space) + 2 and x.shape[1:-1] == self.space
            expected = f"(batch, {', '.join(map(str, self.space))}, channels)"
        if not fits:
            raise ArgumentError(
                f"layer {self.name} (Patches): the input has the wrong shape",
                found=str(x.shape),
                expected=expected,
            )
        return self._move(x, self.back), None

    def backward_input(self, dy: Array, saved: Saved) -> WithPending:
        return self._move(dy, not self.back), None

    def _move(self, x: Array, back: bool) -> Array:
        """Return the field of a sequence of patches, or the sequence of a field."""
        points = math.prod(self.size)
        patches = math.prod(self.grid)
        batch = len(x)
        channels = x.shape[-1]
        shape = (batch, patches, points * channels)
        if back:
            channels //= points
            shape = (batch, *self.space, channels)
        y = self._empty(shape, x.dtype)
        field, sequence = (y, x) if back else (x, y)
        *outer, last = self.size
        lines = sequence.reshape(batch, *self.grid, math.prod(outer), last * channels)
        for place, offset in enumerate(product(*map(range, outer))):
            box = slice(None), *(slice(start, None, step) for start, step in zip(offset, outer))
            of_field = field[box].reshape(batch, *self.grid, last * channels)
            pair = (lines[..., place, :], of_field)
            self.stage.kernels.copy(*(pair if back else pair[::-1]))
        return y
