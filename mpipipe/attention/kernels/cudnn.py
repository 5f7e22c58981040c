"""Exact attention on a GPU in half precision by cuDNN's fused kernels.

The functions are those of `host`, on device arrays of float16 or bfloat16. What cuDNN does not do is done by `cupy`:
single slices where one is refused here, everything where `refusal` gives a reason. cuDNN writes results in the dtype of
its inputs: where blocks add up, a block's result goes to memory of its own, and our kernels add in float32.

cuDNN's backward is free to sum in any order, so repeated calls differ in the last bits. MPIPIPE_DETERMINISTIC=1 asks
for its other algorithm, which is slower and needs memory for all scores of the heads that it does together.
"""

from __future__ import annotations

import os
from functools import lru_cache

import numpy as np

from mpipipe import arrays
from mpipipe.arrays.strided import copied, element_strides, strided_copy
from mpipipe.attention import mask
from mpipipe.attention.kernels import cudnn_graph, cupy
from mpipipe.attention.kernels.cudnn_graph import Request
from mpipipe.attention.kernels.cudnn_library import available
from mpipipe.attention.kernels.host import nothing
from mpipipe.attention.kernels.pending_blocks import PendingBlocks

__all__ = ["available", "backward", "forward", "refusal"]

DETERMINISTIC = "MPIPIPE_DETERMINISTIC"
DETERMINISTIC_BYTES = 1 << 32  # of scores that the deterministic backward may hold at once, in half precision
TILE = 128  # rows and columns of cuDNN's tiles
WIDEST, WIDEST_MIXED = 256, 128  # head dimension, and where values have another one than keys
WORD = 16  # bytes: rows begin at multiples of this
OF_KEYS = ("k", "v", "dk", "dv")  # arrays along the keys, not along the queries


def refusal(q, k, v) -> str:
    """Why cuDNN does not do attention of these arrays; empty where it does."""
    dim, width = q.shape[3], v.shape[3]
    if not arrays.is_half(q.dtype):
        return f"cuDNN computes attention in float16 and bfloat16, not in {q.dtype}"
    if dim % 8 or width % 8:
        return f"head dimensions {dim} (keys) and {width} (values) are not both multiples of 8"
    widest = WIDEST if dim == width else WIDEST_MIXED
    if max(dim, width) > widest:
        return f"head dimensions {dim} (keys) and {width} (values) are above {widest}"
    return ""


class Total:
    """The result over the blocks of keys so far of queries like q, with values like v; see results.Sum."""

    def __init__(self, q, v, fresh):
        self.partials = PendingBlocks(q, v)

    def attend(self, q, k, v, scale, slices, poll=nothing):
        """Take one more block of keys."""
        if q.size and slices:
            _attend_blocks(q, k, v, scale, slices, self.partials, poll)

    def end(self):
        """(out, lse), out in the dtype of q."""
        return self.partials.merged()


def forward(q, k, v, scale, slices, out, lse, fresh, poll=nothing):
    """As host.forward; out and lse must be C-contiguous. out may also be of the dtype of lse where `fresh`."""
    if not out.size:
        return
    if not (fresh and out.dtype == q.dtype and _fits(out)):
        if fresh:
            total = Total(q, v, fresh)
            total.attend(q, k, v, scale, slices, poll)
            for target, found in zip((out, lse), total.end()):
                strided_copy(found, target)
        else:
            partials = PendingBlocks(q, v, sum=(out, lse))
            _attend_blocks(q, k, v, scale, slices, partials, poll)
            partials.merge_in_place()
        return
    q, k, v = (_fitting(x) for x in (q, k, v))
    for part in slices:
        _attend(q, k, v, scale, part, out, lse, 0)
        poll()


def _attend_blocks(q, k, v, scale, slices, partials, poll):
    q, k, v = (_fitting(x) for x in (q, k, v))
    for below in _one_below_the_other(slices):
        start = below[0].q_start
        out, lse = partials.block(start, below[-1].q_stop)
        for part in below:
            _attend(q, k, v, scale, part, out, lse, start)
            poll()


def _one_below_the_other(slices) -> list[list]:
    """The slices in lists, in each of which one begins at the row where the one before ends."""
    lists: list[list] = []
    for part in sorted(slices, key=lambda part: (part.q_start, part.q_stop)):
        if lists and lists[-1][-1].q_stop == part.q_start:
            lists[-1].append(part)
        else:
            lists.append([part])
    return lists


