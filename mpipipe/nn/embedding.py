"""Token embedding."""

from __future__ import annotations

import numpy as np

from mpipipe.errors import ArgumentError
from mpipipe.nn.blocks import rows
from mpipipe.nn.layer import Layer, check_positive
from mpipipe.nn.parameters import Parameter, normal


class Embedding(Layer):
    """Row x of a (vocab, dim) table for each integer x: shape (...) to (..., dim). dx is None.

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
        check_integers(x, self.vocab, f"layer {self.name} (Embedding): the input")
        return np.take(self.weight, x, axis=0, mode="clip"), x

    def backward_input(self, dy, saved):
        return None, (dy, saved)

    def backward_weight(self, pending):
        dy, x = pending
        if x.size == 0:
            return
        ids = x.reshape(-1)
        order = np.argsort(ids, kind="stable")  # equal ids side by side, in the order of their rows
        ids = ids[order]
        starts = np.flatnonzero(np.concatenate(([True], ids[1:] != ids[:-1])))
        self.weight_grad[ids[starts]] += np.add.reduceat(rows(dy)[order], starts, axis=0)


def check_integers(x, limit: int, what: str) -> None:
    """Raise ArgumentError unless x is an array of integers in 0 ... limit - 1."""
    if x.dtype.kind not in "iu":
        raise ArgumentError(f"{what} must be integers", found=str(x.dtype), expected=f"integers in 0 ... {limit - 1}")
    if x.size and (x.min() < 0 or x.max() >= limit):
        raise ArgumentError(
            f"{what} is out of range",
            found=f"{x.min()} ... {x.max()}",
            expected=f"0 ... {limit - 1}",
            remedy="check the data against the size of the vocabulary",
        )
