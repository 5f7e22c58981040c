"""Kernels that are bound by memory, beside a plain copy. A rate counts the bytes that must be read and written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np

from mpipipe import arrays, nn
from mpipipe.bench.gpu.rows import Row, normal, seconds

Kernel: TypeAlias = "tuple[str, Callable[[], object], int]"  # its name, a call of it, bytes
GOAL = "near 1"
QUICK = dict(repeats=5, rows=8192, vocab=50304, parameters=1 << 24)


def measure(
    repeats: int = 20,
    rows: int = 65536,
    width: int = 4096,
    vocab: int = 50304,
    parameters: int = 1 << 27,
    dtype: str = "bfloat16",
) -> Iterator[Row]:
    """Yield a row for the copy and one for each kernel."""
    copied = _copy(repeats, rows * width, dtype)
    yield Row(f"copy on the device, {rows * width} elements", copied, "GB/s")
    calls = [*_layers(rows, width, dtype), *_loss(rows // 8 or 1, vocab, dtype), *_optimizer(parameters)]
    for name, call, nbytes in calls:
        yield Row(name, nbytes / seconds(call, repeats) / 1e9, "GB/s", "copy", copied, GOAL)


def _copy(repeats: int, count: int, dtype: str) -> float:
    source = normal((count,), dtype)
    target = arrays.empty_like(source)
    return 2 * source.nbytes / seconds(lambda: arrays.copy_into(target, source), repeats) / 1e9


def _layers(rows: int, width: int, dtype: str) -> Iterator[Kernel]:
    """Yield the kernels of layers."""
    kernels = nn.kernels.of("cuda")
    x, dy, more = (normal((rows, width), dtype, seed) for seed in (1, 2, 4))
    gain = normal((width,), dtype)
    shape, one = f"{dtype} {rows} x {width}", x.nbytes
    scale = kernels.rms_norm(x, gain, 1e-5)[1]
    yield f"rms_norm, {shape}", lambda: kernels.rms_norm(x, gain, 1e-5), 2 * one
    yield f"rms_norm_backward, {shape}", lambda: kernels.rms_norm_backward(dy, x, scale, gain), 3 * one
    yield f"add, {shape}", lambda: kernels.add(x, dy), 3 * one
    yield f"add_rms_norm, {shape}", lambda: kernels.add_rms_norm(x, more, gain, 1e-5), 4 * one
    yield f"rms_norm_backward with a sum, {shape}", lambda: kernels.rms_norm_backward(dy, x, scale, gain, more), 4 * one
    half = normal((rows, width // 2), dtype, 3)
    yield f"swiglu, {shape}", lambda: kernels.swiglu(x), one + half.nbytes
    yield f"swiglu_backward, {shape}", lambda: kernels.swiglu_backward(x, half), 2 * one + 2 * half.nbytes
    wide = arrays.empty((rows, width), arrays.accumulator(x.dtype), "cuda")
    yield f"cast, {shape} to {wide.dtype.name}", lambda: kernels.cast(x, wide), one + wide.nbytes


def _loss(rows: int, vocab: int, dtype: str) -> Iterator[Kernel]:
    """Yield the kernel of the loss."""
    kernels = nn.kernels.of("cuda")
    logits = normal((rows, vocab), dtype, 3)
    ids = arrays.upload(np.random.default_rng(0).integers(0, vocab, rows))
    nbytes = 2 * logits.nbytes  # read once, if a row stays on the chip, and the gradient written
    yield f"softmax_cross_entropy, {dtype} {rows} x {vocab}", lambda: kernels.softmax_cross_entropy(logits, ids), nbytes


def _optimizer(count: int) -> Iterator[Kernel]:
    """Yield the kernels of the optimizer and of clipping."""
    kernels = nn.kernels.of("cuda")
    p, g, m, v = (normal((count,), "float32", seed) for seed in range(4))
    arrays.set_zero(v)
    facts: dict[str, Any] = dict(
        b1=0.9, b2=0.95, eps=1e-8, rate=1e-6, correction1=1.0, correction2=1.0, shrink=1.0, g_scale=1.0
    )
    yield f"adamw, float32 {count}", lambda: kernels.adamw(p, g, m, v, **facts), 7 * p.nbytes
    copy = arrays.empty((count,), arrays.dtype("bfloat16"), "cuda")
    name = f"adamw with a copy in {copy.dtype.name}, float32 {count}"
    yield name, lambda: kernels.adamw(p, g, m, v, copy=copy, **facts), 7 * p.nbytes + copy.nbytes
    yield f"accumulate (sum of tied gradients), float32 {count}", lambda: kernels.accumulate(m, g), 3 * p.nbytes
    pieces = [(0, count)]
    yield f"sums_of_squares, float32 {count}", lambda: kernels.sums_of_squares(g, pieces), g.nbytes