def _attend(q, k, v, scale, part, out, lse, start):
    """Set the result of one slice in out, which cuDNN takes as it is, and lse, whose first row is row `start`."""
    rows = slice(part.q_start - start, part.q_stop - start)
    out, place = out[:, rows], lse[:, :, rows]
    lse = place if place.flags.c_contiguous else arrays.empty(place.shape, place.dtype, "cuda")
    given = dict(q=q[:, part.q_start : part.q_stop], k=k[:, part.k_start : part.k_stop],
                 v=v[:, part.k_start : part.k_stop], out=out, lse=lse)  # fmt: skip
    request = _request("forward", given, scale, part)
    plan = None if request is None else cudnn_graph.plan(request)
    if plan is not None:
        cudnn_graph.run(plan, given)
    else:
        whole = part._replace(q_start=0, q_stop=out.shape[1], k_start=0, k_stop=given["k"].shape[1])
        cupy.forward(given["q"], given["k"], given["v"], scale, [whole], out, lse, True)
    if lse is not place:
        strided_copy(lse, place)


def backward(dout, q, k, v, out, lse, scale, slices, dq, dk, dv, poll=nothing, fresh=False):
    """As host.backward."""
    slices = [part for part in slices if out.size]
    given, results = _fitting_all(dout, q, k, v, out, lse), dict(dq=dq, dk=dk, dv=dv)
    if fresh and all(x.dtype == q.dtype and _fits(x) for x in results.values()):
        if mask.rows_once(slices, q.shape[1]) and mask.once(_keys(slices), k.shape[1]):
            calls = [_calls(given, scale, part, _parts(results, part)) for part in slices]
            if all(map(_ready, calls)):
                for each in calls:
                    _run(each)
                    poll()
                return
    sums = results
    if fresh:
        sums = {name: arrays.zeros(x.shape, lse.dtype, "cuda") for name, x in results.items()}
    _add_gradients(given, scale, slices, sums, poll)
    if fresh:
        for name, result in results.items():
            strided_copy(sums[name], result)


def block_gradients(dout, q, k, v, out, lse, scale, slices, dq, poll=nothing):
    """As results.block_gradients; dk and dv are of the dtype of q where no key is in two slices."""
    slices = [part for part in slices if out.size]
    given, ranges = _fitting_all(dout, q, k, v, out, lse), _keys(slices)
    if mask.apart(ranges):
        make = arrays.empty if mask.once(ranges, k.shape[1]) else arrays.zeros
        found = {name: make(x.shape, q.dtype, "cuda") for name, x in (("dk", k), ("dv", v))}
        results = [_parts(found, part) | _empty_like(_parts(dict(dq=dq), part), q.dtype) for part in slices]
        calls = [_calls(given, scale, part, parts) for part, parts in zip(slices, results)]
        if all(map(_ready, calls)):
            for each, part, parts in zip(calls, slices, results):
                _run(each)
                strided_copy(parts["dq"], dq[:, part.q_start : part.q_stop], add=True)
                poll()
            return found["dk"], found["dv"]
    sums = {name: arrays.zeros(x.shape, lse.dtype, "cuda") for name, x in (("dk", k), ("dv", v))}
    _add_gradients(given, scale, slices, dict(dq=dq) | sums, poll)
    return sums["dk"], sums["dv"]


def _add_gradients(given, scale, slices, sums, poll):
    """Add what each slice gives to each of `sums`."""
    for part in slices:
        places = _parts(sums, part)
        found = _empty_like(places, given["q"].dtype)
        calls = _calls(given, scale, part, found)
        if _ready(calls):
            _run(calls)
            for name, place in places.items():
                strided_copy(found[name], place, add=True)
        else:
            cupy.backward(given["dout"], given["q"], given["k"], given["v"], given["out"], given["lse"], scale, [part],
                          sums["dq"], sums["dk"], sums["dv"])  # fmt: skip
        poll()


def _fitting_all(dout, q, k, v, out, lse) -> dict:
    return dict(dout=_fitting(dout), q=_fitting(q), k=_fitting(k), v=_fitting(v), out=_fitting(out), lse=lse)


def _keys(slices) -> list[tuple[int, int]]:
    return [(part.k_start, part.k_stop) for part in slices]


def _parts(given, part) -> dict:
    """The part of the sequence of each array that a slice is about."""
    rows, keys = slice(part.q_start, part.q_stop), slice(part.k_start, part.k_stop)
    return {name: x[:, keys if name in OF_KEYS else rows] for name, x in given.items()}


