"""Layers on a GPU: matrix products by cuBLAS, sums over rows, norms, embeddings, losses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mpipipe import arrays
from mpipipe.arrays import DeviceArray, Launch, Packed, over, scalar_type, vector_width
from mpipipe.nn.kernels.cuda.elementwise import (
    check_alike,
    check_contiguous,
    check_ids,
    check_matrices,
    int64s,
)

HERE = Path(__file__).parent
LINEAR = HERE / "linear.cu"
SUMS = HERE / "sums.cu"
# threads of a block for sum_rows, one below and one next to the other
STRIPES = 8
LANES = 32
# the same for add_parts: few columns, so that a GPU has a block for each multiprocessor
COLUMNS = 8
PART_STRIPES = 32
PARTS = 512  # blocks for sum_rows, where there is work for so many


def linear(x: DeviceArray, weight: DeviceArray, bias: DeviceArray | None = None) -> DeviceArray:
    """Return y = x weight^T + bias."""
    check_matrices("linear", x, 1, weight, 1)
    y = arrays.empty((len(x), len(weight)), x.dtype, "cuda")
    if bias is not None:
        _broadcast((bias,), (y,), (len(x),))
    arrays.gemm(x, weight, y, transpose_b=True, add=bias is not None)
    return y


@Packed
def _broadcast(bias: DeviceArray, y: DeviceArray, _: int) -> Launch | None:
    outputs = y.shape[1]
    width = vector_width(bias, y, divides=outputs)
    return over(LINEAR, "broadcast_bias", y.size, int64s(y.size, outputs), T=y.dtype, V=width)


def linear_backward_input(dy: DeviceArray, weight: DeviceArray) -> DeviceArray:
    """Return dx = dy weight."""
    check_matrices("linear_backward_input", dy, 1, weight, 0)
    dx = arrays.empty((len(dy), weight.shape[1]), dy.dtype, "cuda")
    arrays.gemm(dy, weight, dx)
    return dx


def linear_backward_weight(dy: DeviceArray, x: DeviceArray, grad: DeviceArray) -> None:
    """Grad += dy^T x."""
    check_matrices("linear_backward_weight", dy, 0, x, 0)
    check_contiguous("linear_backward_weight", grad)
    arrays.gemm(dy, x, grad, transpose_a=True, add=True)


def products(
    a: DeviceArray,
    b: DeviceArray,
    c: DeviceArray,
    transpose_a: bool = False,
    transpose_b: bool = False,
    add: bool = False,
) -> None:
    """C = a b or, with `add`, c += a b, for each of some problems."""
    arrays.batched_gemm(a, b, c, transpose_a, transpose_b, add)


def sum_rows(dy: DeviceArray, grad: DeviceArray) -> None:
    """Grad += the sum of the rows of dy."""
    check_contiguous("sum_rows", dy, grad)
    if not dy.size:
        return
    call = _sum_rows((dy,), launch=False)
    parts = arrays.empty((call.grid[1], dy.shape[1]), grad.dtype, "cuda")
    call.launch((dy, parts))
    add_parts(parts, grad)


@Packed
def _sum_rows(dy: DeviceArray) -> Launch:
    rows, width = dy.shape
    lanes = vector_width(dy, divides=width)
    tiles = -(-width // (LANES * lanes))
    chunk = max(STRIPES * 4, -(-rows // max(1, PARTS // tiles)))
    function = arrays.cuda_function(SUMS, "sum_rows", T=dy.dtype, V=lanes)
    return Launch(
        function, (tiles, -(-rows // chunk)), (LANES, STRIPES), int64s(rows, width, chunk)
    )


def add_parts(parts: DeviceArray, grad: DeviceArray) -> None:
    """Grad += the sum of the rows of parts."""
    _add_parts((parts, grad))


@Packed
def _add_parts(parts: DeviceArray, grad: DeviceArray) -> Launch:
    check_contiguous("add_parts", parts, grad)
    count, width = parts.shape
    function = arrays.cuda_function(SUMS, "add_parts", T=grad.dtype, V=1)
    block = (COLUMNS, PART_STRIPES)
    return Launch(function, (-(-width // COLUMNS),), block, (np.int32(count), np.int64(width)))


# -- Normalisation of rows on a GPU; nn/layers/norm.py has the formulas ----------------------------


NORM = HERE / "norm.cu"
KEPT = 4  # words of a row that one thread keeps in registers
SHARED = (32, 64, 128, 256)  # threads that may share a row so
LONG = 512  # threads that share a row too long for that
PER_BLOCK = 128  # threads of a block of several rows
NORM_THREADS = 132 * 512  # for one pass of a backward: fixed, so that sums do not depend on the GPU


def _constants(x: DeviceArray, *others: DeviceArray) -> dict[str, Any]:
    """Return the constants that norm.cu is compiled for."""
    width = vector_width(x, *others, divides=x.shape[1])
    words = x.shape[1] // width
    for threads in SHARED:
        if words <= threads * KEPT:
            return {"T": x.dtype, "V": width, "G": threads, "K": -(-words // threads)}
    return {"T": x.dtype, "V": width, "G": LONG, "K": 0}


def _block(threads: int) -> tuple[int, int]:
    """Return the block in which `threads` threads share a row."""
    return (threads, PER_BLOCK // threads if threads == 32 else 1)


def norm(
    x: DeviceArray, gain: DeviceArray, bias: DeviceArray | None, eps: float
) -> tuple[DeviceArray, DeviceArray]:
    """Return (y, scale)."""
    name = "rms_norm"
    vectors = [gain]
    if bias is not None:
        name = "layer_norm"
        vectors.append(bias)
    y = arrays.empty_like(x)
    scale = arrays.empty((len(x),), arrays.accumulator(x.dtype), "cuda")
    _norm((x, *vectors), (y, scale), (name, eps))
    return y, scale


@Packed
def _norm(x: DeviceArray, *rest: Any) -> Launch | None:
    *others, _, name, eps = rest
    check_contiguous(name, x, *others)
    if not x.size:
        return None
    constants = _constants(x, *others)
    rows, width = x.shape
    block = _block(constants["G"])
    numbers = np.int64(rows), np.int32(width), scalar_type(x.dtype)(eps)
    return Launch(
        arrays.cuda_function(NORM, name, **constants), arrays.grid(rows, block[1]), block, numbers
    )


def norm_backward(
    dy: DeviceArray,
    x: DeviceArray,
    scale: DeviceArray,
    gain: DeviceArray,
    centred: bool,
    more: DeviceArray | None = None,
) -> tuple[DeviceArray, ...]:
    """Return dx, and parts of dgain and, where centred, of dbias: a row for each block."""
    name = "rms_norm_backward"
    if centred:
        name = "layer_norm_backward"
    inputs = [dy, x, scale, gain]
    if more is not None:
        name = f"{name}_add"
        inputs.append(more)
    dx = arrays.empty_like(x)
    call = _norm_backward(tuple(inputs), (dx,), (name,), launch=False)
    blocks = 1
    make = arrays.zeros
    if call is not None:
        blocks = call.grid[0]
        make = arrays.empty
    parts = []
    for _ in range(1 + centred):
        parts.append(make((blocks, x.shape[1]), scale.dtype, "cuda"))
    if call is not None:
        call.launch((*inputs, dx, *parts))
    return (dx, *parts)


@Packed
def _norm_backward(
    dy: DeviceArray, x: DeviceArray, scale: DeviceArray, gain: DeviceArray, *rest: Any
) -> Launch | None:
    *more, dx, name = rest
    check_alike(name, dy, x, *more)
    check_contiguous(name, scale, gain)
    if not x.size:
        return None
    constants = _constants(x, dy, dx, gain, *more)
    rows, width = x.shape
    block = _block(constants["G"])
    blocks = min(-(-rows // block[1]), NORM_THREADS // (block[0] * block[1]))
    function = arrays.cuda_function(NORM, name, **constants)
    return Launch(function, (blocks,), block, (np.int64(rows), np.int32(width)))


# -- Rows of a table by number, and their gradient, on a GPU ---------------------------------------


EMBED = HERE / "embed.cu"
TILE = 1024  # rows that are counted together, as in embed.cu
SPAN = 32  # sorted rows that are added by one thread, as there
EMBED_THREADS = 128


def embed(weight: DeviceArray, ids: DeviceArray) -> DeviceArray:
    """Return row `id` of the table for each id, NaN for ids outside."""
    y = arrays.empty((*ids.shape, weight.shape[1]), weight.dtype, "cuda")
    _embed((weight, ids), (y,))
    return y


@Packed
def _embed(weight: DeviceArray, ids: DeviceArray, y: DeviceArray) -> Launch | None:
    check_ids(ids)
    check_contiguous("embed", weight, ids)
    vocab, dim = weight.shape
    numbers = int64s(y.size, dim, vocab)
    width = vector_width(weight, y, divides=dim)
    return over(EMBED, "embed", y.size, numbers, T=weight.dtype, I=ids.dtype, V=width)


def embed_backward(dy: DeviceArray, ids: DeviceArray, grad: DeviceArray) -> None:
    """Add each row of dy to the row of grad that its id names; ids outside are left out.

    The rows of one id are added in their order, at first within spans of 32 rows in the order of
    their ids.
    """
    check_ids(ids)
    check_contiguous("embed_backward", dy, ids, grad)
    count = ids.size
    vocab, dim = grad.shape
    if not dy.size:
        return
    width = vector_width(dy, grad, divides=dim)
    kernel = partial(arrays.cuda_function, EMBED, T=dy.dtype, I=ids.dtype, V=width)
    order, keys, starts = _sorted(ids, count, vocab, kernel)
    spans = -(-count // SPAN)
    parts = arrays.empty((2, spans, dim), grad.dtype, "cuda")
    work = spans * (dim // width)
    numbers = (np.int64(work), np.int32(count), np.int64(dim), np.int32(vocab))
    shape = (-(-work // EMBED_THREADS),), (EMBED_THREADS,)
    kernel("add_spans")(*shape, (dy, order, keys, grad, parts, *numbers))
    if spans > 1:
        kernel("join_spans")(*shape, (keys, starts, grad, parts, *numbers))


def _sorted(
    ids: DeviceArray, count: int, vocab: int, kernel: Callable[[str], Callable]
) -> tuple[DeviceArray, DeviceArray, DeviceArray]:
    """Return rows in the order of their ids, these ids, and where each id starts.

    Rows of equal ids stay in their order. `kernel` returns a function of embed.cu.
    """
    tiles = -(-count // TILE)
    groups = -(-(vocab + 1) // TILE)
    tally = arrays.zeros((tiles, vocab + 1), np.int32, "cuda")
    totals = arrays.empty((groups,), np.int32, "cuda")
    starts = arrays.empty((vocab + 1,), np.int32, "cuda")
    order = arrays.empty((count,), np.int32, "cuda")
    keys = arrays.empty_like(order)
    rows = (np.int32(count), np.int32(vocab))
    table = (np.int32(tiles), np.int32(vocab))
    kernel("tally_ids")((tiles,), (TILE,), (ids, tally, *rows))
    kernel("total_tallies")((groups,), (TILE,), (tally, totals, *table))
    kernel("place_tallies")((groups,), (TILE,), (tally, totals, starts, *table))
    kernel("sort_rows")((tiles,), (TILE,), (ids, tally, order, keys, *rows))
    return order, keys, starts


# -- Rotary positions on a GPU ---------------------------------------------------------------------


ROPE = HERE / "rope.cu"


def rope_table(angles: np.ndarray, amplitude: float, dtype: np.dtype) -> DeviceArray:
    """Return cosine and sine (seq, head_dim / 2, 2) of each position and pair, on the device."""
    table = amplitude * np.stack([np.cos(angles), np.sin(angles)], axis=-1)
    return arrays.upload(table.astype(arrays.accumulator(np.dtype(dtype))))


def apply_rope(
    x: DeviceArray, table: DeviceArray, target: DeviceArray, inverse: bool = False
) -> None:
    """Target = each pair of neighbours of x turned by its factor, or back by it with `inverse`."""
    _turn((x, table, target), (), (inverse,))


@Packed
def _turn(x: DeviceArray, table: DeviceArray, target: DeviceArray, inverse: bool) -> Launch | None:
    _, seq, heads, dim = x.shape
    x_strides = arrays.element_strides(x)
    target_strides = arrays.element_strides(target)
    width = 1
    if x_strides[3] == target_strides[3] == 1:
        width = vector_width(
            x, target, divides=arrays.bitwise_or((dim,), x_strides[:3], target_strides[:3])
        )
    count = np.int64(x.size // max(width, 2))
    sign = scalar_type(x.dtype)(-1 if inverse else 1)
    numbers = int64s(seq, heads, dim, *x_strides, *target_strides)
    return over(ROPE, "apply_rope", x.size, (count, sign, *numbers), words=1, T=x.dtype, V=width)


# -- Losses on a GPU and their gradients, times a factor that is applied before rounding ----------


CROSS_ENTROPY = HERE / "cross_entropy.cu"
SQUARED_ERROR = HERE / "squared_error.cu"
MEAN = HERE / "mean.cu"
# Threads of a row of logits: two blocks at least share a multiprocessor.
LOSS_THREADS = (32, 64, 128, 256, 512)
WORDS = 4  # words that a thread fetches at a time
FLOAT64 = np.dtype(np.float64)
LOSS_PARTS = 2048  # blocks for a mean squared error


def softmax_cross_entropy(
    logits: DeviceArray, ids: DeviceArray, factor: float = 1.0, out: DeviceArray | None = None
) -> tuple[DeviceArray, DeviceArray]:
    """Return (mean of -log softmax(logits)[id], factor * its gradient).

    The mean is NaN where an id is out of range.
    """
    rows = len(logits)
    if out is None:
        out = arrays.empty_like(logits)
    losses = arrays.empty((rows,), FLOAT64, "cuda")
    _cross_entropy((logits, ids, out), (losses,), (), (scalar_type(logits.dtype)(factor / rows),))
    return _mean(losses, rows), out


@Packed
def _cross_entropy(
    logits: DeviceArray, ids: DeviceArray, gradient: DeviceArray, _: DeviceArray
) -> Launch:
    check_ids(ids)
    check_contiguous("softmax_cross_entropy", logits, ids, gradient)
    rows, vocab = logits.shape
    dtype = logits.dtype
    width = arrays.WORD // dtype.itemsize
    # Rows start anywhere, but alike in both.
    if (gradient.data.ptr - logits.data.ptr) % arrays.WORD:
        width = 1
    function = arrays.cuda_function(
        CROSS_ENTROPY, "softmax_cross_entropy", T=dtype, I=ids.dtype, V=width
    )
    return Launch(function, (rows,), _loss_block(-(-vocab // width)), int64s(vocab))


def _loss_block(words: int) -> tuple[int]:
    """Return the block for a row of this many words."""
    return (next((n for n in LOSS_THREADS if n * WORDS >= words), LOSS_THREADS[-1]),)


def running_lse(
    logits: DeviceArray,
    ids: DeviceArray,
    columns: tuple[int, int],
    before: Sequence[DeviceArray],
    after: Sequence[DeviceArray],
) -> None:
    """Set L and t from those before and some columns of logits."""
    _lse((logits, ids, *before), (*after,), ("running_lse", *columns))


def running_lse_backward(
    logits: DeviceArray,
    ids: DeviceArray,
    first: int,
    lse: DeviceArray,
    slopes: Sequence[DeviceArray],
    out: DeviceArray,
) -> None:
    """Set the gradient of the logits."""
    _lse((logits, ids, lse, *slopes), (out,), ("running_lse_backward", first))


@Packed
def _lse(logits: DeviceArray, ids: DeviceArray, *rest: Any) -> Launch:
    others = rest[: len(rest) // 2 + 1]
    name, *numbers = rest[len(rest) // 2 + 1 :]
    check_ids(ids)
    check_contiguous(name, logits, ids, *others)
    rows, width = logits.shape
    function = arrays.cuda_function(CROSS_ENTROPY, name, T=logits.dtype, I=ids.dtype, V=1)
    return Launch(function, (rows,), _loss_block(width), int64s(width, *numbers))


def mean_squared_error(
    output: DeviceArray, target: DeviceArray, factor: float = 1.0
) -> tuple[DeviceArray, DeviceArray]:
    """Return (mean of (output - target)^2, factor * its gradient)."""
    gradient = arrays.empty_like(output)
    call = _squared_error((output, target), (gradient,), launch=False)
    parts = arrays.empty(call.grid, FLOAT64, "cuda")
    per_element = scalar_type(output.dtype)(2 / output.size * factor)
    call.launch((output, target, gradient, parts), (per_element,))
    return _mean(parts, output.size), gradient


@Packed
def _squared_error(output: DeviceArray, target: DeviceArray, gradient: DeviceArray) -> Launch:
    check_contiguous("mean_squared_error", output, target)
    width = vector_width(output, target, gradient)
    blocks = min(LOSS_PARTS, -(-output.size // (width * arrays.BLOCK * 2)))
    function = arrays.cuda_function(
        SQUARED_ERROR, "squared_error", T=output.dtype, S=target.dtype, V=width
    )
    return Launch(function, (blocks,), (arrays.BLOCK,), int64s(output.size))


def _mean(parts: DeviceArray, divisor: int) -> DeviceArray:
    """Return the sum of the parts over `divisor`, an array without axes."""
    value = arrays.empty((), FLOAT64, "cuda")
    _means((parts,), (value,), (divisor,))
    return value


@Packed
def _means(parts: DeviceArray, _: DeviceArray, divisor: int) -> Launch:
    return Launch(
        arrays.cuda_function(MEAN, "mean"),
        (1,),
        (1024,),
        (np.int64(parts.size), np.float64(divisor)),
    )
