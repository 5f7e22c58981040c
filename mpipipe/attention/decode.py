"""Attention of a few new queries over many cached keys, which may be spread over the ranks of a communicator.

    rank 0   keys 0 ... c-1        (out, lse) of all queries over these keys  |
    rank 1   keys c ... 2c-1       (out, lse) of all queries over these keys  |  one all-gather, merged in rank order
    rank 2   keys 2c ... 3c-1      (out, lse) of all queries over these keys  |

Keys and values stay where they are. What travels grows with the queries and not with the keys, which suits decoding
(Shyam et al., "Tree attention", 2024). A ring moves keys, which suits many queries. Every rank merges the same parts in
the same order, so all ranks get the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from mpipipe.arrays import accumulator, aligned_empty, cast, is_device
from mpipipe.attention import kernels, mask
from mpipipe.attention.bias import Bias, BiasFunction, evaluated, name_of
from mpipipe.attention.kernels import AttentionKernel, KVBlock, OutLse
from mpipipe.attention.kernels.interface import check_arrays
from mpipipe.attention.mask import PositionRange
from mpipipe.attention.merge import merge
from mpipipe.errors import ArgumentError
from mpipipe.job import Communicator, RankGroup, group_of, own


def decode_attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    comm: Communicator | None = None,
    *,
    start: int,
    first: int,
    window: int | None = None,
    scale: float | None = None,
    bias: BiasFunction | None = None,
) -> np.ndarray:
    """Attend causally from a few queries to keys and values that are spread over the ranks; collective.

    The first call on a communicator makes a private duplicate of it, which is freed with it.

    Parameters
    ----------
    q : numpy.ndarray
        (batch, p, heads, head_dim), at positions start ... start + p - 1; the same on every rank.
    k, v : numpy.ndarray
        (batch, c, kv_heads, head_dim or value_dim), this rank's keys and values, at positions first ... first + c - 1.
        c may differ between ranks, and be 0. No position lies on two ranks.
    comm : mpi4py.MPI.Comm, optional
        The ranks; None: this one alone.
    start, first : int
        Position of the first query, and of this rank's first key.
    window, scale, bias : int and float and callable, optional
        As for `Local`.

    Returns
    -------
    numpy.ndarray
        (batch, p, heads, value_dim), with the same bits on every rank. 0 where a query sees no key.

    Raises
    ------
    ArgumentError, MismatchError
        If arrays of a rank do not fit together, or ranks differ in what must be the same.

    Examples
    --------
    Two threads stand for two MPI ranks here:

    >>> import numpy as np
    >>> from mpipipe.attention import Local, decode_attention
    >>> from mpipipe.job import inprocess
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 1, 6, 2, 8))
    >>> def on_each_rank(comm):
    ...     own = slice(3 * comm.rank, 3 * comm.rank + 3)
    ...     return decode_attention(q[:, 5:], k[:, own], v[:, own], comm, start=5, first=own.start)
    >>> out, _ = inprocess.run(2, on_each_rank)
    >>> bool(np.allclose(out, Local(causal=True).forward(q, k, v)[0][:, 5:]))
    True
    """
    group = sharing_group(comm)
    options: Any = {"start": start, "window": window, "scale": scale, "bias": bias}
    kernel = agree_on_facts(group, lambda: shared_facts(q, k, v, **options), bias)
    return attend_over_ranks(group, kernel, causal_block(q, k, v, first=first, **options))


def causal_block(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    start: int,
    first: int,
    window: int | None,
    scale: float | None,
    bias: BiasFunction | None,
) -> KVBlock:
    """Return the work of queries from position `start` on keys from position `first`."""
    queries, keys = PositionRange(0, q.shape[1], start, 1), PositionRange(0, k.shape[1], first, 1)
    slices = mask.mask_slices([queries], [keys], True, window)
    block = KVBlock(q, k, v, q.shape[3] ** -0.5 if scale is None else scale, slices)
    if bias is None:
        return block
    places = (np.arange(begin, begin + x.shape[1]) for x, begin in ((q, start), (k, first)))
    return replace(block, bias=Bias(bias, *places))


def attend_over_ranks(group: RankGroup | None, kernel: AttentionKernel, block: KVBlock) -> np.ndarray:
    """Attend to this rank's block, and merge the results of all ranks."""

    def attend(result: OutLse) -> None:
        overwrite = mask.each_row_once(block.slices, block.q.shape[1])
        if not overwrite:
            nothing_yet(result)
        kernel.forward(block, result, overwrite)

    return merged_over_ranks(group, block.q, block.v.shape[3], attend)


