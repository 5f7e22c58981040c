"""Kernels on one GPU: those that memory bounds, matrix products, attention, and a ring without its messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any, TypeAlias

import numpy as np

from mpipipe import arrays, attention, nn
from mpipipe.arrays import DeviceArray, cast
from mpipipe.attention import cost, mask
from mpipipe.attention import kernels as attention_kernels
from mpipipe.attention.kernels import KVBlock, OutLse
from mpipipe.bench.timing import WARMUP, Call, Row, normal, seconds

# -- Memory ------------------------------------------------------------------------------------------------------------
#
# Kernels that are bound by memory, next to a plain copy. A rate counts the bytes that must be read and written.


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
    calls = [*_layers(rows, width, dtype), *_loss_and_optimizer(rows // 8 or 1, vocab, parameters, dtype)]
    for name, call, nbytes in calls:
        yield Row(name, nbytes / seconds(call, repeats) / 1e9, "GB/s", "copy", copied, "near 1")


def _layers(rows: int, width: int, dtype: str) -> Iterator[Kernel]:
    kernels = nn.kernels.of("cuda")
    x, dy, more = (normal((rows, width), dtype, seed) for seed in (1, 2, 4))
    gain = normal((width,), dtype)
    shape, one = f"{dtype} {rows} x {width}", x.nbytes
    given = dy, x, kernels.norm(x, gain, None, 1e-5)[2], gain, False
    yield f"rms_norm, {shape}", lambda: kernels.norm(x, gain, None, 1e-5), 2 * one
    yield f"rms_norm_backward, {shape}", lambda: kernels.norm_backward(*given), 3 * one
    yield f"add, {shape}", lambda: kernels.add(x, dy), 3 * one
    yield f"add_rms_norm, {shape}", lambda: kernels.norm(x, gain, None, 1e-5, more), 4 * one
    yield f"rms_norm_backward with a sum, {shape}", lambda: kernels.norm_backward(*given, more), 4 * one
    half = normal((rows, width // 2), dtype, 3)
    yield f"swiglu, {shape}", lambda: kernels.swiglu(x), one + half.nbytes
    yield f"swiglu_backward, {shape}", lambda: kernels.swiglu_backward(x, half), 2 * one + 2 * half.nbytes
    wide = arrays.empty((rows, width), arrays.accumulator(x.dtype), "cuda")
    yield f"cast, {shape} to {wide.dtype.name}", lambda: kernels.cast(x, wide), one + wide.nbytes


def _loss_and_optimizer(rows: int, vocab: int, count: int, dtype: str) -> Iterator[Kernel]:
    """Yield the kernels of the loss, of the optimizer and of clipping."""
    kernels = nn.kernels.of("cuda")
    logits = normal((rows, vocab), dtype, 3)
    ids = arrays.upload(np.random.default_rng(0).integers(0, vocab, rows))
    nbytes = 2 * logits.nbytes  # read once, if a row stays on the chip, and the gradient written
    yield f"softmax_cross_entropy, {dtype} {rows} x {vocab}", lambda: kernels.softmax_cross_entropy(logits, ids), nbytes
    p, g, m, v = (normal((count,), "float32", seed) for seed in range(4))
    arrays.set_zero(v)
    numbers = nn.kernels.AdamWNumbers(0.9, 0.95, 1e-8, 1e-6, correction1=1.0, correction2=1.0, shrink=1.0)
    yield f"adamw, float32 {count}", lambda: kernels.adamw(p, g, m, v, numbers), 7 * p.nbytes
    copy = arrays.empty((count,), arrays.dtype("bfloat16"), "cuda")
    update = nn.kernels.Update(copy=copy)
    name = f"adamw with a copy in {copy.dtype.name}, float32 {count}"
    yield name, lambda: kernels.adamw(p, g, m, v, numbers, update), 7 * p.nbytes + copy.nbytes
    yield f"accumulate (sum of tied gradients), float32 {count}", lambda: kernels.accumulate(m, g), 3 * p.nbytes
    yield f"sums_of_squares, float32 {count}", lambda: kernels.sums_of_squares(g, [(0, count)]), g.nbytes


# -- Matrix products of a GPT's layers: cublasLt's fastest proposal next to cuBLAS's own choice ------------------------


def measure_products(
    repeats: int = 20, rows: int = 8192, dim: int = 768, hidden: int = 2048, vocab: int = 50304, dtype: str = "bfloat16"
) -> Iterator[Row]:
    """Yield a row for each product of each linear layer: forward, gradient of the input, gradient of the weight."""
    both = find_spec("nvmath") is not None and not arrays.is_amd()
    for name, inputs, outputs in (("qkv", dim, 3 * dim), ("up", dim, 2 * hidden), ("head", dim, vocab)):
        x, dy = normal((rows, inputs), dtype, 1), normal((rows, outputs), dtype, 2)
        weight = normal((outputs, inputs), dtype, 3)
        grad = arrays.zeros((outputs, inputs), arrays.accumulator(x.dtype), "cuda")
        y, dx = arrays.empty_like(dy), arrays.empty_like(x)
        calls: tuple[tuple[str, DeviceArray, DeviceArray, DeviceArray, dict], ...] = (
            ("forward", x, weight, y, dict(transpose_b=True)),
            ("input gradient", dy, weight, dx, {}),
            ("weight gradient", dy, x, grad, dict(transpose_a=True, add=True)),
        )
        for what, a, b, c, options in calls:
            rates = {}
            for library in ("cublas", "cublaslt") if both else ("cublas",):
                with arrays.products_by(library):
                    taken = seconds(partial(arrays.gemm, a, b, c, **options), repeats)
                rates[library] = 2 * rows * inputs * outputs / taken / 1e12
            title = f"product of {name}, {what}, {x.dtype.name} {rows} x {inputs} x {outputs}"
            if both:
                beside, goal = ("cuBLAS", rates["cublas"]), "not below 1: then the default stays"
                yield Row(f"{title}, by cublasLt", rates["cublaslt"], "TFLOP/s", *beside, goal)
            else:
                yield Row(f"{title}, by cuBLAS", rates["cublas"], "TFLOP/s", goal="no nvmath: cublasLt not measured")


# -- Attention on one GPU next to NVIDIA's published rates for cuDNN and PyTorch's kernel on the same arrays -----------
#
# Rates count 4 pairs heads dim operations in a forward and 2.5 times as many in a backward, S^2 / 2 pairs under the
# causal mask, as the published ones do.


# TFLOP/s forward and backward by length: cudnn-frontend, benchmark of SDPA on H200, cuDNN 9.19.1, bfloat16, causal, 64
# heads over 8, head dimension 128
PUBLISHED = {2048: (484, 370), 4096: (591, 474), 8192: (644, 541), 16384: (673, 579), 32768: (688, 581)}
OF_PUBLISHED = (64, 8, 128, "bfloat16")


def measure_attention(
    repeats: int = 20,
    lengths: Sequence[int] = (8192, 32768),
    heads: int = 64,
    kv_heads: int = 8,
    head_dim: int = 128,
    dtype: str = "bfloat16",
    peers: bool = True,
) -> Iterator[Row]:
    """Yield rows for each length and direction; with `peers` also next to PyTorch, where that can use the GPU."""
    sizes = heads, kv_heads, head_dim, dtype
    ours: dict[int, tuple[float, list[tuple[str, float, str]]]] = {}
    for length in lengths:  # all before PyTorch loads another cuDNN
        work = cost.attention_flops(length**2 / 2, heads, head_dim)
        rates = _rates(work, _alone(repeats, _whole(length, *sizes)))
        what = f"{dtype}, {heads} heads over {kv_heads}, dim {head_dim}, sequence {length}"
        directions = zip(("forward", "backward"), rates)
        ours[length] = work, [(f"attention {way}, {what}", rate, "TFLOP/s") for way, rate in directions]
        published = PUBLISHED.get(length) if sizes == OF_PUBLISHED else None
        for at, row in enumerate(ours[length][1]):
            if published is None:
                yield Row(*row)
            else:
                yield Row(*row, "cuDNN on H200, published", published[at], "at least 0.95")
    torch = torch_with_gpu() if peers else None
    for length, (work, rows) in ours.items() if torch is not None else ():
        for name, times in _pytorch_attention(torch, repeats, length, *sizes):
            for row, rate in zip(rows, _rates(work, times)):
                yield Row(*row, f"PyTorch SDPA, {name}", rate, "at least 1.0")


def _rates(work: float, times: Sequence[float]) -> list[float]:
    """Return TFLOP/s of a forward of `work` operations, and of its backward."""
    return [factor * work / each / 1e12 for factor, each in zip((1, cost.BACKWARD_WORK), times)]


def _whole(length: int, heads: int, kv_heads: int, head_dim: int, dtype: str) -> list[DeviceArray]:
    """Return q, k, v and the gradient of the output."""
    counts = (heads, kv_heads, kv_heads, heads)
    return [normal((1, length, n, head_dim), dtype, seed) for seed, n in enumerate(counts)]


def _alone(repeats: int, whole: Sequence[DeviceArray], warmup: int = WARMUP) -> tuple[float, float]:
    """Return the seconds of forward and backward of one kernel over the whole sequence."""
    *inputs, dout = whole
    attend = attention.Local(causal=True)
    forward = seconds(lambda: attend.forward(*inputs), repeats, warmup)
    saved = attend.forward(*inputs)[1]
    return forward, seconds(lambda: attend.backward(dout, saved), repeats, warmup)


def torch_with_gpu() -> Any:
    """Return the module torch where it is installed and can use a GPU, else None."""
    try:
        import torch
    except ImportError:
        return None
    return torch if torch.cuda.is_available() else None


def _pytorch_attention(
    torch: Any, repeats: int, length: int, heads: int, kv_heads: int, head_dim: int, dtype: str
) -> Iterator[tuple[str, tuple[float, float]]]:
    """Yield the name and the seconds of both directions, for each fused kernel of PyTorch that does the same."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    from mpipipe.bench.torch_gpt import device_seconds

    def made(count: int) -> Any:
        shape = 1, count, length, head_dim  # the order that it likes best
        return torch.randn(shape, dtype=getattr(torch, dtype), device="cuda", requires_grad=True)

    q, k, v = made(heads), made(kv_heads), made(kv_heads)
    dout = torch.randn_like(q)
    for name, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("cuDNN", SDPBackend.CUDNN_ATTENTION)):

        def forward(backend: Any = backend) -> Any:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        try:
            out = forward()
        except RuntimeError:  # not in this build, or not for these arrays
            continue
        backward = lambda out=out: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)  # noqa: E731
        yield name, (device_seconds(forward, repeats), device_seconds(backward, repeats))


