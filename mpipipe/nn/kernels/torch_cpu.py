"""Kernels for bfloat16 and float16 on the host by PyTorch, which shares the memory of the arrays.

Its oneDNN multiplies halves by the instructions that some processors have for it, sums in float32
and rounds once. The gradient of a weight is the product of one micro-batch, rounded once, added in
float32: its error is 2^-9 of that product in bfloat16, as PyTorch's own. Gelu reads and writes
halves in one pass. All other functions, and all of other dtypes, are those of `host.any_dtype`;
what these round, PyTorch rounds here, to the same bits in less time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import SimpleNamespace
from typing import Any

import torch

from mpipipe import arrays
from mpipipe.arrays import array_of, share_threads, tensor_of
from mpipipe.nn.kernels.host import HostArray, any_dtype

share_threads()
# The functions below take the place of those with their names.
KERNELS = SimpleNamespace(**vars(any_dtype))


def _of_halves(function: Callable[..., object]) -> Callable[..., Any]:
    """Put a function for halves into KERNELS; other dtypes go to that of `any_dtype`."""
    other = getattr(any_dtype, function.__name__)

    @wraps(function)
    def run(first: HostArray, *rest: object, **options: object) -> Any:
        chosen = other
        if first.itemsize == 2:
            chosen = function
        return chosen(first, *rest, **options)

    setattr(KERNELS, function.__name__, run)
    return run


@_of_halves
def linear(x: HostArray, weight: HostArray, bias: HostArray | None = None) -> HostArray:
    """As `Kernels.linear`."""
    of_bias = None
    if bias is not None:
        of_bias = tensor_of(bias)
    return array_of(torch.nn.functional.linear(tensor_of(x), tensor_of(weight), of_bias))


@_of_halves
def linear_backward_input(dy: HostArray, weight: HostArray) -> HostArray:
    """As `Kernels.linear_backward_input`."""
    return array_of(torch.mm(tensor_of(dy), tensor_of(weight)))


@_of_halves
def linear_backward_weight(dy: HostArray, x: HostArray, grad: HostArray) -> None:
    """As `Kernels.linear_backward_weight`; the product is rounded once."""
    tensor_of(grad).add_(torch.mm(tensor_of(dy).t(), tensor_of(x)))


@_of_halves
def add(x: HostArray, y: HostArray) -> HostArray:
    """As `Kernels.add`."""
    return array_of(torch.add(tensor_of(x), tensor_of(y)))


@_of_halves
def gelu(x: HostArray) -> HostArray:
    """As `Kernels.gelu`."""
    return array_of(torch.nn.functional.gelu(tensor_of(x), approximate="tanh"))


@_of_halves
def gelu_backward(dy: HostArray, x: HostArray) -> HostArray:
    """As `Kernels.gelu_backward`."""
    return array_of(torch.ops.aten.gelu_backward(tensor_of(dy), tensor_of(x), approximate="tanh"))


def _round(target: HostArray, values: HostArray) -> None:
    tensor_of(target).copy_(tensor_of(values))


arrays.faster_rounding.update({arrays.dtype(name): _round for name in arrays.HALVES})
