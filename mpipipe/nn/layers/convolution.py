"""Convolution of fields (batch, *space, channels), as products of matrices.

A product has a row for each point of the output: the window of the input that the point sees, with
what lies beyond the edges. Rows are gathered for some points at a time, so that they stay in a
core's cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

from mpipipe import arrays
from mpipipe.arrays import Array
from mpipipe.errors import ArgumentError
from mpipipe.nn.checks import check_axes, check_field, check_positive, rows
from mpipipe.nn.layers.layer import Layer, Pending, Saved, WithPending, WithSaved
from mpipipe.nn.parameters import normal, vector

PADDINGS = ("same", "periodic", "valid")
GATHERED = {"cpu": 1 << 19, "cuda": 1 << 26}  # elements that are gathered at once


class _Shape(NamedTuple):
    """What y[o] = sum over k of W[k] x[stride * o + k - before] has along the axes of space."""

    width: Sequence[int]  # numbers of k
    before: Sequence[int]
    stride: int
    sizes: tuple[int, ...]  # numbers of o


class Conv(Layer):
    """y[o] = sum over k of W[k] x[stride * o + k - before].

    Here `before` = (width - 1) // 2, or 0 with "valid".

    x is ``(batch, *space, inputs)`` and y ``(batch, *space, outputs)``. The parameter `weight` is
    ``(outputs, *width, inputs / groups)``. With "same" and "periodic" padding an axis of n points
    has ceil(n / stride) in y; beyond the edges x is 0, or goes on at the other edge. With "valid"
    it has (n - width) // stride + 1, and no window leaves the field. For an odd width "same" is the
    padding width // 2 of other libraries.

    Parameters
    ----------
    inputs, outputs : int
        Channels of x and of y.
    width : tuple of int
        Points of a window along each axis of space: one, two or three numbers.
    stride : int
        Points of x from one window to the next; a divisor of the points of a periodic axis.
    groups : int
        Number of groups that channels are divided into, in order, a divisor of `inputs` and
        `outputs`; a group of y sees its group of x alone.
    padding : {"same", "periodic", "valid"}, or a tuple with one for each axis
        What lies beyond the edges: ``("same", "periodic")`` is a grid of latitudes and longitudes.
    bias : bool
        Whether there is a parameter `bias` (outputs,), of zeros at the start.
    gain : float
        The weight starts normal with standard deviation gain / sqrt(terms of a sum), as in LeCun et
        al., "Efficient backprop" (1998). With 2**0.5 it is that of He et al., "Delving deep into
        rectifiers" (2015).
    """

    takes_integers = False
    recordable = True
    ends = False

    weight: Array
    bias: Array | None = None

    def __init__(
        self,
        inputs: int,
        outputs: int,
        width: tuple[int, ...],
        *,
        stride: int = 1,
        groups: int = 1,
        padding: str | tuple[str, ...] = "same",
        bias: bool = True,
        gain: float = 1.0,
    ):
        check_positive(inputs=inputs, outputs=outputs, stride=stride, groups=groups)
        check_axes("width", width)
        if inputs % groups or outputs % groups:
            raise ArgumentError(
                "groups must divide the channels",
                found=f"{inputs} inputs, {outputs} outputs, {groups} groups",
            )
        if isinstance(padding, str):
            self.padding = (padding,) * len(width)
        else:
            self.padding = tuple(padding)
        if len(self.padding) != len(width) or not set(self.padding) <= set(PADDINGS):
            raise ArgumentError(
                "unknown padding",
                found=repr(padding),
                expected=f"{', '.join(map(repr, PADDINGS))}, or a tuple of them with one for each "
                "axis of space",
            )
        self.inputs = inputs
        self.outputs = outputs
        self.width = width
        self.stride = stride
        self.groups = groups
        before = [(size - 1) // 2 for size in width]
        for axis, kind in enumerate(self.padding):
            if kind == "valid":
                before[axis] = 0
        self.before = tuple(before)
        terms = math.prod(width) * inputs // groups
        self.declared = {"weight": normal((outputs, *width, inputs // groups), gain * terms**-0.5)}
        if bias:
            self.declared["bias"] = vector(outputs)

    def _sizes(self, x: Array) -> tuple[int, ...]:
        """Return the points of y along each axis of space."""
        check_field(self, x, len(self.width), self.inputs)
        sizes = []
        wrong = False
        for points, width, padding in zip(x.shape[1:-1], self.width, self.padding):
            if padding == "valid":
                sizes.append((points - width) // self.stride + 1)
            else:
                sizes.append(-(-points // self.stride))
            wrong |= padding != "same" and points < width
            wrong |= padding == "periodic" and points % self.stride > 0
        if wrong:
            raise ArgumentError(
                f"layer {self.name} (Conv): the window or the stride does not fit the field",
                found=f"shape {x.shape}, width {self.width}, stride {self.stride}, padding "
                f"{self.padding}",
                expected="a whole window along each axis without zeros; a stride that divides "
                "each periodic axis",
                remedy='a finer field, a smaller window, or padding="same"',
            )
        return tuple(sizes)

    def forward(self, x: Array) -> WithSaved:
        shape = _Shape(self.width, self.before, self.stride, self._sizes(x))
        y = self._empty((len(x), *shape.sizes, self.outputs), x.dtype)
        kernels = self.stage.kernels
        weight = self._matrices(self.weight)
        for windows, group, place in self._windows(x, shape, self.outputs):
            bias = None
            if self.bias is not None:
                bias = self.bias[place[-1]]
            points = kernels.linear(windows, weight[group], bias)
            kernels.copy(points.reshape(y[place].shape), y[place])
        return y, x

    def backward_input(self, dy: Array, saved: Saved) -> WithPending:
        if self.ends:
            return None, (dy, saved)
        # dx[i] = sum over k of W[k]^T dy[(i + before - k) / stride], where that is a whole number:
        # with zeros between the points of dy it is a convolution with every k, turned round
        kernels = self.stage.kernels
        space = saved.shape[1:-1]
        spread = dy
        if self.stride > 1:
            spread = arrays.zeros((len(dy), *space, self.outputs), dy.dtype, self.stage.device)
            places = [slice(0, self.stride * points, self.stride) for points in dy.shape[1:-1]]
            kernels.copy(dy, spread[(slice(None), *places)])
        before = [width - 1 - count for width, count in zip(self.width, self.before)]
        shape = _Shape(self.width, before, 1, space)
        # With the points turned round: (groups, points x outputs of a group, inputs of a group).
        outputs, *width, inputs = self.weight.shape
        weight = self.weight.reshape(self.groups, outputs // self.groups, math.prod(width), inputs)
        turned = self._copied(weight[:, :, ::-1].swapaxes(1, 2)).reshape(self.groups, -1, inputs)
        dx = self._empty(saved.shape, dy.dtype)
        for windows, group, place in self._windows(spread, shape, self.inputs):
            points = kernels.linear_backward_input(windows, turned[group])
            kernels.copy(points.reshape(dx[place].shape), dx[place])
        return dx, (dy, saved)

    def backward_weight(self, pending: Pending) -> None:
        dy, x = pending
        self._add("weight", self._add_products, dy, x)
        self._add("bias", self._sum_points, dy)

    def _add_products(self, dy: Array, x: Array, grad: Array) -> None:
        shape = _Shape(self.width, self.before, self.stride, dy.shape[1:-1])
        sums = self._matrices(grad)
        for windows, group, place in self._windows(x, shape, self.outputs):
            part = rows(arrays.copied(dy[place]))
            self.stage.kernels.linear_backward_weight(part, windows, sums[group])

    def _sum_points(self, dy: Array, grad: Array) -> None:
        """Add up whole lines first, for rows of few channels are slow to add."""
        sums = arrays.zeros(dy.shape[-2:], grad.dtype, self.stage.device)
        self.stage.kernels.sum_rows(dy.reshape(-1, sums.size), sums.reshape(-1))
        self.stage.kernels.add_parts(sums, grad)

    def _matrices(self, weight: Array) -> Array:
        """View weights as (groups, outputs of a group, points of a window x inputs)."""
        return weight.reshape(self.groups, self.outputs // self.groups, -1)

    # -- windows

    def _windows(
        self, x: Array, shape: _Shape, outputs: int
    ) -> Iterator[tuple[Array, int, tuple[slice, ...]]]:
        """Yield windows (points, numbers of a window), their group, and their places in y.

        All points come, some at a time. The memory of the windows is used again for the next ones.
        """
        width, _, stride, sizes = shape
        padded = self._padded(x, shape)
        taps = list(product(*map(range, width)))
        channels = x.shape[-1] // self.groups
        per_group = outputs // self.groups
        line = math.prod(sizes[1:]) * len(taps) * x.shape[-1]
        most = max(1, GATHERED[self.stage.device] // line)
        height = _even(sizes[0], most)
        deep = _even(len(x), max(1, most // sizes[0]))
        memory = self._empty((deep * height * line,), x.dtype)
        for first, top in product(range(0, len(x), deep), range(0, sizes[0], height)):
            batch = slice(first, min(first + deep, len(x)))
            count = batch.stop - first
            points = (min(height, sizes[0] - top), *sizes[1:])
            gathered = memory[: count * points[0] * line]
            gathered = gathered.reshape(count, *points, len(taps), x.shape[-1])
            for tap, (line_of_tap, *others) in enumerate(taps):
                box = [batch]
                for start, number in zip((top * stride + line_of_tap, *others), points):
                    box.append(slice(start, start + number * stride, stride))
                self.stage.kernels.copy(padded[tuple(box)], gathered[..., tap, :])
            place = (batch, slice(top, top + points[0]), *[slice(None)] * len(sizes[1:]))
            for group in range(self.groups):
                part = gathered
                if self.groups > 1:
                    part = arrays.copied(gathered[..., group * channels : (group + 1) * channels])
                windows = part.reshape(-1, len(taps) * channels)
                yield windows, group, (*place, slice(group * per_group, (group + 1) * per_group))

    def _padded(self, x: Array, shape: _Shape) -> Array:
        """Return the points that windows see: 0 beyond an edge, or the points at the other edge."""
        for axis, padding in enumerate(self.padding, 1):
            points = x.shape[axis]
            before = shape.before[axis - 1]
            reach = (shape.sizes[axis - 1] - 1) * shape.stride + shape.width[axis - 1]
            after = max(0, reach - before - points)
            edges = []
            for count, start in ((before, points - before), (after, 0)):
                if padding == "periodic":
                    edge = x[(*[slice(None)] * axis, slice(start, start + count))]
                else:
                    size = (*x.shape[:axis], count, *x.shape[axis + 1 :])
                    edge = arrays.zeros(size, x.dtype, self.stage.device)
                edges.append(edge)
            if before or after:
                x = arrays.concatenate((edges[0], x, edges[1]), axis)
        return x


def _even(count: int, most: int) -> int:
    """Return the size of nearly equal pieces of `count`, at most `most`."""
    return -(-count // -(-count // min(count, most)))
