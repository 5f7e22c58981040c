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
from typing import Any, NamedTuple

import numpy as np

from mpipipe.arrays import accumulator, aligned_empty, cast, is_device
from mpipipe.attention import kernels, mask
from mpipipe.attention.kernels import AttentionKernel, KVBlock, OutLse, no_poll
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
    window, scale : int and float, optional
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
    group, options = sharing_group(comm), CacheOptions(window, scale)
    kernel = agree_on_facts(group, lambda: options.facts(q, k, v, start))
    return options.attend(group, kernel, (q, k, v), start, first)


class CacheOptions(NamedTuple):
    """How queries see cached keys, the same on all ranks."""

    window: int | None
    scale: float | None

    def check(self) -> None:
        """Raise ArgumentError for an option without sense."""
        mask.check_window(True, self.window)
        mask.check_scale(self.scale)

    def facts(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, start: int) -> dict[str, Any]:
        """What must be the same on all ranks; raises ArgumentError if this rank's arrays do not fit together."""
        self.check()
        check_arrays(q, k, v)
        if is_device(q):
            raise ArgumentError(
                "a cache of keys and values is kept on the host",
                found="device arrays",
                expected="numpy arrays",
                remedy="build the model that generates with device='cpu'",
            )
        window, scale = self
        facts = {"q": q.shape, "kv_heads": k.shape[2], "value_dim": v.shape[3], "dtype": q.dtype.name}
        window, scale = None if window is None else int(window), None if scale is None else float(scale)
        return facts | {"start": int(start), "window": window, "scale": scale}

    def attend(
        self,
        group: RankGroup | None,
        kernel: AttentionKernel,
        qkv: tuple[np.ndarray, np.ndarray, np.ndarray],
        start: int,
        first: int,
        poll: Callable[[], object] = no_poll,
    ) -> np.ndarray:
        """Attend from position `start` on to this rank's keys from position `first` on, and merge what ranks find."""
        (q, k, v), (window, scale) = qkv, self
        queries, keys = PositionRange(0, q.shape[1], start, 1), PositionRange(0, k.shape[1], first, 1)
        slices = mask.mask_slices([queries], [keys], True, window)
        block = KVBlock(q, k, v, q.shape[3] ** -0.5 if scale is None else scale, slices, poll)

        def attend(result: OutLse) -> None:
            overwrite = mask.each_row_once(slices, q.shape[1])
            if not overwrite:
                nothing_yet(result)
            kernel.forward(block, result, overwrite)

        return merged_over_ranks(group, q, v.shape[3], attend)


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


def agree_on_facts(group: RankGroup | None, find: Callable[[], dict[str, Any]]) -> AttentionKernel:
    """Compare the facts that `find` returns or refuses, and return this rank's kernel.

    An error on one rank, or a difference, raises on every rank.
    """
    error: Exception | None = None
    facts: dict[str, Any] = {}
    try:
        facts = find()
        kernel = kernels.chosen()  # a rank without it must not leave the others waiting
    except Exception as caught:
        error = caught
    if group is not None:
        remedy = "give the same new positions to all ranks"
        group.agree("decode_attention", tuple(facts.items()), error=error, remedy=remedy)
    elif error is not None:
        raise error
    return kernel


def sharing_group(comm: Communicator | None) -> RankGroup | None:
    """The ranks that share a cache; None if there is only this one."""
    return None if comm is None or comm.size == 1 else group_of(comm)
