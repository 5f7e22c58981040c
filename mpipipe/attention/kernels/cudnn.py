"""Exact attention on a GPU in half precision by cuDNN's fused kernels.

The CuPy kernel does what cuDNN does not: single slices for which `request_for` has no request, and
all arrays for which `refusal` has a reason. cuDNN writes results in the dtype of its inputs. To add
up several slices, the result of each goes to memory of its own, and our kernels add in float32.

cuDNN's backward may sum in any order, so repeated calls differ in the last bits; those of the CuPy
kernel do not.
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
from mpipipe.attention.kernels.cudnn_graph import fits, request_for
from mpipipe.attention.kernels.interface import (
    Gradients,
    KVBlock,
    OutLse,
    new_result,
    new_sums,
    no_poll,
)
from mpipipe.attention.mask import Slice

OF_KEYS = ("k", "v", "dk", "dv")  # arrays along the keys; the others are along the queries
Named: TypeAlias = "dict[str, DeviceArray]"


def forward(block: KVBlock, result: OutLse, overwrite: bool) -> None:
    """As `AttentionKernel.forward`; `result` is C-contiguous, unless it is to be overwritten."""
    block = _fitting_block(block)
    if not overwrite:
        # Slices of the same queries, merged BLOCKS at once.
        # In a column each slice begins at the row where the one before ends.
        columns: list[list[Slice]] = []
        for part in sorted(block.slices, key=lambda part: part[:2]):
            if columns and columns[-1][-1].q_stop == part.q_start:
                columns[-1].append(part)
            else:
                columns.append([part])
        for first in range(0, len(columns), BLOCKS):
            pending = []
            for column in columns[first : first + BLOCKS]:
                start = column[0].q_start
                stop = column[-1].q_stop
                rows = new_result(block.q[:, start:stop], block.v, block.q.dtype, overwrite=True)
                for part in column:
                    _attend(block, part, rows, start)
                    block.poll()
                pending.append(PendingRows(*rows, np.int32(start), np.int32(stop)))
            merge(pending, result)
        return
    dtype = block.q.dtype
    target = result
    if result.out.dtype != dtype or not fits(result.out):
        target = new_result(block.q, block.v, dtype, overwrite)
    for part in block.slices:
        _attend(block, part, target, 0)
        block.poll()
    if target is not result:
        for place, x in zip(result, target):
            strided_copy(x, place)


def _attend(block: KVBlock, part: Slice, result: OutLse, start: int) -> None:
    """Set the result of one slice, from row `start` of `result` on."""
    rows = slice(part.q_start - start, part.q_stop - start)
    out = result.out[:, rows]
    place = result.lse[:, :, rows]
    lse = place
    if not place.flags.c_contiguous:
        lse = arrays.empty_like(place)
    given = _parts(dict(q=block.q, k=block.k, v=block.v), part) | dict(out=out, lse=lse)
    if not cudnn_graph.run(_plan("forward", given, block.scale, part), given):
        whole = part._replace(q_start=0, q_stop=out.shape[1], k_start=0, k_stop=given["k"].shape[1])
        cupy.forward(
            KVBlock(given["q"], given["k"], given["v"], block.scale, [whole]),
            OutLse(out, lse),
            True,
        )
    if lse is not place:
        strided_copy(lse, place)


def _plan(direction: str, given: Named, scale: float, part: Slice) -> cudnn_graph.GraphPlan | None:
    """The plan for one slice, None if cuDNN does not do it; adds to `given` what it takes too."""
    request = request_for(direction, given, scale, part)
    if request is None:
        return None
    if request.padded:
        where = arrays.cupy(), arrays.cupy().cuda.runtime.getDevice(), arrays.stream().ptr
        for x, name in (("q", "q_lengths"), ("k", "k_lengths")):
            given[name] = arrays.keep_for_graph(_full(*given[x].shape[:2], *where))
    return cudnn_graph.plan(request)


class _Pass(NamedTuple):
    """A backward with arrays that cuDNN takes."""

    block: KVBlock
    dout: DeviceArray
    result: OutLse

    def call(self, part: Slice, found: Named) -> tuple[cudnn_graph.GraphPlan | None, Named]:
        """The plan for one slice, and its arrays; `found` are dq, dk and dv of rows and keys."""
        block = self.block
        lse = self.result.lse[:, :, part.q_start : part.q_stop]
        if not lse.flags.c_contiguous:
            lse = copied(lse)
        whole = dict(dout=self.dout, q=block.q, k=block.k, v=block.v, out=self.result.out)
        given = _parts(whole, part) | found | dict(lse=lse)
        return _plan("backward", given, block.scale, part), given

    def add(self, sums: Gradients) -> None:
        """Add what each slice gives to `sums`."""
        for part in self.block.slices:
            places = _parts(sums._asdict(), part)
            dtype = self.block.q.dtype
            found = {name: arrays.empty_like(x, dtype) for name, x in places.items()}
            if cudnn_graph.run(*self.call(part, found)):
                for name, place in places.items():
                    strided_copy(found[name], place, add=True)
            else:
                alone = replace(self.block, slices=[part], poll=no_poll)
                cupy.backward(alone, self.dout, self.result, sums)
            self.block.poll()


def backward(
    block: KVBlock, dout: DeviceArray, result: OutLse, gradients: Gradients, overwrite: bool = False
) -> None:
    """As `AttentionKernel.backward`."""
    block = _fitting_block(block)
    work = _Pass(block, _fitting(dout), result._replace(out=_fitting(result.out)))
    if not overwrite:
        work.add(gradients)
        return
    names = gradients._asdict()
    keys = [(part.k_start, part.k_stop) for part in block.slices]
    fitting = all(x.dtype == block.q.dtype and fits(x) for x in gradients)
    if (
        fitting
        and mask.each_row_once(block.slices, block.q.shape[1])
        and mask.covers_once(keys, block.k.shape[1])
    ):
        calls = [work.call(part, _parts(names, part)) for part in block.slices]
        if all(plan is not None for plan, _ in calls):
            for call in calls:
                cudnn_graph.run(*call)
                block.poll()
            return
    sums = Gradients(*map(new_sums, (block.q, block.k, block.v)))
    work.add(sums)
    for found, target in zip(sums, gradients):
        strided_copy(found, target)


def _fitting_block(block: KVBlock) -> KVBlock:
    return replace(block, q=_fitting(block.q), k=_fitting(block.k), v=_fitting(block.v))


def _fitting(x: DeviceArray) -> DeviceArray:
    if fits(x):
        return x
    return copied(x)


def _parts(given: Named, part: Slice) -> Named:
    """Return the rows or keys of a slice of each array; whole arrays stay as they are.

    CuPy takes microseconds for a cut.
    """
    parts = {}
    for name, x in given.items():
        start, stop = part[2:4] if name in OF_KEYS else part[:2]
        parts[name] = x if (start, stop) == (0, x.shape[1]) else x[:, start:stop]
    return parts


@lru_cache(maxsize=64)
def _full(batch: int, length: int, _library: ModuleType, _device: int, _stream: int) -> DeviceArray:
    """`length` for each batch entry, on the device."""
    return arrays.upload(np.full(batch, length, np.int32))


# -- Results over several blocks of keys, kept apart until one kernel merges them ------------------
#
# Merging block by block would read and write the sum each time, in the accumulator dtype: 10 bytes
# an element for blocks in half precision. Merging BLOCKS at once reads each block once, and the sum
# once. The price is memory: that many outputs exist at a time.


MERGE = Path(__file__).with_name("merge.cu")
BLOCKS = 4  # blocks that the kernel takes


class PendingRows(NamedTuple):
    """The result of one block, which sees rows start ... stop - 1: four arguments of the kernel."""

    out: DeviceArray
    lse: DeviceArray
    start: np.int32
    stop: np.int32


def merge(blocks: Sequence[PendingRows], result: OutLse) -> None:
    """Merge at most BLOCKS blocks into a result in the accumulator dtype.

    All arrays are C-contiguous.
    """
    out, lse = result
    batch, seq, heads, dim = out.shape
    rows = batch * seq * heads
    vector_width = 1 + (dim % 2 == 0)
    if dim % 4 == 0 and dim >= 128:
        vector_width = 4
    # the kernel always takes BLOCKS blocks, and reads no block without rows
    nothing = blocks[0]._replace(start=np.int32(0), stop=np.int32(0))
    given = [x for block in [*blocks, *[nothing] * (BLOCKS - len(blocks))] for x in block]
    kernel = arrays.cuda_function(
        MERGE, "merge", T=blocks[0].out.dtype, A=out.dtype, V=vector_width
    )
    kernel(
        blocks_of(rows, THREADS // 32), (THREADS,),
        (*given, out, lse, np.int64(rows), *map(np.int32, (heads, seq, dim))),
    )  # fmt: skip
