"""Products of matrices on the host, and sums of rows: BLAS on pieces, a thread for each.

BLAS copies its factors for each piece anew. With one thread pieces of 1024 rows take 1 to 3 %
longer than whole products, and pieces of 512 rows 2 to 6 %: so these are taken only where there
would be one piece. Two threads of OpenBLAS, which wait in loops that keep their cores busy, are as
fast as the pool on two idle cores: both 1.8 to 2.0 times as fast as one.
"""

from __future__ import annotations

import numpy as np

from mpipipe.nn.kernels.host import HostArray
from mpipipe.processor import each

WORK = 1 << 22  # multiplications of a product that is cut
# Least rows of a piece, and twice as many where this gives two pieces.
ROWS = 512
# Least columns of a piece, where rows are too few.
COLUMNS = 1024
# Elements of one piece of a weight gradient: half a MiB of float32, which stays in cache.
PIECE = 1 << 17
WIDTH = 256  # columns that one thread sums at least
SUMMED = 1 << 18  # elements, above which a sum of rows is cut


def linear(x: HostArray, weight: HostArray, bias: HostArray | None = None) -> HostArray:
    """Return y = x weight^T + bias, in pieces of rows, or of columns where rows are few."""
    count = len(x)
    width, depth = weight.shape
    pieces = None
    if count * depth * width >= WORK:
        pieces = (
            even_pieces(count, 2 * ROWS) or even_pieces(count, ROWS) or even_pieces(width, COLUMNS)
        )
    if not pieces:
        y = x @ weight.T
        if bias is not None:
            y += bias
        return y
    result = np.empty((count, width), x.dtype)
    whole = slice(None)

    def work(at: slice) -> None:
        rows = whole
        columns = at
        if count >= 2 * ROWS:
            rows = at
            columns = whole
        part = np.matmul(x[rows], weight[columns].T, out=result[rows, columns])
        if bias is not None:
            part += bias[columns]

    each(work, pieces)
    return result


def linear_backward_input(dy: HostArray, weight: HostArray) -> HostArray:
    """Return dx = dy weight."""
    if len(dy) * weight.size < WORK:
        return dy @ weight
    return linear(dy, weight.T)


def even_pieces(count: int, least: int) -> list[slice]:
    """Cut `count` into an even number of equal pieces of `least` or more, if there are two."""
    number = 2 * (count // (2 * least))
    return [slice(count * i // number, count * (i + 1) // number) for i in range(number)]


def linear_backward_weight(dy: HostArray, x: HostArray, grad: HostArray) -> None:
    """Grad += dy^T x.

    A large product is made in pieces of the gradient, each added while it is still in cache.
    """
    if grad.size <= PIECE:
        grad += dy.T @ x
        return
    outputs, inputs = grad.shape

    def work(at: slice) -> None:
        part = grad[at]
        part += dy[:, at].T @ x

    step = max(16, PIECE // inputs)
    each(work, [slice(start, start + step) for start in range(0, outputs, step)])


def products(
    a: HostArray,
    b: HostArray,
    c: HostArray,
    transpose_a: bool = False,
    transpose_b: bool = False,
    add: bool = False,
) -> None:
    """C = a b or, with `add`, c += a b, for each of some problems."""
    if transpose_a:
        a = a.swapaxes(1, 2)
    if transpose_b:
        b = b.swapaxes(1, 2)
    count = len(c)
    a = np.broadcast_to(a, (count, *a.shape[1:]))
    b = np.broadcast_to(b, (count, *b.shape[1:]))

    def work(at: slice) -> None:
        part = c[at]
        if add:
            part += a[at] @ b[at]
        else:
            np.matmul(a[at], b[at], out=part)

    step = max(1, count if c.size * a.shape[2] < WORK else -(-count // 64))
    each(work, [slice(start, start + step) for start in range(0, count, step)])


def sum_rows(dy: HostArray, grad: HostArray) -> None:
    """Grad += the sum of the rows of dy."""
    if dy.size <= SUMMED:
        grad += np.add.reduce(dy, 0)
        return

    def work(at: slice) -> None:
        part = grad[at]
        part += np.add.reduce(dy[:, at], 0)

    # Sums of rows have the same bits however columns are cut.
    each(work, even_pieces(dy.shape[1], WIDTH) or [slice(None)])


def add_parts(parts: HostArray, grad: HostArray) -> None:
    """Grad += the sum of the rows of parts."""
    if len(parts) == 1:
        grad += parts[0]
    else:
        grad += np.add.reduce(parts, 0)