# -- Ring --------------------------------------------------------------------------------------------------------------
#
# A ring whose ranks take turns on one GPU: what blocks and merging cost next to one kernel over the whole sequence.
# Every rank computes its steps as attention.Ring does, with all blocks at hand: no messages are in the sum.


def measure_ring(
    repeats: int = 3,
    ranks: int = 8,
    length: int = 8192,
    heads: int = 64,
    kv_heads: int = 8,
    head_dim: int = 128,
    dtype: str = "bfloat16",
) -> Iterator[Row]:
    """Yield the time of one kernel over the sum of the ranks' times, forward and both ways, and the ranks' balance."""
    whole = _whole(ranks * length, heads, kv_heads, head_dim, dtype)
    forward, backward = _alone(repeats, whole, 1)
    ring = [_VirtualRank(rank, ranks, length, whole) for rank in range(ranks)]
    forwards = [seconds(rank.forward, repeats, 1) for rank in ring]
    both = [one + seconds(rank.backward, repeats, 1) for rank, one in zip(ring, forwards)]
    what = f"{dtype}, virtual ring of {ranks} x {length}, zigzag"
    for name, value, goal in (
        ("one kernel over the ranks' sum, forward", forward / sum(forwards), 0.92),
        ("one kernel over the ranks' sum, forward and backward", (forward + backward) / sum(both), 0.94),
        ("mean rank over the slowest", sum(both) / ranks / max(both), 0.95),
    ):
        yield Row(f"{name}, {what}", value, "", goal=f"at least {goal}")


