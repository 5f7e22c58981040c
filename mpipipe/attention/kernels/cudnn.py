"""Exact attention on a GPU in half precision by cuDNN's fused kernels.

The CuPy kernel does what cuDNN does not: single slices for which `request_for` has no request, and all arrays for which
`refusal` has a reason. cuDNN writes results in the dtype of its inputs. To add up several blocks, each block's result
goes to memory of its own, and our kernels add in float32.

cuDNN's backward may sum in any order, so repeated calls differ in the last bits. MPIPIPE_DETERMINISTIC=1 asks for its
other algorithm, which is slower and needs memory for all scores of the heads that it does together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import NamedTuple, TypeAlias

import numpy as np

from mpipipe import arrays
from mpipipe.arrays import THREADS, DeviceArray, blocks_of, copied, strided_copy
from mpipipe.attention import mask
from mpipipe.attention.kernels import cudnn_graph, cupy
from mpipipe.attention.kernels.cudnn_graph import deterministic, fits, request_for
from mpipipe.attention.kernels.interface import AttentionAccumulator, Gradients, KVBlock, OutLse, no_poll
from mpipipe.attention.mask import Slice

DETERMINISTIC_BYTES = 1 << 32  # of scores that the deterministic backward may hold at once, in half precision
OF_KEYS = ("k", "v", "dk", "dv")  # arrays along the keys; the others are along the queries
Named: TypeAlias = "dict[str, DeviceArray]"


def make_accumulator(q: DeviceArray, v: DeviceArray, overwrite: bool) -> AttentionAccumulator:
    """As `AttentionKernel.make_accumulator`."""
    return PendingBlocks(q, v)


def forward(block: KVBlock, result: OutLse, overwrite: bool) -> None:
    """As `AttentionKernel.forward`; `result` is C-contiguous. With `overwrite`, `out` may be of the dtype of `lse`."""
    out = result.out
    if not out.size:
        return
    if not overwrite:
        pending = PendingBlocks(block.q, block.v, earlier=result)
        _attend_apart(block, pending)
        pending.merge_in_place()
    elif out.dtype == block.q.dtype and fits(out):
        block = _fitting_block(block)
        for part in block.slices:
            _attend(block, part, result, 0)
            block.poll()
    else:
        accumulator = PendingBlocks(block.q, block.v)
        accumulator.attend(block)
        for target, found in zip(result, accumulator.end()):
            strided_copy(found, target)


def _attend_apart(block: KVBlock, pending: PendingBlocks) -> None:
    """Attend in memory of `pending`: one piece of it for all slices that lie one below the other."""
    block = _fitting_block(block)
    for column in _columns(block.slices):
        start = column[0].q_start
        result = pending.block(start, column[-1].q_stop)
        for part in column:
            _attend(block, part, result, start)
            block.poll()


def _columns(slices: Sequence[Slice]) -> list[list[Slice]]:
    """The slices in lists; in a list each slice begins at the row at which the one before it ends."""
    lists: list[list[Slice]] = []
    for part in sorted(slices, key=lambda part: (part.q_start, part.q_stop)):
        if lists and lists[-1][-1].q_stop == part.q_start:
            lists[-1].append(part)
        else:
            lists.append([part])
    return lists


def _attend(block: KVBlock, part: Slice, result: OutLse, start: int) -> None:
    """Set the result of one slice in `result`, whose first row is row `start` and whose `out` cuDNN takes as it is."""
    rows = slice(part.q_start - start, part.q_stop - start)
    out, place = result.out[:, rows], result.lse[:, :, rows]
    lse = place if place.flags.c_contiguous else arrays.empty(place.shape, place.dtype, "cuda")
    given = _parts(dict(q=block.q, k=block.k, v=block.v), part) | dict(out=out, lse=lse)
    request = request_for("forward", given, block.scale, part)
    plan = None if request is None else cudnn_graph.plan(request)
    if plan is not None:
        cudnn_graph.run(plan, given)
    else:
        whole = part._replace(q_start=0, q_stop=out.shape[1], k_start=0, k_stop=given["k"].shape[1])
        cupy.forward(KVBlock(given["q"], given["k"], given["v"], block.scale, [whole]), OutLse(out, lse), True)
    if lse is not place:
        strided_copy(lse, place)


class _Pass(NamedTuple):
    """A backward over the slices that have rows, with arrays that cuDNN takes."""

    block: KVBlock
    dout: DeviceArray
    result: OutLse

    def calls(self, part: Slice, found: Named) -> list[_CudnnCall]:
        """The calls for one slice: one, or some heads in each. `found` are dq, dk and dv of its rows and keys."""
        block, lse = self.block, self.result.lse[:, :, part.q_start : part.q_stop]
        whole = dict(dout=self.dout, q=block.q, k=block.k, v=block.v, out=self.result.out)
        given = _parts(whole, part) | found | dict(lse=lse if lse.flags.c_contiguous else copied(lse))
        batch, seq, heads, _ = given["q"].shape
        keys, kv_heads = given["k"].shape[1:3]
        group, together, calls = heads // kv_heads, kv_heads, []
        if deterministic():
            together = min(kv_heads, max(1, DETERMINISTIC_BYTES // (2 * batch * group * seq * keys)))
        for first in range(0, kv_heads, together):
            named = given if together == kv_heads else _some_heads(given, first, together, group)
            request = request_for("backward", named, block.scale, part)
            plan = None if request is None else cudnn_graph.plan(request)
            if request is not None and request.padded:
                named = named | _lengths(batch, seq, keys)
            calls.append(_CudnnCall(named, plan))
        return calls

    def add(self, sums: Gradients) -> None:
        """Add what each slice gives to `sums`."""
        for part in self.block.slices:
            places = _parts(sums._asdict(), part)
            found = _empty_like(places, self.block.q.dtype)
            calls = self.calls(part, found)
            if _ready(calls):
                _run(calls)
                for name, place in places.items():
                    strided_copy(found[name], place, add=True)
            else:
                alone = replace(self.block, slices=[part], poll=no_poll)
                cupy.backward(alone, self.dout, self.result, sums)
            self.block.poll()


class _CudnnCall(NamedTuple):
    """The arrays of one call by name, and its plan; None if cuDNN does not do it."""

    given: Named
    plan: cudnn_graph.GraphPlan | None


def backward(block: KVBlock, dout: DeviceArray, result: OutLse, gradients: Gradients, overwrite: bool = False) -> None:
    """As `AttentionKernel.backward`."""
    work = _backward_pass(block, dout, result)
    slices, names = work.block.slices, gradients._asdict()
    if overwrite and all(x.dtype == block.q.dtype and fits(x) for x in gradients):
        if mask.each_row_once(slices, block.q.shape[1]) and mask.covers_once(_keys(slices), block.k.shape[1]):
            calls = [work.calls(part, _parts(names, part)) for part in slices]
            if all(map(_ready, calls)):
                for each in calls:
                    _run(each)
                    block.poll()
                return
    if not overwrite:
        work.add(gradients)
        return
    sums = Gradients(*(arrays.zeros(x.shape, result.lse.dtype, "cuda") for x in gradients))
    work.add(sums)
    for found, target in zip(sums, gradients):
        strided_copy(found, target)


def block_gradients(
    block: KVBlock, dout: DeviceArray, result: OutLse, dq: DeviceArray
) -> tuple[DeviceArray, DeviceArray]:
    """As `AttentionKernel.block_gradients`; dk and dv are of the dtype of q if no key is in two slices."""
    work = _backward_pass(block, dout, result)
    slices, dtype = work.block.slices, block.q.dtype
    ranges = _keys(slices)
    if mask.disjoint(ranges):
        make = arrays.empty if mask.covers_once(ranges, block.k.shape[1]) else arrays.zeros
        dk, dv = (make(x.shape, dtype, "cuda") for x in (block.k, block.v))
        results = [_parts(dict(dk=dk, dv=dv), part) | _empty_like(_parts(dict(dq=dq), part), dtype) for part in slices]
        calls = [work.calls(part, parts) for part, parts in zip(slices, results)]
        if all(map(_ready, calls)):
            for each, part, parts in zip(calls, slices, results):
                _run(each)
                strided_copy(parts["dq"], dq[:, part.q_start : part.q_stop], add=True)
                block.poll()
            return dk, dv
    dk, dv = (arrays.zeros(x.shape, result.lse.dtype, "cuda") for x in (block.k, block.v))
    work.add(Gradients(dq, dk, dv))
    return dk, dv


def _backward_pass(block: KVBlock, dout: DeviceArray, result: OutLse) -> _Pass:
    slices = [part for part in block.slices if result.out.size]
    block = replace(_fitting_block(block), slices=slices)
    return _Pass(block, _fitting(dout), result._replace(out=_fitting(result.out)))


def _fitting_block(block: KVBlock) -> KVBlock:
    return replace(block, q=_fitting(block.q), k=_fitting(block.k), v=_fitting(block.v))


def _fitting(x: DeviceArray) -> DeviceArray:
    return x if fits(x) else copied(x)


def _keys(slices: Sequence[Slice]) -> list[tuple[int, int]]:
    return [(part.k_start, part.k_stop) for part in slices]


def _parts(given: Named, part: Slice) -> Named:
    """The rows or keys of a slice of each array. CuPy takes microseconds for a cut: whole arrays stay as they are."""
    ranges = {name: part[2:4] if name in OF_KEYS else part[:2] for name in given}
    return {name: x if ranges[name] == (0, x.shape[1]) else x[:, slice(*ranges[name])] for name, x in given.items()}


def _empty_like(given: Named, dtype: np.dtype) -> Named:
    return {name: arrays.empty(x.shape, dtype, "cuda") for name, x in given.items()}


def _ready(calls: Sequence[_CudnnCall]) -> bool:
    return all(call.plan is not None for call in calls)


def _run(calls: Sequence[_CudnnCall]) -> None:
    for given, plan in calls:
        if plan is not None:
            cudnn_graph.run(plan, given)


def _some_heads(given: Named, first: int, count: int, group: int) -> Named:
    """The arrays of `count` key heads, and of the query heads that see them."""
    theirs, own = slice(first, first + count), slice(first * group, (first + count) * group)
    call = {name: x[:, :, theirs if name in OF_KEYS else own] for name, x in given.items() if name != "lse"}
    return call | dict(lse=copied(given["lse"][:, own]))


def _lengths(batch: int, seq: int, keys: int) -> Named:
    where = arrays.cupy(), arrays.cupy().cuda.runtime.getDevice(), arrays.stream().ptr
    return {
        name: arrays.keep_for_graph(_full(batch, n, *where)) for name, n in (("q_lengths", seq), ("k_lengths", keys))
    }


@lru_cache(maxsize=64)
def _full(batch: int, length: int, _library: ModuleType, _device: int, _stream: int) -> DeviceArray:
    """`length` for each batch entry, on the device."""
    return arrays.upload(np.full(batch, length, np.int32))


# -- Attention results over several blocks of keys on a GPU, kept apart until one kernel merges them ------------------
#
# Merging block by block would read and write the sum of all blocks each time, in the accumulator dtype: 10 bytes an
# element for blocks in half precision. Merging BLOCKS at once reads each block once and touches the sum twice in
# all. Up to BLOCKS blocks become the rounded result without any sum. The price is memory: that many outputs exist at a
# time.


MERGE = Path(__file__).with_name("merge.cu")
BLOCKS = 4  # blocks that the kernel takes


class _Pending(NamedTuple):
    """The result of one block, which sees rows start ... stop - 1: four arguments of the kernel."""

    out: DeviceArray
    lse: DeviceArray
    start: np.int32
    stop: np.int32


class PendingBlocks:
    """An `AttentionAccumulator`: the result over the blocks so far of queries like q, with values like v.

    q, v : device arrays (batch, seq, heads, dim) and (batch, keys, kv_heads, value_dim)
    earlier : result over earlier blocks, C-contiguous, `out` in the accumulator dtype
    """

    def __init__(self, q: DeviceArray, v: DeviceArray, earlier: OutLse | None = None) -> None:
        self._shape = *q.shape[:3], v.shape[3]
        self._dtype, self._sum_dtype = q.dtype, arrays.accumulator(q.dtype)
        self._sum = earlier
        self._blocks: list[_Pending] = []

    def block(self, start: int, stop: int) -> OutLse:
        """Return memory for the result of one more block, which sees rows start ... stop - 1.

        out (batch, stop - start, heads, value_dim) is of the dtype of q. Set both arrays before the next call.
        """
        if len(self._blocks) == BLOCKS:
            self._sum = self._merged(self._sum or self._empty(self._sum_dtype))
        batch, _, heads, dim = self._shape
        out = arrays.empty((batch, stop - start, heads, dim), self._dtype, "cuda")
        lse = arrays.empty((batch, heads, stop - start), self._sum_dtype, "cuda")
        self._blocks.append(_Pending(out, lse, np.int32(start), np.int32(stop)))
        return OutLse(out, lse)

    def attend(self, block: KVBlock) -> None:
        if block.q.size and block.slices:
            _attend_apart(block, self)

    def end(self) -> OutLse:
        """Return the result over all blocks in new memory, out in the dtype of q."""
        return self._merged(self._empty(self._dtype))

    def merge_in_place(self) -> None:
        """Merge all blocks into the earlier result that was given."""
        if self._blocks and self._sum is not None:
            self._merged(self._sum)

    def _empty(self, dtype: np.dtype) -> OutLse:
        batch, seq, heads, _ = self._shape
        lse = arrays.empty((batch, heads, seq), self._sum_dtype, "cuda")
        return OutLse(arrays.empty(self._shape, dtype, "cuda"), lse)

    def _merged(self, target: OutLse) -> OutLse:
        """Write all blocks and the sum to `target`, and drop the blocks."""
        out, lse = target
        batch, seq, heads, dim = self._shape
        rows = batch * seq * heads
        if rows:
            dtypes = dict(T=self._dtype, O=out.dtype, A=self._sum_dtype)
            vector_width = 4 if dim % 4 == 0 and dim >= 128 else 2 if dim % 2 == 0 else 1
            # the kernel always takes BLOCKS blocks; it reads no block without rows, and no sum that is missing
            nothing = _Pending(arrays.empty((1,), self._dtype, "cuda"), lse, np.int32(0), np.int32(0))
            given = [x for block in [*self._blocks, *[nothing] * (BLOCKS - len(self._blocks))] for x in block]
            kernel = arrays.cuda_function(MERGE, "merge", **dtypes, V=vector_width)
            kernel(
                blocks_of(rows, THREADS // 32), (THREADS,),
                (*given, *(self._sum or (lse, lse)), np.int32(self._sum is not None), out, lse, np.int64(rows),
                 *map(np.int32, (heads, seq, dim))),
            )  # fmt: skip
        self._blocks = []
        return target
