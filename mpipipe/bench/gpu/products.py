"""Matrix products of a GPT's layers: cublasLt's fastest proposal beside cuBLAS's own choice."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec

from mpipipe import arrays
from mpipipe.arrays import DeviceArray, gemm
from mpipipe.bench.gpu.rows import Row, normal, seconds

QUICK = dict(repeats=5, rows=1024, dim=256, hidden=512, vocab=1024)
GOAL = "not below 1: then the default stays"


def measure(
    repeats: int = 20, rows: int = 8192, dim: int = 768, hidden: int = 2048, vocab: int = 50304, dtype: str = "bfloat16"
) -> Iterator[Row]:
    """Yield a row for each product of each linear layer: forward, gradient of the input, gradient of the weight."""
    both = find_spec("nvmath") is not None and not arrays.is_amd()
    for name, inputs, outputs in (("qkv", dim, 3 * dim), ("up", dim, 2 * hidden), ("head", dim, vocab)):
        x, dy = normal((rows, inputs), dtype, 1), normal((rows, outputs), dtype, 2)
        weight = normal((outputs, inputs), dtype, 3)
        grad = arrays.zeros((outputs, inputs), arrays.accumulator(x.dtype), "cuda")
        y, dx = arrays.empty_like(dy), arrays.empty_like(x)
        products: tuple[tuple[str, DeviceArray, DeviceArray, DeviceArray, dict], ...] = (
            ("forward", x, weight, y, dict(transpose_b=True)),
            ("input gradient", dy, weight, dx, {}),
            ("weight gradient", dy, x, grad, dict(transpose_a=True, add=True)),
        )
        for what, a, b, c, options in products:
            rates = {}
            for library in ("cublas", "cublaslt") if both else ("cublas",):
                with gemm.products_by(library):
                    taken = seconds(partial(gemm.gemm, a, b, c, **options), repeats)
                rates[library] = 2 * rows * inputs * outputs / taken / 1e12
            title = f"product of {name}, {what}, {x.dtype.name} {rows} x {inputs} x {outputs}"
            if both:
                yield Row(f"{title}, by cublasLt", rates["cublaslt"], "TFLOP/s", "cuBLAS", rates["cublas"], GOAL)
            else:
                yield Row(f"{title}, by cuBLAS", rates["cublas"], "TFLOP/s", goal="no nvmath: cublasLt not measured")
