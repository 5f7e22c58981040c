"""Losses: loss(output, target) -> (mean over the micro-batch, gradient of the output).

That mean is over all entries of the target. The losses say so by `mean_over_entries`, and a
pipeline weighs each micro-batch by its entries.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from mpipipe import arrays
from mpipipe.arrays import Array, Shape
from mpipipe.errors import ArgumentError
from mpipipe.nn import kernels
from mpipipe.nn.checks import check_features, check_positive, checked_ids, rows
from mpipipe.nn.kernels.interface import LossAndGradient
from mpipipe.nn.layers.embedding import Head
from mpipipe.nn.layers.head_slices import tile_rows, tiles
from mpipipe.nn.layers.layer import leaf
from mpipipe.nn.stage import Stage


def mean_squared_error(output: Array, target: Array, factor: float = 1.0) -> LossAndGradient:
    """Return the mean of abs(output - target)**2 over all elements, and its gradient.

    Parameters
    ----------
    output : array
        Of any shape but an empty one, and a floating or complex dtype, on the host or a GPU.
    target : array
        Of the same shape. For an output on a GPU it may be on the host: it is uploaded.
    factor : float
        Multiplies the gradient before it is rounded: float16 loses small gradients that do not
        carry a scale.

    Returns
    -------
    value : float, or cupy.ndarray without axes
        The mean, summed in float64, on the side of the output.
    gradient : array
        `factor` * 2 (output - target) / size, of the shape and dtype of `output`: for complex
        numbers dRe + i dIm.

    Examples
    --------
    >>> import numpy as np
    >>> from mpipipe import nn
    >>> nn.mean_squared_error(np.array([1.0, 2.0]), np.array([0.0, 2.0]))
    (0.5, array([1., 0.]))
    """
    if output.shape != target.shape or not output.size:
        message = "mean_squared_error needs a target for each element of the output"
        _check_shapes(message, output, target, output.shape)
    if target.dtype.kind == "c" and output.dtype.kind != "c":
        kinds = f"output {output.dtype}, target {target.dtype}"
        raise ArgumentError(
            "complex targets of real numbers",
            found=kinds,
            expected="real targets, or complex output",
        )
    if type(output) is not np.ndarray or type(target) is not np.ndarray:
        _refuse_masks(output, target)
        fits = arrays.is_device(target) and arrays.is_floating(target.dtype)
        if arrays.is_device(output) and not fits:
            target = arrays.upload(arrays.on_host(target).astype(output.dtype))
    if output.dtype.kind == "c":  # twice as many squares, of real numbers
        if target.dtype != output.dtype:
            target = target.astype(output.dtype)
        parts = arrays.as_reals(output), arrays.as_reals(target)
        value, gradient = kernels.of_array(output).mean_squared_error(*parts, 2 * factor)
        if type(value) is float:
            value = 2 * value
        else:
            value = kernels.of_array(value).scale(value, 2.0)
        return value, gradient.view(output.dtype).reshape(output.shape)
    return kernels.of_array(output).mean_squared_error(output, target, factor)


def softmax_cross_entropy(output: Array, target: Array, factor: float = 1.0) -> LossAndGradient:
    """Return the mean of -log softmax(output)[target] over all rows, in nats, and its gradient.

    Parameters
    ----------
    output : array
        Logits (..., vocab), of any size but 0 and a floating dtype, on the host or a GPU.
    target : array of integers
        (...) in 0 ... vocab - 1. For an output on a GPU it may be on the host: it is uploaded.
    factor : float
        As for `mean_squared_error`.

    Returns
    -------
    value : float, or cupy.ndarray without axes
        The mean, summed in float64, on the side of the output; NaN if a target that was on a GPU is
        out of range.
    gradient : array
        `factor` * (softmax(output) - onehot(target)) / rows, of the shape and dtype of `output`.

    Examples
    --------
    >>> import numpy as np
    >>> from mpipipe import nn
    >>> value, gradient = nn.softmax_cross_entropy(np.zeros((1, 4)), np.array([2]))
    >>> bool(np.isclose(value, np.log(4))), gradient
    (True, array([[ 0.25,  0.25, -0.75,  0.25]]))
    """
    _check_shapes(
        "softmax_cross_entropy needs one target for each row of logits",
        output,
        target,
        output.shape[:-1],
    )
    device = arrays.device_of(output)
    ids = checked_ids(target, output.shape[-1], "softmax_cross_entropy: the target", device)
    kernel = kernels.of_array(output).softmax_cross_entropy
    value, gradient = kernel(rows(output), ids.reshape(-1), factor)
    return value, gradient.reshape(output.shape)


def mean_of_losses(output: Array, target: Array, factor: float = 1.0) -> LossAndGradient:
    """Return the mean of the losses that the last `HeadSlice` gives, and its gradient.

    Parameters
    ----------
    output : array
        Losses (...), not empty, of a floating dtype, on the host or a GPU.
    target : array of integers
        The labels that the slices have taken, (...); values are not compared. On the host a
        negative one is refused: no loss is left out.
    factor : float
        As for `mean_squared_error`.

    Returns
    -------
    value : float, or cupy.ndarray without axes
        The mean, summed in float64, on the side of the output.
    gradient : array
        `factor` / size everywhere, of the shape and dtype of `output`.

    Examples
    --------
    >>> import numpy as np
    >>> from mpipipe import nn
    >>> nn.mean_of_losses(np.array([[1.0, 2.0]]), np.array([[7, 8]]))
    (1.5, array([[0.5, 0.5]]))
    """
    remedy = (
        "build the head of nn.HeadSlice(..., labels=True), or take nn.softmax_cross_entropy "
        "for logits"
    )
    _check_shapes(
        "mean_of_losses needs one loss for each target", output, target, output.shape, remedy
    )
    if target.dtype.kind not in "iu" or (not arrays.is_device(target) and target.min() < 0):
        raise ArgumentError(
            "mean_of_losses counts all losses, and some targets are no labels",
            found=f"targets of {target.dtype}, from {target.min()} on",
            expected="the integers that the slices have taken",
            remedy="to leave positions out, give a loss of your own: it returns the mean of the "
            "others, its gradient, and how many they are as a weight",
        )
    device = arrays.device_of(output)
    gradient = arrays.empty(output.shape, output.dtype, device)
    arrays.fill(gradient, factor / output.size)
    if device == "cpu":
        return float(np.mean(output, dtype=np.float64)), gradient
    of = kernels.of_array(output)
    total = arrays.zeros((1,), np.dtype(np.float64), device)
    of.add_parts(arrays.cast(output.reshape(-1, 1), total.dtype), total)
    return of.scale(total, 1 / output.size).reshape(()), gradient


# Their values are means over all entries of their targets on the host.
for _loss in (mean_squared_error, softmax_cross_entropy, mean_of_losses):
    vars(_loss)["mean_over_entries"] = vars(_loss)["wants_host_targets"] = True


def _refuse_masks(*several: Array) -> None:
    for array in several:
        arrays.refuse_mask(array)


def _check_shapes(
    message: str, output: Array, target: Array, shape: Shape, remedy: str | None = None
) -> None:
    _refuse_masks(output, target)
    if shape != target.shape or not output.size:
        shapes = f"output {output.shape}, target {target.shape}"
        expected = f"a target of shape {shape}, not empty"
        raise ArgumentError(message, found=shapes, expected=expected, remedy=remedy)


# -- Cross-entropy with the product of the head, in tiles of rows: logits never exist as a whole ---
#
#     x (rows, dim)   for each tile of rows:  logits = x W^T  ->  loss, dlogits  ->  dx = dlogits W
#     W (vocab, dim)                          (tile, vocab)       in its place     dW += dlogits^T x
#
# A tile goes all the way, from its rows to its part of dW, before the next one begins. So nothing
# is computed twice: there are three products, as for a head and a loss apart. The cost is traffic:
# each tile reads W twice, and reads and writes dW. A tile of t rows has 6 t operations for each
# element of W, so some hundred rows hide that on a CPU, and some thousand on a GPU. Tiles of the
# vocabulary would read W less often. But the gradient needs the sum over the whole vocabulary
# first, and so the product of the forward a second time: a third more work.
#
# The other price is the order: dW is computed in the forward of the last stage. A schedule that
# splits backwards cannot put it off into its W: there the loss would have to keep dlogits, which is
# what tiles avoid, or compute logits again.


def worth_tiles(stage: Stage, count: int) -> bool:
    """Return whether a stage ends with a head whose logits of `count` rows do not fit a tile."""
    head = leaf(stage.names.chain, -1)
    if not isinstance(head, Head):
        return False
    return count > tile_rows(head.outputs, stage.dtype.itemsize, stage.device)


class HeadCrossEntropy:
    """`softmax_cross_entropy` that makes the product of the `Head` itself, in tiles of rows.

    Give it to the pipeline as its loss. `step` and `evaluate` then never hold more logits than a
    tile; `forward` gives logits as ever. With a single tile, all results have the bits of head and
    `softmax_cross_entropy` apart.

    Parameters
    ----------
    stage : Stage
        The last stage; its last layer is a `Head`, perhaps within a `Sequential`.
    tile : int, optional
        Rows of a tile; by default as many as fit 64 MiB of logits on the host, or 512 MiB on a GPU.

    Examples
    --------
    >>> import numpy as np
    >>> from mpipipe import nn
    >>> stage = nn.Stage([nn.Embedding(50, 8), nn.RMSNorm(8), nn.Head(8, 50)])
    >>> loss, ids = nn.HeadCrossEntropy(stage, tile=4), np.arange(12).reshape(2, 6)
    >>> with loss.taking_over():
    ...     y, saved = stage.forward(ids)
    >>> y.shape, loss(y, ids)[1].shape
    ((2, 6, 8), (2, 6, 8))
    """

    mean_over_entries = wants_host_targets = True

    def __init__(self, stage: Stage, tile: int | None = None):
        head = leaf(stage.names.chain, -1)
        if not isinstance(head, Head):
            raise ArgumentError(
                "the loss cannot take over the head's product",
                found=f"a stage that ends with {type(head).__name__}",
                expected="nn.Head as the last layer",
                remedy="build the model with nn.Head, or use nn.softmax_cross_entropy",
            )
        if tile is not None:
            check_positive(tile=tile)
        self.stage = stage
        self.head = head
        self.tile = tile

    @contextmanager
    def taking_over(self) -> Iterator[None]:
        """Let the stage end before its head within this context.

        Yields
        ------
        None
            The context itself.
        """
        self.stage.names.headless = True
        try:
            yield
        finally:
            self.stage.names.headless = False

    def __call__(
        self, output: Array, target: Array, factor: float = 1.0
    ) -> tuple[float | Array, Array | None]:
        """Return the mean loss over all rows, and its gradient times `factor`.

        The gradient of the head is added to.

        `output` is what the stage puts out before its head, (..., dim); all else is as for
        `softmax_cross_entropy`. Without a training step the gradient is None, and that of the head
        stays as it is, too.
        """
        head = self.head
        device = arrays.device_of(output)
        check_features(head, output, head.inputs)
        _check_shapes(
            "HeadCrossEntropy needs one target for each row", output, target, output.shape[:-1]
        )
        ids = checked_ids(target, head.outputs, "HeadCrossEntropy: the target", device).reshape(-1)
        x = rows(output)
        tile = self.tile or tile_rows(head.outputs, x.dtype.itemsize, device)
        kernels = self.stage.kernels
        total: Any = 0.0
        dx = None
        if self.stage.position.training:
            dx = arrays.empty_like(x)
        for at in tiles(self.stage, len(x), tile):
            share = (at.stop - at.start) / len(x)
            value, part = self._tile(x[at], ids[at], factor * share)
            if dx is not None:
                kernels.copy(part, dx[at])
            if not arrays.is_device(value):
                total += value * share
            elif at.start:
                kernels.accumulate(total, kernels.scale(value, share))
            else:
                total = kernels.scale(value, share)
        return total, None if dx is None else dx.reshape(output.shape)

    def _tile(self, x: Array, ids: Array, factor: float) -> tuple[float | Array, Array | None]:
        """Return the mean loss of some rows, and the gradient of x."""
        head = self.head
        kernels = self.stage.kernels
        logits = kernels.linear(x, head.weight)
        value, dlogits = kernels.softmax_cross_entropy(logits, ids, factor, logits)
        if not self.stage.position.training:
            return value, None
        head.backward_weight((dlogits, x))
        return value, kernels.linear_backward_input(dlogits, head.weight)
