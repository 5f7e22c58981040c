"""Exact attention on a GPU for any dtype, head dimension and band: cuBLAS products of tiles, and kernels between them.

The functions are those of `host`, on device arrays. Each (batch entry, key head) is one problem, and one product does
a tile of all problems at once. The query heads that share a key head are rows of it, side by side (row i g + h is
query i of head h of the group), so keys and values are never repeated. A tile of scores stays in the second-level
cache between the products; between those of the forward one kernel does all the rest of the online softmax (Milakov
and Gimelshein, "Online normalizer calculation for softmax", 2018), and one between those of the backward.

In half precision the factors of products are halves, probabilities included, and all sums are float32.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mpipipe import arrays
from mpipipe.arrays.gemm import batched_gemm
from mpipipe.arrays.strided import THREADS, blocks_of, element_strides, strided_copy_views
from mpipipe.attention.kernels.host import nothing

FORWARD, BACKWARD = (Path(__file__).with_name(f"{name}.cu") for name in ("forward", "backward"))
TILE_BYTES = 32 << 20  # of the scores of one tile of all problems; an H200 has 60 MB of second-level cache
KEYS = 1024  # columns of a tile at most
ROWS = 128  # rows of a tile at least, where there are more columns than rows
HELD = 4  # columns that one thread of the forward holds
FAR = 1 << 30  # a bound that bounds nothing


def forward(q, k, v, scale, slices, out, lse, fresh, poll=nothing):
    """As host.forward; out may also be of the dtype of lse where `fresh`."""
    slices = [part for part in slices if out.size]
    if not slices:
        return
    problem = _Problem(q, k, v)
    queries, keys, values = problem.rows_of(q), problem.keys_of(k), problem.keys_of(v)
    kind = arrays.accumulator(q.dtype)
    row_count, key_count = problem.tile(slices, kind.itemsize)
    scores, weights = _tiles(problem.count, row_count, key_count, q.dtype, 1)
    sums = arrays.empty((problem.count, row_count, v.shape[3]), kind, "cuda")
    tops, totals = (arrays.empty((problem.count, row_count), kind, "cuda") for _ in range(2))
    for part in slices:
        for start, stop, tiles in _row_tiles(part, row_count // problem.group, key_count):
            rows = problem.rows(part, start, stop)
            count = rows.stop - rows.start
            tile_sums = _front(sums, count)
            for first, end in tiles:
                at = slice(part.k_start + first, part.k_start + end)
                tile, factors = _front(scores, count, end - first), _front(weights, count, end - first)
                batched_gemm(queries[:, rows], keys[:, at], tile, transpose_b=True)
                begins = first == tiles[0][0]
                _weigh(problem, part, tile, factors, tile_sums, tops, totals, start, first, scale, begins, out.dtype)
                batched_gemm(factors, values[:, at], tile_sums, add=not begins)
            _finish(problem, tile_sums, tops, totals, out, lse, part.q_start + start, fresh, q.dtype)
            poll()


def backward(dout, q, k, v, out, lse, scale, slices, dq, dk, dv, poll=nothing, fresh=False):
    """As host.backward."""
    kind = arrays.accumulator(q.dtype)
    problem = _Problem(q, k, v)
    results = problem.like_rows(q, kind), problem.like_keys(k, kind), problem.like_keys(v, kind)
    slices = [part for part in slices if out.size]
    if slices:
        factors = problem.rows_of(dout), problem.rows_of(q), problem.keys_of(k), problem.keys_of(v)
        _backward_tiles(problem, *factors, lse, _dot(dout, out, kind), scale, slices, *results, poll)
    for result, target, unfold in zip(results, (dq, dk, dv), (problem.as_rows, problem.as_keys, problem.as_keys)):
        shape, source_steps, target_steps = unfold(result, target)
        strided_copy_views(result, source_steps, target, target_steps, shape, add=not fresh)


def _backward_tiles(problem, dout, q, k, v, lse, delta, scale, slices, dq, dk, dv, poll):
    row_count, key_count = problem.tile(slices, 2 * dq.itemsize)
    (scores, weights), (products, slopes) = _tiles(problem.count, row_count, key_count, q.dtype, 2)
    for part in slices:
        for start, stop, tiles in _row_tiles(part, row_count // problem.group, key_count):
            rows = problem.rows(part, start, stop)
            for first, end in tiles:
                at = slice(part.k_start + first, part.k_start + end)
                size = rows.stop - rows.start, end - first
                tile, other, p, ds = (_front(x, *size) for x in (scores, products, weights, slopes))
                batched_gemm(q[:, rows], k[:, at], tile, transpose_b=True)
                batched_gemm(dout[:, rows], v[:, at], other, transpose_b=True)
                _slope(problem, part, tile, other, p, ds, lse, delta, start, first, scale)
                batched_gemm(p, dout[:, rows], dv[:, at], transpose_a=True, add=True)
                batched_gemm(ds, q[:, rows], dk[:, at], transpose_a=True, add=True, factor=scale)
                batched_gemm(ds, k[:, at], dq[:, rows], add=True, factor=scale)
            poll()


class _Problem:
    """How (batch, seq, heads, dim) arrays stand for problems of rows.

    Attributes
    ----------
    count : number of problems, batch * kv_heads
    group : query heads to a key head
    """

    def __init__(self, q, k, v):
        self.batch, self.seq, heads, _ = q.shape
        self.keys, self.kv_heads = k.shape[1:3]
        self.group = heads // self.kv_heads
        self.count = self.batch * self.kv_heads

    def rows(self, part, start, stop) -> slice:
        """Rows of queries start ... stop - 1 of a slice."""
        return slice((part.q_start + start) * self.group, (part.q_start + stop) * self.group)

    def rows_of(self, x):
        """(batch, seq, heads, dim) copied to (problems, seq * group, dim)."""
        return self._gathered(x, self.like_rows(x, x.dtype, empty=True), self.as_rows)

    def keys_of(self, x):
        """(batch, keys, kv_heads, dim) copied to (problems, keys, dim)."""
        return self._gathered(x, self.like_keys(x, x.dtype, empty=True), self.as_keys)

    def _gathered(self, x, target, unfold):
        shape, target_steps, source_steps = unfold(target, x)
        strided_copy_views(x, source_steps, target, target_steps, shape)
        return target

    def like_rows(self, x, kind, empty=False):
        """Zeros (problems, seq * group, dim), or no values where `empty`."""
        make = arrays.empty if empty else arrays.zeros
        return make((self.count, self.seq * self.group, x.shape[3]), kind, "cuda")

    def like_keys(self, x, kind, empty=False):
        """Zeros (problems, keys, dim), or no values where `empty`."""
        make = arrays.empty if empty else arrays.zeros
        return make((self.count, self.keys, x.shape[3]), kind, "cuda")

    def as_rows(self, rows, x):
        """(shape, steps of `rows`, steps of x) over (batch, kv_heads, seq, group, dim)."""
        per_row, dim = rows.shape[2], x.shape[3]
        per_problem = self.seq * self.group * per_row
        b, s, h, d = element_strides(x)
        shape = self.batch, self.kv_heads, self.seq, self.group, dim
        ours = self.kv_heads * per_problem, per_problem, self.group * per_row, per_row, 1
        return shape, ours, (b, h * self.group, s, h, d)

    def as_keys(self, rows, x):
        """(shape, steps of `rows`, steps of x) over (batch, kv_heads, keys, dim)."""
        dim = x.shape[3]
        b, s, h, d = element_strides(x)
        ours = self.kv_heads * self.keys * dim, self.keys * dim, dim, 1
        return (self.batch, self.kv_heads, self.keys, dim), ours, (b, h, s, d)

    def tile(self, slices, bytes_per_score) -> tuple[int, int]:
        """(rows, columns) of a tile: within TILE_BYTES where ROWS x ROWS of all problems are, rows of whole groups."""
        scores = TILE_BYTES // (self.count * bytes_per_score)
        keys = min(KEYS, max(part.k_stop - part.k_start for part in slices))
        keys = max(1, min(keys, max(scores // ROWS, ROWS)))
        queries = max(1, max(scores // keys, ROWS) // self.group)
        queries = min(queries, max(part.q_stop - part.q_start for part in slices))
        return queries * self.group, keys


def _tiles(count, rows, keys, kind, pairs):
    """(scores, weights) of a tile, or two such pairs: in the accumulator dtype and in `kind`, one memory if equal."""
    shape = count, rows, -(-keys // 8) * 8
    sum_kind = arrays.accumulator(kind)
    made = []
    for _ in range(pairs):
        scores = arrays.empty(shape, sum_kind, "cuda")
        made.append((scores, scores if sum_kind == kind else arrays.empty(shape, kind, "cuda")))
    return made[0] if pairs == 1 else made


def _front(x, rows, columns=None):
    """A smaller matrix at the front of the memory of each tile; rows are apart as before, problems lie close."""
    pitch = x.shape[2]
    flat = x.reshape(-1)[: x.shape[0] * rows * pitch].reshape(x.shape[0], rows, pitch)
    return flat if columns is None else flat[:, :, :columns]


def _row_tiles(part, queries, keys):
    """(start, stop, [(first, end), ...]): queries start ... stop - 1 of a slice, and tiles of keys that they see."""
    seq, all_keys = part.q_stop - part.q_start, part.k_stop - part.k_start
    for start in range(0, seq, queries):
        stop = min(start + queries, seq)
        first = 0 if part.low is None else max(0, start + part.low)
        end = all_keys if part.high is None else min(all_keys, stop + part.high)
        tiles = [(at, min(at + keys, end)) for at in range(first, end, keys)]
        yield start, stop, tiles or [(0, min(keys, all_keys))]  # rows that see nothing have a result too


def _bounds(part):
    """(low, high) of a slice as the kernels take them."""
    return np.int32(-FAR if part.low is None else part.low), np.int32(FAR if part.high is None else part.high)


def _weigh(problem, part, scores, weights, sums, tops, totals, start, first, scale, fresh, result_kind):
    count, rows, columns = scores.shape
    threads = -(-columns // (32 * HELD)) * 32
    kernel = arrays.cuda_function(FORWARD, "weigh", T=weights.dtype, O=result_kind, N=HELD)
    sizes = rows, columns, element_strides(scores)[1], sums.shape[2], problem.group, start, first
    kernel(
        (count * rows,), (threads,),
        (scores, weights, sums, tops, totals, *map(np.int32, sizes), *_bounds(part), sums.dtype.type(scale),
         np.int32(fresh)),
    )  # fmt: skip


def _finish(problem, sums, tops, totals, out, lse, start, fresh, kind):
    count, rows, width = sums.shape
    kernel = arrays.cuda_function(FORWARD, "finish", T=kind, O=out.dtype, N=HELD)
    sizes = rows, width, problem.group, problem.kv_heads, start
    kernel(
        (count * rows,), (min(THREADS, -(-width // 32) * 32),),
        (sums, tops, totals, out, lse, *map(np.int32, sizes),
         *map(np.int64, (*element_strides(out), *element_strides(lse))), np.int32(fresh)),
    )  # fmt: skip


def _dot(dout, out, kind):
    batch, seq, heads, dim = out.shape
    delta = arrays.empty((batch, heads, seq), kind, "cuda")
    rows = delta.size
    kernel = arrays.cuda_function(BACKWARD, "dot", T=out.dtype)
    kernel(
        blocks_of(rows, THREADS // 32), (THREADS,),
        (dout, out, delta, np.int64(rows), *map(np.int32, (heads, seq, dim)),
         *map(np.int64, (*element_strides(dout), *element_strides(out)))),
    )  # fmt: skip
    return delta


def _slope(problem, part, scores, products, weights, slopes, lse, delta, start, first, scale):
    count, rows, columns = scores.shape
    sizes = (
        rows,
        columns,
        element_strides(scores)[1],
        problem.group,
        problem.kv_heads,
        problem.seq,
        part.q_start,
        start,
        first,
    )
    kernel = arrays.cuda_function(BACKWARD, "slope", T=weights.dtype)
    kernel(
        (count * rows,), (min(THREADS, -(-columns // 32) * 32),),
        (scores, products, weights, slopes, lse, delta, *map(np.int32, sizes), *_bounds(part),
         scores.dtype.type(scale), *map(np.int64, element_strides(lse))),
    )  # fmt: skip
