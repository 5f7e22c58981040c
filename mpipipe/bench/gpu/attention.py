"""Attention on one GPU beside NVIDIA's published rates for cuDNN and PyTorch's kernel on the same arrays.

Rates count 4 pairs heads dim operations in a forward and 2.5 times as many in a backward, S^2 / 2 pairs under the
causal mask, as the published ones do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mpipipe import attention
from mpipipe.attention import cost
from mpipipe.bench.gpu.rows import Row, normal, seconds

# TFLOP/s forward and backward by length: cudnn-frontend, benchmark of SDPA on H200, cuDNN 9.19.1, bfloat16, causal, 64
# heads over 8, head dimension 128
PUBLISHED = {2048: (484, 370), 4096: (591, 474), 8192: (644, 541), 16384: (673, 579), 32768: (688, 581)}
OF_PUBLISHED = (64, 8, 128, "bfloat16")
DIRECTIONS = ("forward", "backward")
QUICK = dict(repeats=5, lengths=(8192,))


def measure(
    repeats: int = 20,
    lengths: Sequence[int] = (8192, 32768),
    heads: int = 64,
    kv_heads: int = 8,
    head_dim: int = 128,
    dtype: str = "bfloat16",
    peers: bool = True,
) -> Iterator[Row]:
    """Yield rows for each length and direction; with `peers` also beside PyTorch, where that can use the GPU."""
    sizes = heads, kv_heads, head_dim, dtype
    ours: dict[int, tuple[float, list[tuple[str, float, str]]]] = {}
    for length in lengths:  # all before PyTorch loads another cuDNN
        work = cost.attention_flops(length**2 / 2, heads, head_dim)
        rates = _rates(work, _ours(repeats, length, *sizes))
        ours[length] = work, [
            (f"attention {direction}, {dtype}, {heads} heads over {kv_heads}, dim {head_dim}, sequence {length}", rate,
             "TFLOP/s") for direction, rate in zip(DIRECTIONS, rates)
        ]  # fmt: skip
        published = PUBLISHED.get(length) if sizes == OF_PUBLISHED else None
        for at, row in enumerate(ours[length][1]):
            if published is None:
                yield Row(*row)
            else:
                yield Row(*row, "cuDNN on H200, published", published[at], "at least 0.95")
    torch = torch_with_gpu() if peers else None
    for length, (work, rows) in ours.items() if torch is not None else ():
        for name, times in _pytorch(torch, repeats, length, *sizes):
            for row, rate in zip(rows, _rates(work, times)):
                yield Row(*row, f"PyTorch SDPA, {name}", rate, "at least 1.0")


def _rates(work: float, times: Sequence[float]) -> list[float]:
    """Return TFLOP/s of a forward of so many operations, and of its backward."""
    return [factor * work / each / 1e12 for factor, each in zip((1, cost.BACKWARD_WORK), times)]


def _ours(repeats: int, length: int, heads: int, kv_heads: int, head_dim: int, dtype: str) -> tuple[float, float]:
    """Return the seconds of a forward and of a backward."""
    attend = attention.Local(causal=True)
    counts = (heads, kv_heads, kv_heads, heads)
    q, k, v, dout = (normal((1, length, n, head_dim), dtype, seed) for seed, n in enumerate(counts))
    forward = seconds(lambda: attend.forward(q, k, v), repeats)
    saved = attend.forward(q, k, v)[1]
    return forward, seconds(lambda: attend.backward(dout, saved), repeats)


def torch_with_gpu() -> Any:
    """Return the module torch where it is installed and can use a GPU, else None."""
    try:
        import torch
    except ImportError:
        return None
    return torch if torch.cuda.is_available() else None


def _pytorch(
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
