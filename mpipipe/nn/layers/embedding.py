"""Token embedding."""

from __future__ import annotations

import numpy as np

from mpipipe import arrays
from mpipipe.errors import ArgumentError
from mpipipe.nn.layers.layer import Layer, check_positive
from mpipipe.nn.parameters import Parameter, normal


class Embedding(Layer):
    """Row x of a (vocab, dim) table for each integer x: shape (...) to (..., dim). dx is None.

    Integers on the host are checked, and then uploaded where the stage is on a GPU; nothing waits for those that come
    from there, so an id outside the table gives a row of NaN.

    Parameters
    ----------
    vocab, dim : sizes of the table
    tie : key of Parameter.tie; a Linear(dim, vocab, bias=False) with the same key is the matching head
    gain : the table starts normal with standard deviation gain / sqrt(dim), as the weight of that Linear does
    """

    weight: np.ndarray
    weight_grad: np.ndarray

    def __init__(self, vocab: int, dim: int, tie: str | None = None, gain: float = 1.0):
        check_positive(vocab=vocab, dim=dim)
        self.vocab, self.dim = vocab, dim
        self.declared = {"weight": Parameter((vocab, dim), normal(gain * dim**-0.5), tie=tie)}

    def forward(self, x):
        x = device_integers(x, self.vocab, f"layer {self.name} (Embedding): the input", self.stage.device)
        return self.stage.kernels.embed(self.weight, x), x

    def backward_input(self, dy, saved):
        return None, (dy, saved)

    def backward_weight(self, pending):
        dy, x = pending
        self.stage.kernels.embed_backward(dy, x, self.weight_grad)


def device_integers(x, limit: int, what: str, device: str):
    """Integers in 0 ... limit - 1 on `device`, with those on the host checked before they are uploaded as int64."""
    check_integers(x, limit, what)
    return arrays.upload(x.astype(np.int64)) if device == "cuda" and not arrays.is_device(x) else x


def check_integers(x, limit: int, what: str) -> None:
    """Raise ArgumentError unless x is an array of integers, and those on the host are in 0 ... limit - 1."""
    if x.dtype.kind not in "iu":
        raise ArgumentError(f"{what} must be integers", found=str(x.dtype), expected=f"integers in 0 ... {limit - 1}")
    if not arrays.is_device(x) and x.size and (x.min() < 0 or x.max() >= limit):
        raise ArgumentError(
            f"{what} is out of range",
            found=f"{x.min()} ... {x.max()}",
            expected=f"0 ... {limit - 1}",
            remedy="check the data against the size of the vocabulary",
        )
