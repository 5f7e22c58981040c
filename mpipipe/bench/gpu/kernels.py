"""Kernels on one GPU: those that memory bounds, matrix products, and attention."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TypeAlias

import numpy as np

from mpipipe import arrays, attention, nn
from mpipipe.attention import cost
from mpipipe.bench.timing import Call, Row, normal, seconds

# -- Memory ----------------------------------------------------------------------------------------
#
# Kernels that are bound by memory, next to a plain copy. A rate counts the bytes that must be read
# and written.


Kernel: TypeAlias = "tuple[str, Call, int]"  # its name, a call of it, bytes


def measure_memory(
    repeats: int = 20,
    rows: int = 65536,
    width: int = 4096,
    vocab: int = 50304,
    parameters: int = 1 << 27,
    dtype: str = "bfloat16",
) -> Iterator[Row]:
    """Yield a row for the copy and one for each kernel."""
    source = normal((rows * width,), dtype)
    target = arrays.empty_like(source)
    copied = 2 * source.nbytes / seconds(lambda: arrays.copy_into(target, source), repeats) / 1e9
    yield Row(f"copy on the device, {rows * width} elements", copied, "GB/s")
    calls = [
        *_layers(rows, width, dtype),
        *_loss_and_optimizer(rows // 8 or 1, vocab, parameters, dtype),
    ]
    for name, call, nbytes in calls:
        yield Row(name, nbytes / seconds(call, repeats) / 1e9, "GB/s", "copy", copied, "near 1")


def _layers(rows: int, width: int, dtype: str) -> Iterator[Kernel]:
    kernels = nn.kernels.of("cuda")
    x, dy, more = (normal((rows, width), dtype, seed) for seed in (1, 2, 4))
    gain = normal((width,), dtype)
    shape = f"{dtype} {rows} x {width}"
    one = x.nbytes
    given = dy, x, kernels.norm(x, gain, None, 1e-5)[1], gain, False
    yield f"rms_norm, {shape}", lambda: kernels.norm(x, gain, None, 1e-5), 2 * one
    yield f"rms_norm_backward, {shape}", lambda: kernels.norm_backward(*given), 3 * one
    yield (
        f"rms_norm_backward with a sum, {shape}",
        lambda: kernels.norm_backward(*given, more),
        4 * one,
    )
    half = normal((rows, width // 2), dtype, 3)
    yield f"swiglu, {shape}", lambda: kernels.swiglu(x), one + half.nbytes
    yield (
        f"swiglu_backward, {shape}",
        lambda: kernels.swiglu_backward(x, half),
        2 * one + 2 * half.nbytes,
    )
    wide = arrays.empty((rows, width), arrays.accumulator(x.dtype), "cuda")
    yield f"copy, {shape} to {wide.dtype.name}", lambda: kernels.copy(x, wide), one + wide.nbytes


def _loss_and_optimizer(rows: int, vocab: int, count: int, dtype: str) -> Iterator[Kernel]:
    """Yield the kernels of the loss, of the optimizer and of clipping."""
    kernels = nn.kernels.of("cuda")
    logits = normal((rows, vocab), dtype, 3)
    ids = arrays.upload(np.random.default_rng(0).integers(0, vocab, rows))
    nbytes = 2 * logits.nbytes  # read once, if a row stays on the chip, and the gradient written
    yield (
        f"softmax_cross_entropy, {dtype} {rows} x {vocab}",
        lambda: kernels.softmax_cross_entropy(logits, ids),
        nbytes,
    )
    p, g, m, v = (normal((count,), "float32", seed) for seed in range(4))
    arrays.set_zero(v)
    numbers = nn.kernels.AdamWNumbers(
        0.9, 0.95, 1e-8, 1e-6, correction1=1.0, correction2=1.0, shrink=1.0
    )
    copy = arrays.empty((count,), arrays.dtype("bfloat16"), "cuda")
    update = nn.kernels.Update(copy=copy)
    name = f"adamw with a copy in {copy.dtype.name}, float32 {count}"
    yield name, lambda: kernels.adamw(p, g, m, v, numbers, update), 7 * p.nbytes + copy.nbytes
    yield (
        f"sums_of_squares, float32 {count}",
        lambda: kernels.sums_of_squares(g, [(0, count)]),
        g.nbytes,
    )


# -- Attention on one GPU next to NVIDIA's published rates for cuDNN -------------------------------
#
# Rates count 4 pairs heads dim operations in a forward and 2.5 times as many in a backward, S^2 / 2
# pairs under the causal mask, as the published ones do.


# TFLOP/s forward and backward by length: cudnn-frontend, benchmark of SDPA on H200, cuDNN 9.19.1,
# bfloat16, causal, 64 heads over 8, head dimension 128
PUBLISHED = {8192: (644, 541), 32768: (688, 581)}
OF_PUBLISHED = (64, 8, 128, "bfloat16")


def measure_attention(
    repeats: int = 20,
    lengths: Sequence[int] = (8192, 32768),
    heads: int = 64,
    kv_heads: int = 8,
    head_dim: int = 128,
    dtype: str = "bfloat16",
) -> Iterator[Row]:
    """Yield a row for each length and direction."""
    counts = list(enumerate((heads, kv_heads, kv_heads, heads)))
    attend = attention.Local(causal=True)
    for length in lengths:
        *inputs, dout = (normal((1, length, n, head_dim), dtype, seed) for seed, n in counts)
        saved = attend.forward(*inputs)[1]
        work = cost.attention_flops(length**2 / 2, heads, head_dim)
        ways: dict[str, tuple[float, Call]] = {
            "forward": (work, partial(attend.forward, *inputs)),
            "backward": (cost.BACKWARD_WORK * work, partial(attend.backward, dout, saved)),
        }
        what = f"{dtype}, {heads} heads over {kv_heads}, dim {head_dim}, sequence {length}"
        published = None
        if (heads, kv_heads, head_dim, dtype) == OF_PUBLISHED:
            published = PUBLISHED.get(length)
        for at, (way, (operations, call)) in enumerate(ways.items()):
            rate = operations / seconds(call, repeats) / 1e12
            name = f"attention {way}, {what}"
            if published is None:
                yield Row(name, rate, "TFLOP/s")
                continue
            peer = "cuDNN on H200, published", published[at], "at least 0.95"
            yield Row(name, rate, "TFLOP/s", *peer)
