"""Cross-entropy with the product of the head, in tiles of rows: logits never exist as a whole.

    x (rows, dim)     for each tile of rows:   logits = x W^T   ->   loss, dlogits   ->   dx = dlogits W
    W (vocab, dim)                             (tile, vocab)          in its place        dW += dlogits^T x

A tile goes all the way, from its rows to its part of dW, before the next one begins. So nothing is computed twice:
there are three products, as for a head and a loss apart. The cost is traffic: each tile reads W twice, and reads and
writes dW. A tile of t rows has 6 t operations for each element of W, so some hundred rows hide that on a CPU, and some
thousand on a GPU. Tiles of the vocabulary would read W less often. But the gradient needs the sum over the whole
vocabulary first, and so the product of the forward a second time: a third more work.

The other price is the order: dW is computed in the forward of the last stage. A schedule that splits backwards cannot
put it off into its W: there the loss would have to keep dlogits, which is what tiles avoid, or compute logits again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mpipipe import arrays
from mpipipe.arrays import Array
from mpipipe.errors import ArgumentError
from mpipipe.nn.cache_blocks import rows
from mpipipe.nn.checks import check_features, check_positive, checked_ids
from mpipipe.nn.layers.head import Head
from mpipipe.nn.layers.layer import last_leaf
from mpipipe.nn.stage import Stage

TILE_BYTES = {"cpu": 64 << 20, "cuda": 512 << 20}  # of logits; see the costs above


def tile_rows(vocab: int, itemsize: int, device: str) -> int:
    """Return how many rows of logits make a tile of about `TILE_BYTES`, at least 1."""
    return max(1, TILE_BYTES[device] // (vocab * itemsize))


def worth_tiles(stage: Stage, count: int) -> bool:
    """Return whether a stage ends with a head whose logits of `count` rows do not fit a tile."""
    head = last_leaf(stage.layers[-1]) if stage.layers else None
    return isinstance(head, Head) and count > tile_rows(head.outputs, stage.dtype.itemsize, stage.device)


class HeadCrossEntropy:
    """`softmax_cross_entropy` of logits that a `Head` would have made, with the product of the head, in tiles of rows.

    Give it to the pipeline as its loss. `step` and `evaluate` then never hold more logits than a tile; `forward` gives
    logits as ever. With a single tile, all results have the bits of head and `softmax_cross_entropy` apart.

    Parameters
    ----------
    stage : Stage
        The last stage; its last layer is a `Head`, perhaps within a `Sequential`.
    tile : int, optional
        Rows of a tile; by default as many as fit 64 MiB of logits on the host, or 512 MiB on a GPU.

    Raises
    ------
    ArgumentError
        The last layer is no `Head`, or `tile` is no positive integer.

    Examples
    --------
    >>> import numpy as np
    >>> from mpipipe import Pipeline, nn, schedules
    >>> from mpipipe.comm import inprocess
    >>> stage = nn.Stage([nn.Embedding(50, 8), nn.RMSNorm(8), nn.Head(8, 50)])
    >>> ids = np.arange(12).reshape(2, 6)
    >>> def on_each_rank(comm):
    ...     loss = nn.HeadCrossEntropy(stage, tile=4)
    ...     with Pipeline([stage], schedules.gpipe(1, 2), comm, loss=loss) as pipeline:
    ...         return pipeline.step(ids, ids).loss, pipeline.forward(ids).shape
    >>> [(loss, shape)] = inprocess.run(1, on_each_rank)
    >>> bool(loss > 0), shape
    (True, (2, 6, 50))
    """

    mean_over_entries = True

    def __init__(self, stage: Stage, tile: int | None = None):
        head = last_leaf(stage.layers[-1]) if stage.layers else None
        if not isinstance(head, Head):
            raise ArgumentError(
                "the loss cannot take over the head's product",
                found=f"a stage that ends with {type(head).__name__}",
                expected="nn.Head as the last layer",
                remedy="build the model with nn.Head, or use nn.softmax_cross_entropy",
            )
        if tile is not None:
            check_positive(tile=tile)
        self.stage, self.head, self.tile = stage, head, tile

    @contextmanager
    def taking_over(self) -> Iterator[None]:
        """Within this context the stage ends before its head. A pipeline does that around each call with a loss.

        Yields
        ------
        None
            The context itself.
        """
        self.stage.headless = True
        try:
            yield
        finally:
            self.stage.headless = False

    def __call__(self, output: Array, target: Array, factor: float = 1.0) -> tuple[Any, Array | None]:
        """Return the mean loss over all rows, and its gradient times `factor`; add to the gradient of the head.

        Parameters
        ----------
        output : array
            What the stage puts out before its head, (..., dim).
        target : array of integers
            (...) in 0 ... vocab - 1. For an output on a GPU it may be on the host: it is uploaded.
        factor : float
            Multiplies the gradients before they are rounded.

        Returns
        -------
        value : float, or cupy.ndarray without axes
            As from `softmax_cross_entropy`.
        gradient : array or None
            Of the shape and dtype of `output`; None if the stage is not in a training step: then the gradient of the
            head stays as it is, too.

        Raises
        ------
        ArgumentError
            As from `softmax_cross_entropy`.
        """
        head, device = self.head, arrays.device_of(output)
        check_features(head, output, head.inputs)
        if output.shape[:-1] != target.shape or not target.size:
            raise ArgumentError(
                "HeadCrossEntropy needs one target for each row",
                found=f"output {output.shape}, targets {target.shape}",
                expected="output (..., dim) and targets (...), not empty",
            )
        ids = checked_ids(target, head.outputs, "HeadCrossEntropy: the target", device).reshape(-1)
        x = rows(output)
        tile = self.tile or tile_rows(head.outputs, x.dtype.itemsize, device)
        if tile >= len(x):
            value, dx = self._tile(x, ids, factor)
        else:
            value, dx = self._tiles(x, ids, factor, tile)
        return value, None if dx is None else dx.reshape(output.shape)

    def _tiles(self, x: Array, ids: Array, factor: float, tile: int) -> tuple[Any, Array | None]:
        """Go through all rows tile by tile."""
        kernels, poll = self.stage.kernels, self.stage.poll
        dx = arrays.empty(x.shape, x.dtype, self.stage.device) if self.stage.position.training else None
        total: Any = None
        for start in range(0, len(x), tile):
            at = slice(start, min(start + tile, len(x)))
            share = (at.stop - start) / len(x)
            value, part = self._tile(x[at], ids[at], factor * share)
            if dx is not None:
                kernels.copy(part, dx[at])
            value = self._scaled(value, share)
            if total is None:
                total = value
            elif arrays.is_device(total):
                kernels.accumulate(total, value)
            else:
                total += value
            if poll is not None:
                poll()
        return total, dx

    def _tile(self, x: Array, ids: Array, factor: float) -> tuple[Any, Array | None]:
        """Return the mean loss of some rows, and the gradient of x; logits are gone when this returns."""
        head, kernels = self.head, self.stage.kernels
        logits = kernels.linear(x, head.weight)
        value, dlogits = kernels.softmax_cross_entropy(logits, ids, factor, logits)
        if not self.stage.position.training:
            return value, None
        head.backward_weight((dlogits, x))
        return value, kernels.linear_backward_input(dlogits, head.weight)

    def _scaled(self, value: Any, factor: float) -> Any:
        """Return a loss times a factor, on the host or on a GPU."""
        if factor == 1:
            return value
        return self.stage.kernels.scale(value, factor) if arrays.is_device(value) else value * factor
