"""python -m mpipipe.gpu_check.attention: asks the real cuDNN for attention of sizes that models have.

It prints which kernel computes attention, and the errors of a forward and a backward against numpy in float32. It exits
with 1 where cuDNN is not used or refuses a size, or where a result is wrong. With MPIPIPE_ATTENTION=cupy our own
kernels are what is checked.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator

import ml_dtypes
import numpy as np

from mpipipe import arrays, attention
from mpipipe.attention import kernels
from mpipipe.gpu_check.extra import Finding

SIZES = ((128, 64), (128, 128), (1024, 64), (1024, 128))  # (sequence, head dimension)
HEADS, KV_HEADS, BATCH = 4, 2, 2
# Norm of the errors over the norm of the result, in eps. Weights, slopes, the output that the backward reads, and each
# result are rounded once to half precision, by eps / 2 at most; the rest is in float32.
ROUNDINGS = 4.0


def cases() -> Iterator[Finding]:
    """Yield the largest error of the four results of each case, causal, with two query heads for each key head."""
    for seq, dim in SIZES:
        for dtype in ("bfloat16", "float16"):
            kind, generator = arrays.dtype(dtype), np.random.default_rng(seq + dim)
            whole = [
                generator.standard_normal((BATCH, seq, heads, dim), np.float32).astype(kind)
                for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
            ]
            found = _results([arrays.upload(x) for x in whole])
            expected = _results([x.astype(np.float32) for x in whole])
            error = max(_distance(one, other) for one, other in zip(found, expected))
            allowed = ROUNDINGS * float(ml_dtypes.finfo(kind).eps)
            seen = f"error {error:.2e}, at most {allowed:.2e}"
            yield Finding(f"{dtype} sequence {seq} dim {dim}", error <= allowed, seen)


def _results(whole: list) -> list[np.ndarray]:
    """Return out, dq, dk and dv on the host."""
    attend = attention.Local(causal=True)
    out, saved = attend.forward(*whole[:3])
    return arrays.download(out, *attend.backward(whole[3], saved))


def _distance(found: np.ndarray, expected: np.ndarray) -> float:
    apart = np.linalg.norm(found.astype(np.float64) - expected.astype(np.float64))
    return float(apart / np.linalg.norm(expected.astype(np.float64)))


def main() -> int:
    """Print the kernel and each case. Returns 1 where something is wrong, else 0."""
    arrays.check_device("cuda")
    described = kernels.describe()
    sys.stdout.write(f"attention by: {described}\n")
    wrong = not described.startswith("cudnn") and os.environ.get(kernels.VARIABLE, "") != "cupy"
    with warnings.catch_warnings(), arrays.own_stream():
        warnings.filterwarnings("error", message="cuDNN refuses")
        for finding in cases():
            sys.stdout.write(f"{finding}\n")
            wrong |= not finding.right
    if not described.startswith("cudnn"):
        sys.stdout.write(f"attention by: {described}\n")  # the last line is what a report shows
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
