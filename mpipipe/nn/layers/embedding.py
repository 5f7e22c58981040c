"""Token embedding."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpipipe.arrays import Array
from mpipipe.nn.checks import check_positive, checked_ids
from mpipipe.nn.layers.layer import Layer
from mpipipe.nn.parameters import Parameter, normal


class Embedding(Layer):
    """Row x of a (vocab, dim) table for each integer x: (...) to (..., dim). There is no gradient of x.

    Integers on the host are checked before they are uploaded to a stage on a GPU. Nothing waits for integers that come
    from the GPU: there an id outside the table gives a row of NaN.

    Parameters
    ----------
    vocab, dim : int
        Sizes of the table, the parameter `weight`.
    tie : str, optional
        Key of `Parameter.tie`. A `Linear(dim, vocab, bias=False)` with the same key is the matching head.
    gain : float
        The table starts normal with standard deviation gain / sqrt(dim), as the weight of that Linear does.
    scale : float
        Factor on the rows that come out.

    Raises
    ------
    ArgumentError
        A size is not a positive integer; in `forward`, x has no integers, or one on the host is out of range.

    Examples
    --------
    >>> import numpy as np
    >>> from mpipipe import nn
    >>> stage = nn.Stage([nn.Embedding(256, 8)])
    >>> y, saved = stage.forward(np.array([[1, 2, 3]]))
    >>> y.shape
    (1, 3, 8)
    """

    uploads_integers = True
    recordable = True

    weight: np.ndarray
    weight_grad: np.ndarray

    def __init__(self, vocab: int, dim: int, tie: str | None = None, gain: float = 1.0, scale: float = 1.0):
        check_positive(vocab=vocab, dim=dim)
        self.vocab, self.dim, self.scale = vocab, dim, scale
        self.declared = {"weight": Parameter((vocab, dim), normal(gain * dim**-0.5), tie=tie)}

    def forward(self, x: Array) -> tuple[Array, Any]:
        x = self.upload(x)
        y = self.stage.kernels.embed(self.weight, x)
        return (y if self.scale == 1 else self.stage.kernels.scale(y, self.scale, out=y)), x

    def upload(self, x: Array) -> Array:
        return checked_ids(x, self.vocab, f"layer {self.name} (Embedding): the input", self.stage.device)

    def backward_input(self, dy: Array, saved: Any) -> tuple[None, Any]:
        return None, (dy, saved)

    def backward_weight(self, pending: Any) -> None:
        dy, x = pending
        if self.weight_grad is None:
            return
        if self.scale != 1:
            dy = self.stage.kernels.scale(dy, self.scale)
        self.stage.kernels.embed_backward(dy, x, self.weight_grad)