class _VirtualRank:
    """The computation of one rank of a causal ring, with its local length, over q, k, v and dout of all ranks.

    Any values do, so shards are consecutive pieces.
    """

    def __init__(self, rank: int, ranks: int, length: int, whole: Sequence[DeviceArray]) -> None:
        layout = attention.Layout("zigzag", ranks, ranks * length)
        pieces = [[array[:, start * length : (start + 1) * length] for start in range(ranks)] for array in whole]
        self.q, self.dout = pieces[0][rank], pieces[3][rank]
        order = [(rank - step) % ranks for step in range(ranks)]
        self.steps = [(pieces[1][block], pieces[2][block], layout.needs(rank, block)) for block in order]
        own = self.steps[0]
        self.kernel = attention_kernels.chosen(self.q, *own[:2])
        self.scale, self.kind = self.q.shape[3] ** -0.5, arrays.accumulator(self.q.dtype)
        self.overwrite = mask.each_row_once(own[2], length)
        self.message = [arrays.empty_like(x) for x in own[:2]]
        self.received = [arrays.empty_like(x, self.kind) for x in own[:2]]

    def forward(self) -> None:
        """Run all steps, and keep the result for the backward."""
        for place, x in zip(self.message, self.steps[0][:2]):
            arrays.strided_copy(x, place)
        result = self.kernel.make_accumulator(self.q, self.steps[0][1], self.overwrite)
        for k, v, slices in self.steps:
            result.attend(KVBlock(self.q, k, v, self.scale, slices))
        self.out, self.lse = result.end()

    def backward(self) -> list[DeviceArray]:
        """Run all steps, and return dq, dk and dv.

        In a ring the gradients of keys and values would travel on; here they are summed over this rank's steps.
        """
        dq = arrays.zeros(self.q.shape, self.kind, "cuda")
        for step, (k, v, slices) in enumerate(reversed(self.steps)):
            block = KVBlock(self.q, k, v, self.scale, slices)
            own = self.kernel.block_gradients(block, self.dout, OutLse(self.out, self.lse), dq)
            for sums, part in zip(self.received, own):
                arrays.strided_copy(part, sums, add=step > 0)
        return [cast(x, self.q.dtype) for x in (dq, *self.received)]