def merged_over_ranks(
    group: RankGroup | None, q: np.ndarray, width: int, attend: Callable[[OutLse], object]
) -> np.ndarray:
    """Let `attend` set what queries find on this rank, and merge the results of all ranks.

    Returns (batch, rows, heads, width) for queries (batch, rows, heads, head_dim), with the same bits on every rank.
    """
    batch, rows, heads, _ = q.shape
    split = batch * rows * heads * width

    def unpack(message: np.ndarray) -> OutLse:
        return OutLse(message[:split].reshape(batch, rows, heads, width), message[split:].reshape(batch, heads, rows))

    sum_dtype = accumulator(q.dtype)
    message = aligned_empty(split + batch * heads * rows, sum_dtype)
    result = unpack(message)
    if group is None:
        attend(result)
        return cast(result.out, q.dtype)
    parts = np.empty((group.size, message.size), sum_dtype)
    with group.failing("decode_attention"):
        attend(result)
        group.wait(own(group.comm.Iallgather(message, parts)), "the parts of attention", everyone=True)
    out, lse = unpack(parts[0])
    for part in parts[1:]:
        block_out, block_lse = unpack(part)
        merge(out, lse.swapaxes(1, 2), block_out, block_lse.swapaxes(1, 2))
    return cast(out, q.dtype)


def nothing_yet(result: OutLse) -> None:
    """Set a result to that of queries which have seen no key."""
    result.out.fill(0)
    result.lse.fill(-np.inf)


def shared_facts(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    start: int,
    window: int | None,
    scale: float | None,
    bias: BiasFunction | None,
) -> dict[str, Any]:
    """What must be the same on all ranks; raises ArgumentError if this rank's arrays do not fit together."""
    mask.check_window(True, window)
    mask.check_scale(scale)
    check_arrays(q, k, v)
    if is_device(q):
        raise ArgumentError(
            "a cache of keys and values is kept on the host",
            found="device arrays",
            expected="numpy arrays",
            remedy="build the model that generates with device='cpu'",
        )
    if bias is not None:  # on all ranks, also on those without keys
        evaluated(bias, q.shape[2], np.array([[start]]), np.array([start]))
    facts = {"q": q.shape, "kv_heads": k.shape[2], "value_dim": v.shape[3], "dtype": q.dtype.name}
    window, scale = None if window is None else int(window), None if scale is None else float(scale)
    return facts | {"start": int(start), "window": window, "scale": scale, "bias": name_of(bias)}


def agree_on_facts(
    group: RankGroup | None, find: Callable[[], dict[str, Any]], bias: BiasFunction | None
) -> AttentionKernel:
    """Compare the facts that `find` returns or refuses, and return this rank's kernel.

    An error on one rank, or a difference, raises on every rank.
    """
    if group is None:
        find()
        return kernels.chosen(bias=bias)
    error: Exception | None = None
    facts: dict[str, Any] = {}
    try:
        facts = find()
        kernels.chosen(bias=bias)  # a rank without it must not leave the others waiting
    except Exception as caught:
        error = caught
    remedy = "give the same new positions to all ranks"
    group.agree("decode_attention", tuple(facts.items()), error=error, remedy=remedy)
    return kernels.chosen(bias=bias)


def sharing_group(comm: Communicator | None) -> RankGroup | None:
    """The ranks that share a cache; None if there is only this one."""
    return None if comm is None or comm.size == 1 else group_of(comm)