def _empty_like(given, kind) -> dict:
    return {name: arrays.empty(x.shape, kind, "cuda") for name, x in given.items()}


def _ready(calls) -> bool:
    return all(plan is not None for _, plan in calls)


def _run(calls):
    for arguments, plan in calls:
        cudnn_graph.run(plan, arguments)


def _calls(given, scale, part, found) -> list[tuple]:
    """[(arrays of a call, plan or None), ...] for the backward of one slice: one call, or some heads in each.

    `found` are the places for dq, dk and dv of the rows and keys of the slice.
    """
    lse = given["lse"][:, :, part.q_start : part.q_stop]
    arguments = _parts({name: x for name, x in given.items() if name != "lse"}, part) | found
    arguments["lse"] = lse if lse.flags.c_contiguous else copied(lse)
    batch, seq, heads, _ = arguments["q"].shape
    keys, kv_heads = arguments["k"].shape[1:3]
    group, together, calls = heads // kv_heads, kv_heads, []
    if deterministic():
        together = min(kv_heads, max(1, DETERMINISTIC_BYTES // (2 * batch * group * seq * keys)))
    for first in range(0, kv_heads, together):
        call = arguments if together == kv_heads else _some_heads(arguments, first, together, group)
        request = _request("backward", call, scale, part)
        plan = None if request is None else cudnn_graph.plan(request)
        if request is not None and request.padded:
            call = call | _lengths(batch, seq, keys)
        calls.append((call, plan))
    return calls


def _some_heads(arguments, first, count, group) -> dict:
    """The arrays of `count` key heads, and of the query heads that see them."""
    theirs, own = slice(first, first + count), slice(first * group, (first + count) * group)
    call = {name: x[:, :, theirs if name in OF_KEYS else own] for name, x in arguments.items() if name != "lse"}
    return call | dict(lse=copied(arguments["lse"][:, own]))


def deterministic() -> bool:
    """Whether MPIPIPE_DETERMINISTIC asks for the same bits in every run."""
    return os.environ.get(DETERMINISTIC, "") not in ("", "0")


def _request(direction, given, scale, part) -> Request | None:
    """What to ask of cuDNN for one slice; None for what it is known not to do."""
    seq, keys = given["q"].shape[1], given["k"].shape[1]
    band = part.low is not None
    back = direction == "backward"
    if (back and seq == keys == 1) or (part.high is not None and part.high < 0) or (band and part.low > 0):
        return None
    if band and (seq > keys or _version() == (9, 14, 0)):  # windows are wrong in 9.14.0
        return None
    # Hopper's backward gives NaN for rows of very negative log-sum-exp and an odd number of half tiles of keys, unless
    # there is a mask of padding (NVIDIA/cudnn-frontend#628, #1072)
    padded = back and (keys % TILE != 0 or seq < TILE)
    shapes = tuple((name, *_described(name, x)) for name, x in given.items())
    low, high = (None if bound is None else int(bound) for bound in (part.low, part.high))
    return Request(direction, given["q"].dtype.name, shapes, float(scale), low, high, padded, back and deterministic())


def _version() -> tuple[int, ...]:
    return tuple(map(int, available().reason.split()[-1].split(".")))


def _described(name, x):
    """(shape, strides) of an array in cuDNN's order of axes: batch, heads, seq, dim."""
    if name == "lse":
        batch, heads, seq = x.shape
        return (batch, heads, seq, 1), (heads * seq, seq, 1, 1)
    (batch, seq, heads, dim), (b, s, h, d) = x.shape, element_strides(x)
    return (batch, heads, seq, dim), (b, h, s, d)


def _lengths(batch, seq, keys) -> dict:
    where = arrays.cupy(), arrays.cupy().cuda.runtime.getDevice(), arrays.stream().ptr
    return dict(q_lengths=_full(batch, seq, *where), k_lengths=_full(batch, keys, *where))


@lru_cache(maxsize=64)
def _full(batch, length, _library, _device, _stream):
    """`length` for each batch entry, on the device."""
    return arrays.upload(np.full(batch, length, np.int32))


def _fits(x) -> bool:
    """Whether cuDNN takes an array as it lies in memory."""
    apart = [stride for stride, extent in zip(x.strides[:3], x.shape) if extent > 1]
    aligned = all(stride > 0 and stride % WORD == 0 for stride in (*apart, arrays.address(x) or WORD))
    return aligned and (x.strides[3] == x.itemsize or x.shape[3] == 1)


def _fitting(x):
    return x if _fits(x) else copied(x)
