"""Convolution by the low frequencies of a field, the layer of Fourier neural operators."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np

from mpipipe import arrays
from mpipipe.arrays import Array, Shape
from mpipipe.errors import ArgumentError
from mpipipe.nn.checks import check_axes, check_field, check_positive
from mpipipe.nn.layers.layer import Layer, Pending, Saved, WithPending, WithSaved
from mpipipe.nn.parameters import normal


class SpectralConv(Layer):
    """y = F^-1(W_k F(x)_k): each low frequency k has a complex matrix, the others go.

    Li et al., "Fourier neural operator for parametric partial differential equations" (2021),
    section 4. x is ``(batch, *space, inputs)`` and y ``(batch, *space, outputs)``, both real.
    `modes` m keep the frequencies 0 ... m - 1 of the last axis, and -m ... m - 1 of all others. The
    parameter `weight` is ``(*frequencies, inputs, outputs, 2)`` with frequencies (2 m, ..., m),
    real and imaginary parts on the last axis, and the negative frequencies of an axis after the
    others. The result is that of ``irfftn`` of numpy.

    The transforms are products with matrices of cosines and sines: few frequencies of some hundred
    points are a small matrix, and products are what a processor does best.

    Parameters
    ----------
    inputs, outputs : int
        Channels of x and of y.
    modes : tuple of int
        Frequencies to keep along each axis of space: one, two or three numbers. An axis has at
        least 2 m points, or 2 m - 2 on the last.
    gain : float
        The parts of the weight start normal with standard deviation gain / sqrt(2 * inputs).
    """

    takes_integers = False

    weight: Array

    def __init__(self, inputs: int, outputs: int, modes: tuple[int, ...], gain: float = 1.0):
        check_positive(inputs=inputs, outputs=outputs)
        check_axes("modes", modes)
        self.inputs = inputs
        self.outputs = outputs
        self.modes = modes
        self.frequencies = (*(2 * count for count in modes[:-1]), modes[-1])
        shape = (*self.frequencies, inputs, outputs, 2)
        self.declared = {"weight": normal(shape, gain * (2 * inputs) ** -0.5)}

    def bound(self) -> None:
        # Not before: a copy of a layer would share the cache, with the layer that it calls.
        self._matrices = cache(self._made)

    # Shapes, with K the frequencies of all axes, P the problems, and (re, im) or (n, re) for pairs
    # of axes in one: x (batch, n1, n2, inputs) -> (P, (re, m2), inputs) -> low (batch, (re, k1), m2
    # * inputs) = (2 batch, K, inputs) -> products (K, (batch, re'), (outputs, re)) -> (batch, (re',
    # re, k1), m2 * outputs) -> (P, (n1, re), ...) -> y In `products` the rows of the real and the
    # imaginary parts of low, A and B, have met W alone: the first matrix on the way back takes A +
    # iB.

    def forward(self, x: Array) -> WithSaved:
        check_field(self, x, len(self.modes), self.inputs)
        space = x.shape[1:-1]
        kernels = self.stage.kernels
        to_low, back = self._matrices(space, arrays.accumulator(x.dtype))
        low = self._apply(arrays.cast(x, to_low[0].dtype), space, to_low, range(len(space))[::-1])
        low = low.reshape(2 * len(x), -1, self.inputs).swapaxes(0, 1)
        products = self._empty((*low.shape[:2], 2 * self.outputs), low.dtype)
        kernels.products(low, self._weight(low.dtype), products)
        ready = self._copied(self._parts(products))
        y = self._apply(ready.reshape(len(x), 4, -1), space, back, range(len(space)))
        return arrays.cast(y, x.dtype).reshape(*x.shape[:-1], self.outputs), (low, space)

    def backward_input(self, dy: Array, saved: Saved) -> WithPending:
        low, space = saved
        kernels = self.stage.kernels
        frequencies, rows, _ = low.shape
        to_low, back = self._matrices(space, low.dtype)
        axes = range(len(space))
        ready = self._apply(arrays.cast(dy, low.dtype), space, back, axes[::-1], transpose=True)
        ready = ready.reshape(len(dy), 2, 2, frequencies, self.outputs)
        dproducts = self._empty((frequencies, rows, 2 * self.outputs), low.dtype)
        kernels.copy(ready, self._parts(dproducts))
        dlow = self._empty(low.shape, low.dtype)
        kernels.products(dproducts, self._weight(low.dtype), dlow, transpose_b=True)
        turned = self._copied(dlow.swapaxes(0, 1)).reshape(len(dy), -1, self.inputs)
        dx = self._apply(turned, space, to_low, axes, transpose=True)
        return arrays.cast(dx, dy.dtype).reshape(*dy.shape[:-1], self.inputs), (low, dproducts)

    def backward_weight(self, pending: Pending) -> None:
        self._add("weight", self._add_products, *pending)

    def _add_products(self, low: Array, dproducts: Array, grad: Array) -> None:
        grad = grad.reshape(-1, self.inputs, 2 * self.outputs)
        self.stage.kernels.products(low, dproducts, grad, transpose_a=True, add=True)

    def _weight(self, dtype: np.dtype) -> Array:
        return arrays.cast(self.weight.reshape(-1, self.inputs, 2 * self.outputs), dtype)

    def _parts(self, products: Array) -> Array:
        """View products (K, (batch, re'), (outputs, re)) as (batch, re', re, K, outputs)."""
        return products.reshape(len(products), -1, 2, self.outputs, 2).transpose(1, 2, 4, 0, 3)

    def _apply(
        self, x: Array, space: Any, matrices: Any, axes: Any, transpose: bool = False
    ) -> Array:
        """Multiply the axes of space with their matrices, one after the other."""
        batch = len(x)
        for axis in axes:
            matrix = matrices[axis]
            inner, outer = matrix.shape[:: 1 if transpose else -1]
            x = x.reshape(batch * math.prod(space[:axis]), inner, -1)
            y = self._empty((len(x), outer, x.shape[2]), x.dtype)
            self.stage.kernels.products(matrix[None], x, y, transpose_a=transpose)
            x = y
        return x

    def _made(self, space: Shape, kind: np.dtype) -> tuple[list[Array], list[Array]]:
        """Return the matrices to the frequencies and back, for each axis."""
        room = (*space[:-1], space[-1] // 2 + 1)
        if any(points < count for points, count in zip(room, self.frequencies)):
            raise ArgumentError(
                f"layer {self.name} (SpectralConv): an axis has too few points for its frequencies",
                found=f"{space} points, modes {self.modes}",
                expected="2 * modes points on each axis, and 2 * modes - 2 on the last",
                remedy="lower modes, or take a finer field",
            )
        to_low = []
        back = []
        for axis, (points, modes) in enumerate(zip(space, self.modes)):
            pair = _transform(points, modes, axis == 0, axis == len(space) - 1)
            to_low.append(self.upload(pair[0].astype(kind)))
            back.append(self.upload(pair[1].astype(kind)))
        return to_low, back


def _transform(points: int, modes: int, first: bool, last: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return the matrix to the frequencies of an axis, and the one back.

    Rows and columns are as `SpectralConv` has its axes: (re, frequency) and (point, re), or points
    alone on the last axis, which is real.
    """
    if last:
        frequencies = np.arange(modes)
    else:
        frequencies = np.r_[0:modes, -modes:0]
    angle = 2 * np.pi * np.outer(frequencies, np.arange(points)) / points
    cos = np.cos(angle)
    sin = np.sin(angle)
    if last:
        to_low = np.concatenate([cos, -sin])
        weight = np.where((frequencies == 0) | (2 * frequencies == points), 1, 2)[:, None] / points
        of_re = (weight * cos).T
        of_im = (-weight * sin).T
    else:
        re = np.stack([cos, sin], 2)
        im = np.stack([-sin, cos], 2)
        to_low = np.stack([re, im]).reshape(2 * len(cos), -1)
        of_re = re.transpose(1, 2, 0).reshape(2 * points, -1) / points
        of_im = im.transpose(1, 2, 0).reshape(2 * points, -1) / points
    back = [of_re, of_im]
    if first:
        back += [of_im, -of_re]
    return to_low, np.concatenate(back, 1)
