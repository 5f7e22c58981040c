"""Normalisation of rows on a GPU; nn/norm.py has the formulas."""

from __future__ import annotations

import numpy as np

from mpipipe import arrays
from mpipipe.nn.kernels.cuda.launch import FOLDER, MOST_BLOCKS, check_alike, check_contiguous, scalar, word
from mpipipe.nn.kernels.cuda.linear import add_columns

NORM = FOLDER / "norm.cu"
KEPT = 4  # words of a row that one thread keeps in registers
SHARED = (32, 64, 128, 256)  # threads that may share a row so
LONG = 512  # threads that share a row too long for that
PER_BLOCK = 128  # threads of a block of several rows
THREADS = 132 * 512  # for one pass of a backward: fixed, so that sums do not depend on the GPU


def _facts(x, *others) -> dict:
    """The constants that norm.cu is compiled for."""
    width = word(x, *others, divides=x.shape[1])
    words = x.shape[1] // width
    threads = next((n for n in SHARED if words <= n * KEPT), 0)
    if not threads:
        return {"T": x.dtype, "V": width, "G": LONG, "K": 0}
    return {"T": x.dtype, "V": width, "G": threads, "K": -(-words // threads)}


def _shape(threads: int) -> tuple[int, int]:
    return (threads, PER_BLOCK // threads if threads == 32 else 1)


def _forward(name, x, *others, eps):
    check_contiguous(name, x, *others)
    rows, width = x.shape
    y, scale = arrays.empty_like(x), arrays.empty((rows,), arrays.accumulator(x.dtype), "cuda")
    if x.size:
        facts = _facts(x, y, *others)
        block = _shape(facts["G"])
        args = (x, *others, y, scale, np.int64(rows), np.int32(width), scalar(x.dtype)(eps))
        arrays.cuda_function(NORM, name, **facts)((min(-(-rows // block[1]), MOST_BLOCKS),), block, args)
    return y, scale


def _backward(name, dy, x, scale, gain, count):
    """dx, and `count` gradients of vectors: one row of partial sums for each block, and then the sums of those."""
    check_alike(name, dy, x)
    check_contiguous(name, gain)
    rows, width = x.shape
    dx = arrays.empty_like(x)
    grads = [arrays.zeros((width,), scale.dtype, "cuda") for _ in range(count)] if not x.size else []
    if x.size:
        facts = _facts(x, dy, dx, gain)
        block = _shape(facts["G"])
        blocks = min(-(-rows // block[1]), THREADS // (block[0] * block[1]))
        parts = [arrays.empty((blocks, width), scale.dtype, "cuda") for _ in range(count)]
        args = (dy, x, scale, gain, dx, *parts, np.int64(rows), np.int32(width))
        arrays.cuda_function(NORM, name, **facts)((blocks,), block, args)
        for part in parts:
            grads.append(arrays.empty((width,), scale.dtype, "cuda"))
            add_columns(part, grads[-1], False)
    return (dx, *grads)


def rms_norm(x, gain, eps: float):
    """(y, scale): y = gain * x * scale, scale = 1 / sqrt(mean(x^2) + eps) of each row."""
    return _forward("rms_norm", x, gain, eps=eps)


def rms_norm_backward(dy, x, scale, gain):
    """(dx, dgain)."""
    return _backward("rms_norm_backward", dy, x, scale, gain, 1)


def layer_norm(x, gain, bias, eps: float):
    """(y, scale): y = gain * (x - mean) * scale + bias, scale = 1 / sqrt(variance + eps) of each row."""
    return _forward("layer_norm", x, gain, bias, eps=eps)


def layer_norm_backward(dy, x, scale, gain):
    """(dx, dgain, dbias)."""
    return _backward("layer_norm_backward", dy, x, scale, gain, 2)
