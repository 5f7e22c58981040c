"""Layers for fields, arrays (batch, *space, channels) with one to three axes of space: convolution, norm, sampling.

All of them are made of strided copies and of products of matrices, so they work on every device and in every dtype.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np

from mpipipe import arrays
from mpipipe.arrays import Array
from mpipipe.errors import ArgumentError
from mpipipe.nn.checks import check_features, check_positive, rows
from mpipipe.nn.layers.layer import Layer
from mpipipe.nn.parameters import Parameter, normal, ones, zeros

PADDINGS = ("same", "periodic", "valid")
WINDOWS = {"cpu": 1 << 18, "cuda": 1 << 26}  # elements of the windows that are gathered at once


def check_axes(name: str, sizes: tuple[int, ...]) -> None:
    """Raise ArgumentError unless `sizes` are positive integers for one to three axes of space."""
    if not isinstance(sizes, tuple) or not 1 <= len(sizes) <= 3:
        raise ArgumentError(
            f"{name} must have a size for each axis of space",
            found=repr(sizes),
            expected="a tuple of 1, 2 or 3 integers",
        )
    for axis, size in enumerate(sizes):
        check_positive(**{f"{name}[{axis}]": size})


def check_field(layer: Layer, x: Array, axes: int, channels: int) -> None:
    """Raise ArgumentError unless x is a field with so many axes of space and so many channels."""
    if x.ndim != axes + 2:
        raise ArgumentError(
            f"layer {layer.name} ({type(layer).__name__}): the input has the wrong number of axes",
            found=f"shape {x.shape}",
            expected=f"{axes + 2} axes: batch, {axes} of space, channels",
            remedy="channels are the last axis; give the layer a size for each axis of space",
        )
    check_features(layer, x, channels)


# -- Convolution ------------------------------------------------------------------------------------------------------


class Conv(Layer):
    """y[o] = sum over k of W[k] x[stride * o + k - before], where `before` = (width - 1) // 2, or 0 with "valid".

    x is (batch, *space, inputs) and y (batch, *space', outputs). The parameter `weight` is
    (outputs, *width, inputs / groups). With "same" and "periodic" padding an axis of n points has ceil(n / stride)
    in y; beyond the edges x is 0, or goes on at the other edge. With "valid" it has (n - width) // stride + 1, and no
    window leaves the field. For an odd width "same" is the padding width // 2 of other libraries.

    Parameters
    ----------
    inputs, outputs : int
        Channels of x and of y.
    width : tuple of int
        Points of a window along each axis of space: one, two or three numbers.
    stride : int
        Points of x from one window to the next.
    groups : int
        Channels are divided into so many groups, and each group of y sees its group of x alone.
    padding : {"same", "periodic", "valid"}
        What lies beyond the edges.
    bias : bool
        Whether there is a parameter `bias` (outputs,), of zeros at the start.
    gain : float
        The weight starts normal with standard deviation gain / sqrt(terms of a sum).

    Raises
    ------
    ArgumentError
        A size is not a positive integer, the groups do not divide the channels, or a periodic axis has a length that
        the stride does not divide.

    Examples
    --------
    >>> import numpy as np
    >>> from mpipipe import nn
    >>> stage = nn.Stage([nn.Conv(3, 8, (3, 3), padding="periodic")])
    >>> stage.forward(np.ones((2, 16, 32, 3), np.float32))[0].shape
    (2, 16, 32, 8)
    """

    takes_integers = False
    recordable = True
    freezes_parts = True

    weight: np.ndarray
    bias: np.ndarray | None = None

    def __init__(
        self,
        inputs: int,
        outputs: int,
        width: tuple[int, ...],
        *,
        stride: int = 1,
        groups: int = 1,
        padding: str = "same",
        bias: bool = True,
        gain: float = 1.0,
    ):
        check_positive(inputs=inputs, outputs=outputs, stride=stride, groups=groups)
        check_axes("width", width)
        if inputs % groups or outputs % groups:
            raise ArgumentError("groups must divide the channels", found=f"{inputs} and {outputs} in {groups} groups")
        if padding not in PADDINGS:
            raise ArgumentError("unknown padding", found=repr(padding), expected=" or ".join(map(repr, PADDINGS)))
        self.inputs, self.outputs, self.width, self.stride, self.groups = inputs, outputs, width, stride, groups
        self.padding = padding
        self.before = tuple(0 if padding == "valid" else (size - 1) // 2 for size in width)
        terms = math.prod(width) * inputs // groups
        self.declared = {"weight": Parameter((outputs, *width, inputs // groups), normal(gain * terms**-0.5))}
        if bias:
            self.declared["bias"] = Parameter((outputs,), zeros, decay=False)

    def _sizes(self, x: Array) -> tuple[int, ...]:
        """Return the points of y along each axis of space."""
        check_field(self, x, len(self.width), self.inputs)
        space, stride = x.shape[1:-1], self.stride
        if self.padding == "valid":
            sizes = tuple((points - size) // stride + 1 for points, size in zip(space, self.width))
        else:
            sizes = tuple(-(-points // stride) for points in space)
        wrong = (
            min(sizes) < 1
            or (self.padding == "periodic"
            and any(points % stride or points < size - 1 for points, size in zip(space, self.width)))
        )
        if wrong:
            raise ArgumentError(
                f"layer {self.name} (Conv): the field does not fit the window",
                found=f"shape {x.shape}, width {self.width}, stride {stride}, padding {self.padding!r}",
                expected="at least a window along each axis; a periodic axis as multiple of the stride",
            )
        return sizes

    def forward(self, x: Array) -> tuple[Array, Any]:
        sizes = self._sizes(x)
        ends = [
            (size - 1) * self.stride + width - points - before
            for size, width, points, before in zip(sizes, self.width, x.shape[1:-1], self.before)
        ]
        padded = self._pad(x, 1, x.shape[1:-1], self.before, ends)
        bias = self.bias
        weights = self.weight.reshape(self.groups, self.outputs // self.groups, -1)
        biases = [None] * self.groups if bias is None else bias.reshape(self.groups, -1)
        y = self._products(padded, sizes, self.stride, weights, biases)
        return y, (padded, x.shape[1:-1])

    def backward_input(self, dy: Array, saved: Any) -> tuple[Array, Any]:
        """The same with the windows turned round: dx[i] = sum over k of W[k]^T dy[(i + before - k) / stride]."""
        padded, space = saved
        starts = [width - 1 - before for width, before in zip(self.width, self.before)]
        ends = (
            self.before
            if self.padding == "periodic"
            else [
                points + before - (size - 1) * self.stride - 1
                for points, size, before in zip(space, dy.shape[1:-1], self.before)
            ]
        )
        spread = self._pad(dy, self.stride, space, starts, ends)
        dx = self._products(spread, space, 1, self._turned(), [None] * self.groups)
        return dx, (dy, padded)

    def backward_weight(self, pending: Any) -> None:
        dy, padded = pending
        kernels, grad = self.stage.kernels, self.weight_grad
        if grad is not None:
            grads = grad.reshape(self.groups, self.outputs // self.groups, -1)
            for box, group, windows in self._windows(padded, dy.shape[1:-1], self.stride):
                part = self._group(dy[box], group)
                kernels.linear_backward_weight(rows(part), windows, grads[group])
        self._add("bias", kernels.sum_rows, rows(dy))

    def _pad(self, x: Array, step: int, space: Any, before: Any, after: Any) -> Array:
        """Return x with its points `step` apart and so many points more at both ends of each axis.

        An axis that is periodic is `space` long before it goes on at its other end.
        """
        if step == 1 and not any(before) and not any(after):
            return x
        if self.padding == "periodic":
            inner = space
            after = [max(0, end) for end in after]
        else:
            inner = [(points - 1) * step + 1 for points in x.shape[1:-1]]
            cut = [min(0, end) for end in after]  # points that no window reaches
            if any(cut):
                inner = [points + end for points, end in zip(inner, cut)]
                x = x[(slice(None), *(slice(0, points) for points in inner))]
                after = [max(0, end) for end in after]
        shape = [start + points + end for start, points, end in zip(before, inner, after)]
        padded = arrays.zeros((len(x), *shape, x.shape[-1]), x.dtype, self.stage.device)
        middle = tuple(slice(start, start + points, step) for start, points in zip(before, inner))
        copy = self.stage.kernels.copy
        copy(x, padded[(slice(None), *middle)])
        if self.padding == "periodic":
            for axis, (start, points, end) in enumerate(zip(before, inner, after), 1):
                ahead = (slice(None),) * axis
                if start:
                    copy(padded[(*ahead, slice(points, points + start))], padded[(*ahead, slice(0, start))])
                if end:
                    copy(padded[(*ahead, slice(start, start + end))], padded[(*ahead, slice(start + points, None))])
        return padded

    def _windows(self, padded: Array, sizes: Any, stride: int) -> Iterator[tuple[Any, int, Array]]:
        """Yield (box, group, windows): for some points of the output, the rows of a product that gives them.

        `box` has the points, along the batch and the first axis of space; a row has the window of a point, (*width,
        channels) of the group. The memory of the rows is used again for the next ones.
        """
        channels = padded.shape[-1] // self.groups
        terms = math.prod(self.width) * channels
        line = math.prod(sizes[1:]) * terms  # elements of the windows of one point of the first axis
        most = max(1, WINDOWS[self.stage.device] // line)
        height, deep = min(most, sizes[0]), max(1, min(len(padded), most // sizes[0]))
        memory = arrays.empty((deep * height * line,), padded.dtype, self.stage.device)
        copy, offsets = self.stage.kernels.copy, list(product(*map(range, self.width)))
        for first, top in product(range(0, len(padded), deep), range(0, sizes[0], height)):
            box = (slice(first, min(first + deep, len(padded))), slice(top, min(top + height, sizes[0])))
            shape = (box[0].stop - first, box[1].stop - top, *sizes[1:])
            windows = memory[: math.prod(shape) * terms].reshape(*shape, len(offsets), channels)
            for group in range(self.groups):
                own = slice(group * channels, (group + 1) * channels)
                for place, offset in enumerate(offsets):
                    starts = (offset[0] + top * stride, *offset[1:])
                    points = (slice(s, s + (n - 1) * stride + 1, stride) for s, n in zip(starts, shape[1:]))
                    copy(padded[(box[0], *points, own)], windows[..., place, :])
                yield box, group, windows.reshape(-1, terms)

    def _products(self, padded: Array, sizes: Any, stride: int, weights: Any, biases: Any) -> Array:
        """Return the field of the products of all windows with the weights of their group."""
        kernels, outputs = self.stage.kernels, len(weights[0])
        y = arrays.empty((len(padded), *sizes, outputs * self.groups), padded.dtype, self.stage.device)
        for box, group, windows in self._windows(padded, sizes, stride):
            target = y[box][..., group * outputs : (group + 1) * outputs]
            kernels.copy(kernels.linear(windows, weights[group], biases[group]).reshape(target.shape), target)
        return y

    def _turned(self) -> list[Array]:
        """Return the weights of each group with outputs and inputs exchanged and windows turned round."""
        parts, channels = self.weight.shape[0] // self.groups, self.weight.shape[-1]
        turned = []
        for group in range(self.groups):
            weight = self.weight[group * parts : (group + 1) * parts].reshape(parts, -1, channels)
            count = weight.shape[1]
            new = arrays.empty((channels, count, parts), weight.dtype, self.stage.device)
            for place in range(count):
                self.stage.kernels.copy(weight[:, place].T, new[:, count - 1 - place])
            turned.append(new.reshape(channels, -1))
        return turned

    def _group(self, y: Array, group: int) -> Array:
        """Return the channels of a group, without gaps between rows."""
        parts = self.outputs // self.groups
        return _contiguous(self.stage, y[..., group * parts : (group + 1) * parts])


def _contiguous(stage: Any, x: Array) -> Array:
    """Return x without gaps in memory, as products want it."""
    if x.flags.c_contiguous:
        return x
    new = arrays.empty(x.shape, x.dtype, stage.device)
    stage.kernels.copy(x, new)
    return new


# -- Normalisation over space and groups of channels ------------------------------------------------------------------


class GroupNorm(Layer):
    """y = gain * (x - mean) / sqrt(variance + eps) + bias, with mean and variance over space and a group of channels.

    Wu and He, "Group normalization" (2018). x is (batch, *space, channels). One group normalises over all channels.

    Parameters
    ----------
    groups : int
        Number of groups that the channels are divided into, in order.
    channels : int
        Size of the last axis; the parameters `gain` and `bias` are (channels,), of ones and zeros at the start.
    eps : float
        Keeps the root away from 0.

    Raises
    ------
    ArgumentError
        A size is not a positive integer, or the groups do not divide the channels.

    Examples
    --------
    >>> import numpy as np
    >>> from mpipipe import nn
    >>> stage = nn.Stage([nn.GroupNorm(2, 4)])
    >>> stage.forward(np.ones((1, 8, 8, 4), np.float32))[0].shape
    (1, 8, 8, 4)
    """

    takes_integers = False
    recordable = True
    freezes_parts = True

    gain: np.ndarray
    bias: np.ndarray

    def __init__(self, groups: int, channels: int, eps: float = 1e-5):
        check_positive(groups=groups, channels=channels)
        if channels % groups:
            raise ArgumentError("groups must divide the channels", found=f"{channels} channels in {groups} groups")
        self.groups, self.channels, self.eps = groups, channels, eps
        self.declared = {
            "gain": Parameter((channels,), ones, decay=False),
            "bias": Parameter((channels,), zeros, decay=False),
        }

    def _group(self, x: Array, group: int) -> Array:
        """Return (batch, points, channels of the group), without gaps."""
        size = self.channels // self.groups
        part = x.reshape(len(x), -1, self.channels)[..., group * size : (group + 1) * size]
        return _contiguous(self.stage, part).reshape(len(x), -1)

    def _along_rows(self, values: Array, group: int, width: int) -> Array:
        """Return the values of a group once for each point, (width,)."""
        size, copy = self.channels // self.groups, self.stage.kernels.copy
        row = arrays.empty((width,), values.dtype, self.stage.device)
        copy(values[group * size : (group + 1) * size], row[:size])
        done = size
        while done < width:  # what is there twice
            more = min(done, width - done)
            copy(row[:more], row[done : done + more])
            done += more
        return row

    def forward(self, x: Array) -> tuple[Array, Any]:
        check_features(self, x, self.channels)
        y, saved = arrays.empty(x.shape, x.dtype, self.stage.device), []
        target = y.reshape(len(x), -1, self.groups, self.channels // self.groups)
        for group in range(self.groups):
            part = self._group(x, group)
            gain, bias = (self._along_rows(values, group, part.shape[1]) for values in (self.gain, self.bias))
            normal, scale = self.stage.kernels.layer_norm(part, gain, bias, self.eps)
            self.stage.kernels.copy(normal.reshape(target[:, :, group].shape), target[:, :, group])
            saved.append((part, scale))
        return y, saved

    def backward_input(self, dy: Array, saved: Any) -> tuple[Array, Any]:
        dx, pending = arrays.empty(dy.shape, dy.dtype, self.stage.device), []
        target = dx.reshape(len(dy), -1, self.groups, self.channels // self.groups)
        for group, (part, scale) in enumerate(saved):
            gain = self._along_rows(self.gain, group, part.shape[1])
            through, *parts = self.stage.kernels.layer_norm_backward(self._group(dy, group), part, scale, gain)
            self.stage.kernels.copy(through.reshape(target[:, :, group].shape), target[:, :, group])
            pending.append(parts)
        return dx, pending

    def backward_weight(self, pending: Any) -> None:
        size = self.channels // self.groups
        for group, parts in enumerate(pending):
            for key, part in zip(("gain", "bias"), parts):
                grad = getattr(self, f"{key}_grad")
                if grad is not None:
                    self.stage.kernels.add_parts(part.reshape(-1, size), grad[group * size : (group + 1) * size])


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
        kernels.scale(total, factor, total)
        return arrays.cast(total, fine.dtype)

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
    """The average of each box of `factor` points: (batch, *space, channels) to (batch, *(space / factor), channels).

    Parameters
    ----------
    factor : tuple of int
        Points of a box along each axis of space; they divide its length.

    Raises
    ------
    ArgumentError
        A factor is not a positive integer, or does not divide the points of its axis.

    Examples
    --------
    >>> import numpy as np
    >>> from mpipipe import nn
    >>> stage = nn.Stage([nn.Downsample((2,))], dtype="float64")
    >>> stage.forward(np.array([[[1.0], [3.0], [5.0], [6.0]]]))[0].ravel()
    array([2. , 5.5])
    """

    def forward(self, x: Array) -> tuple[Array, Any]:
        check_field(self, x, len(self.factor), x.shape[-1])
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
    """The value of each point at `factor` points: (batch, *space, channels) to (batch, *(space * factor), channels).

    Parameters
    ----------
    factor : tuple of int
        Points that a point becomes along each axis of space.

    Raises
    ------
    ArgumentError
        A factor is not a positive integer.

    Examples
    --------
    >>> import numpy as np
    >>> from mpipipe import nn
    >>> stage = nn.Stage([nn.Upsample((2,))], dtype="float64")
    >>> stage.forward(np.array([[[1.0], [3.0]]]))[0].ravel()
    array([1., 1., 3., 3.])
    """

    def forward(self, x: Array) -> tuple[Array, Any]:
        check_field(self, x, len(self.factor), x.shape[-1])
        return self._fine(x, 1), None

    def backward_input(self, dy: Array, saved: Any) -> tuple[Array, Any]:
        return self._coarse(dy, 1), None


class Patches(Layer):
    """A field as a sequence of patches, (batch, *space, channels) to (batch, patches, points * channels), or back.

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

    Raises
    ------
    ArgumentError
        A size is not a positive integer, or the input has another shape.

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

    def __init__(self, size: tuple[int, ...], grid: tuple[int, ...], back: bool = False):
        check_axes("size", size)
        check_axes("grid", grid)
        if len(size) != len(grid):
            raise ArgumentError("a patch has as many axes as the grid", found=f"size {size}, grid {grid}")
        self.size, self.grid, self.back = size, grid, back

    def forward(self, x: Array) -> tuple[Array, Any]:
        space = tuple(points * count for points, count in zip(self.size, self.grid))
        if self.back:
            points, patches = math.prod(self.size), math.prod(self.grid)
            fits = x.ndim == 3 and x.shape[1] == patches and x.shape[2] % points == 0
            expected = f"(batch, {patches}, {points} * channels)"
        else:
            fits = x.ndim == len(space) + 2 and x.shape[1:-1] == space
            expected = f"(batch, {', '.join(map(str, space))}, channels)"
        if not fits:
            raise ArgumentError(
                f"layer {self.name} (Patches): the input has the wrong shape", found=str(x.shape), expected=expected
            )
        return self._move(x, self.back), None

    def backward_input(self, dy: Array, saved: Any) -> tuple[Array, Any]:
        return self._move(dy, not self.back), None

    def _move(self, x: Array, back: bool) -> Array:
        """Return the field of a sequence of patches, or the sequence of a field."""
        space = tuple(points * count for points, count in zip(self.size, self.grid))
        points, patches, batch = math.prod(self.size), math.prod(self.grid), len(x)
        channels = x.shape[-1] // points if back else x.shape[-1]
        y = arrays.empty(
            (batch, *space, channels) if back else (batch, patches, points * channels), x.dtype, self.stage.device
        )
        field, sequence = (y, x) if back else (x, y)
        *outer, last = self.size
        lines = sequence.reshape(batch, *self.grid, math.prod(outer), last * channels)
        for place, offset in enumerate(product(*map(range, outer))):
            box = tuple(slice(start, None, step) for start, step in zip(offset, outer))
            of_field = field[(slice(None), *box)].reshape(batch, *self.grid, last * channels)
            pair = (lines[..., place, :], of_field)
            self.stage.kernels.copy(*(pair if back else pair[::-1]))
        return y
