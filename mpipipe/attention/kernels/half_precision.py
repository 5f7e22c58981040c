"""Half precision for kernels that compute in float32 or float64: upcast the arguments once, round the results once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import TypeVar, cast

import numpy as np

from mpipipe.arrays import aligned_empty, is_half
from mpipipe.attention.kernels.interface import Block, Gradients, Result

FLOAT32 = np.dtype(np.float32)
Function = TypeVar("Function", bound=Callable[..., None])


def upcast_forward(forward: Function) -> Function:
    """Let a kernel's `forward` for host arrays take half precision."""

    @wraps(forward)
    def wide(block: Block, result: Result, overwrite: bool) -> None:
        if not is_half(block.q.dtype):
            return forward(block, result, overwrite)
        out = _wide_like(result.out)
        forward(_wide_block(block), result._replace(out=out), overwrite)
        _round(out, result.out)

    return cast(Function, wide)


def upcast_backward(backward: Function) -> Function:
    """Let a kernel's `backward` for host arrays take half precision."""

    @wraps(backward)
    def wide(block: Block, dout: np.ndarray, result: Result, gradients: Gradients, overwrite: bool = False) -> None:
        if not is_half(block.q.dtype):
            return backward(block, dout, result, gradients, overwrite)
        sums = Gradients(*map(_wide_like, gradients))
        result = result._replace(out=_upcast(result.out))
        backward(_wide_block(block), _upcast(dout), result, sums, overwrite)
        for one, target in zip(sums, gradients):
            _round(one, target)

    return cast(Function, wide)


def _wide_block(block: Block) -> Block:
    return replace(block, q=_upcast(block.q), k=_upcast(block.k), v=_upcast(block.v))


def _upcast(x: np.ndarray) -> np.ndarray:
    return x.astype(FLOAT32) if is_half(x.dtype) else x


def _wide_like(target: np.ndarray) -> np.ndarray:
    """Memory in float32 for a result; the target itself if it is wide already. Halves are only set, never added to."""
    return aligned_empty(target.shape, FLOAT32) if is_half(target.dtype) else target


def _round(found: np.ndarray, target: np.ndarray) -> None:
    if found is not target:
        target[...] = found
