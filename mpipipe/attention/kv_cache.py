"""Attention of a few new queries over many cached keys, which may be spread over the ranks of a communicator.

    rank 0   keys 0 ... c-1        (out, lse) of all queries over these keys  |
    rank 1   keys c ... 2c-1       (out, lse) of all queries over these keys  |  one all-gather, merged in rank order
    rank 2   keys 2c ... 3c-1      (out, lse) of all queries over these keys  |

Keys and values stay where they are. What travels grows with the queries and not with the keys, which is the right way
round for decoding (Shyam et al., "Tree attention", 2024); a ring, which moves keys, is for many queries. Every rank
merges the same parts in the same order, so all ranks get the same bits.
"""

from __future__ import annotations

import numpy as np

from mpipipe.arrays import accumulator, aligned_empty, is_device
from mpipipe.attention import kernels, mask
from mpipipe.attention.accumulate import cast
from mpipipe.attention.kernels import host
from mpipipe.attention.local import check_arrays
from mpipipe.attention.merge import merge
from mpipipe.comm.group import Group, group_of
from mpipipe.comm.requests import own
from mpipipe.errors import ArgumentError


class Cached:
    """What SelfAttention attends with in one layer of a model that decodes: the keys and values so far are kept.

    Parameters
    ----------
    capacity : number of positions that there may be in all
    comm : ranks that share the cache, each of which brings the same queries, keys and values and gets the same result;
        None: this rank alone. The constructor is collective over it, as is `forward`.
    window : a query sees itself and the window - 1 positions before it
    scale : of the scores; default 1 / sqrt(head_dim)

    Rank r of N keeps positions r c ... (r + 1) c - 1, c = ceil(capacity / N), so a prompt that fills most of the
    capacity is spread evenly. There is no backward: a cache is for models that only run forward, one sequence of
    positions at a time.

    Attributes
    ----------
    length : positions so far
    first, stop : this rank keeps positions first ... stop - 1
    """

    def __init__(self, capacity: int, comm=None, window: int | None = None, scale: float | None = None):
        if not isinstance(capacity, (int, np.integer)) or capacity < 1:
            raise ArgumentError(
                "capacity of a cache", found=repr(capacity), expected="an integer of at least 1, the positions in all"
            )
        mask.check_window(True, window)
        mask.check_scale(scale)
        self.capacity, self.window, self.scale = int(capacity), window, scale
        self.group = _group(comm)
        size, rank = (1, 0) if self.group is None else (self.group.size, self.group.rank)
        part = -(-self.capacity // size)
        self.first, self.stop = (min(r * part, self.capacity) for r in (rank, rank + 1))
        self.poll = host.nothing
        self.clear()

    def clear(self):
        """Forget all positions."""
        self.length = 0
        self._kept: list[np.ndarray] = []  # keys and values, once their shapes are known

    def positions(self, rows: int) -> np.ndarray:
        """Positions of the next `rows` rows, which SelfAttention asks for."""
        return np.arange(self.length, self.length + rows)

    def forward(self, q, k, v):
        """Append the keys and values of p new positions, and attend to all so far; returns (out, None).

        q (batch, p, heads, head_dim), k and v (batch, p, kv_heads, ...), host arrays of one dtype, as for
        attention.Local, the same on every rank; out (batch, p, heads, head_dim of v). Raises ArgumentError on every
        rank, before anything is appended, where the arrays do not fit or differ in shape between ranks, or the capacity
        is exceeded.
        """
        _agree(self.group, lambda: self._facts(q, k, v))
        start, end = self.length, self.length + k.shape[1]
        keys, values = self._append(k, v, end)
        out = _attend(self.group, q, keys, values, start, self.first, self.window, self.scale, self.poll)
        self.length = end
        return out, None

    def _facts(self, q, k, v) -> dict:
        facts = _facts(q, k, v, self.length, self.window, self.scale)
        if q.shape[1] != k.shape[1]:
            raise ArgumentError(
                "a cache takes queries, keys and values of the same new positions",
                found=f"{q.shape[1]} queries, {k.shape[1]} keys",
                expected="as many keys as queries",
            )
        if self.length + k.shape[1] > self.capacity:
            raise ArgumentError(
                "the capacity of the cache is exceeded",
                found=f"{self.length} positions and {k.shape[1]} more",
                expected=f"{self.capacity} in all",
                remedy="make the cache with a larger capacity, or clear() it before a new text",
            )
        for name, x, kept in zip("kv", (k, v), self._kept):
            wanted = kept.shape[0], k.shape[1], kept.shape[2], kept.shape[3]
            if x.shape != wanted or x.dtype != kept.dtype:
                raise ArgumentError(
                    f"{name} does not fit to what is in the cache",
                    found=f"{x.shape} {x.dtype}",
                    expected=f"{wanted} {kept.dtype}",
                    remedy="clear() the cache before a text of another kind",
                )
        return facts | {"capacity": self.capacity}

    def _append(self, k, v, end):
        """Keep what is this rank's of positions length ... end - 1; returns views of all that it has."""
        if not self._kept:
            self._kept = [_storage(x, self.stop - self.first) for x in (k, v)]
        low, high = max(self.length, self.first), min(end, self.stop)
        if low < high:
            for kept, x in zip(self._kept, (k, v)):
                kept[:, low - self.first : high - self.first] = x[:, low - self.length : high - self.length]
        filled = max(0, high - self.first)
        return [kept[:, :filled] for kept in self._kept]


def decode_attention(q, k, v, comm=None, *, start: int, first: int, window=None, scale=None):
    """Causal attention of a few queries over keys and values of which each rank has a part; the same on every rank.

    Parameters
    ----------
    q : (batch, p, heads, head_dim), at positions start ... start + p - 1; the same on every rank
    k, v : (batch, c, kv_heads, ...), this rank's keys and values, at positions first ... first + c - 1; c may differ
        between ranks, and be 0. No position lies on two ranks.
    comm : the ranks, None for this one alone; collective. A private duplicate is made at the first call, and freed
        with `comm`.
    window, scale : as for `Cached`

    Returns out (batch, p, heads, head_dim of v), 0 where a query sees no key. Raises ArgumentError on every rank where
    the arrays of one do not fit, and MismatchError where the ranks differ in what must be the same.
    """
    group = _group(comm)
    _agree(group, lambda: _facts(q, k, v, start, window, scale))
    return _attend(group, q, k, v, start, first, window, scale)


def _attend(group, q, k, v, start, first, window, scale, poll=host.nothing):
    batch, rows, heads, dim = q.shape
    width = v.shape[3]
    split = batch * rows * heads * width
    slices = mask.plan([mask.Run(0, rows, start, 1)], [mask.Run(0, k.shape[1], first, 1)], True, window)
    fresh = len(slices) == 1 and slices[0].q_stop - slices[0].q_start == rows

    def unpack(message):
        """Views (out, lse) of a message."""
        return message[:split].reshape(batch, rows, heads, width), message[split:].reshape(batch, heads, rows)

    sum_dtype = accumulator(q.dtype)
    message = aligned_empty(split + batch * heads * rows, sum_dtype)
    out, lse = unpack(message)
    if not fresh:
        out.fill(0)
        lse.fill(-np.inf)
    scale = dim**-0.5 if scale is None else scale
    if group is None:
        kernels.chosen().forward(q, k, v, scale, slices, out, lse, fresh, poll)
        return cast(out, q.dtype)
    parts = np.empty((group.size, message.size), sum_dtype)
    with group.failing("decode_attention"):
        kernels.chosen().forward(q, k, v, scale, slices, out, lse, fresh, poll)
        group.wait(own(group.comm.Iallgather(message, parts)), "the parts of attention", everyone=True)
    out, lse = unpack(parts[0])
    for part in parts[1:]:
        block_out, block_lse = unpack(part)
        merge(out, lse.swapaxes(1, 2), block_out, block_lse.swapaxes(1, 2))
    return cast(out, q.dtype)


def _storage(x, rows):
    """An array for `rows` rows like those of x, in which the rows of one head lie together: kernels need no copy."""
    batch, _, heads, dim = x.shape
    return aligned_empty((batch, heads, rows, dim), x.dtype).swapaxes(1, 2)


def _facts(q, k, v, start, window, scale) -> dict:
    """What must be the same on all ranks; raises ArgumentError where this rank's arrays do not fit together."""
    mask.check_window(True, window)
    mask.check_scale(scale)
    kernels.chosen()  # a rank without it must not leave the others waiting
    check_arrays(q, k, v)
    if is_device(q):
        raise ArgumentError(
            "a cache of keys and values is kept on the host",
            found="device arrays",
            expected="numpy arrays",
            remedy="build the model that generates with device='cpu'",
        )
    facts = {"q": q.shape, "kv_heads": k.shape[2], "value_dim": v.shape[3], "dtype": q.dtype.name}
    window, scale = None if window is None else int(window), None if scale is None else float(scale)
    return facts | {"start": int(start), "window": window, "scale": scale}


def _agree(group: Group | None, find):
    """Compare the facts that `find()` returns or refuses; an error, or a difference, raises on every rank."""
    if group is None:
        find()
        return
    error, facts = None, {}
    try:
        facts = find()
    except Exception as caught:
        error = caught
    remedy = "give the same new positions to all ranks"
    group.agree("decode_attention", tuple(facts.items()), error=error, remedy=remedy)


def _group(comm) -> Group | None:
    """The ranks that share a cache; None where there is nobody to talk to."""
    return None if comm is None or comm.size == 1 else group_of(comm)
