"""Keys and values of all positions so far, for one layer of a model that decodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import numpy as np

from mpipipe.arrays import Array, accumulator, cast, is_device
from mpipipe.attention import kernels, mask
from mpipipe.attention.kernels import KVBlock, no_poll
from mpipipe.attention.kernels.interface import attend_once, check_arrays, rows_like
from mpipipe.attention.mask import PositionRange
from mpipipe.errors import ArgumentError
from mpipipe.nn import Attend


class KVCache(Attend):
    """Causal attention of one layer that keeps the keys and values of all positions so far.

    There is no backward. A cache holds one sequence of positions at a time, on the host.

    Parameters
    ----------
    capacity : int
        Number of positions that there may be in all.
    window, scale : int and float, optional
        As for `Local`.

    Attributes
    ----------
    length : int
        Positions so far.
    poll : callable
        Called after each tile.

    Examples
    --------
    >>> import numpy as np
    >>> from mpipipe.attention import KVCache, Local
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 1, 6, 2, 8))
    >>> cache = KVCache(capacity=10)
    >>> prompt, _ = cache.forward(q[:, :5], k[:, :5], v[:, :5])
    >>> new, _ = cache.forward(q[:, 5:], k[:, 5:], v[:, 5:])
    >>> cache.length
    6
    >>> bool(np.allclose(new, Local(causal=True).forward(q, k, v)[0][:, 5:]))
    True
    """

    def __init__(
        self, capacity: int, window: int | None = None, scale: float | None = None
    ) -> None:
        mask.check_window(True, window)
        mask.check_scale(scale)
        self.capacity = capacity
        self.window = window
        self.scale = scale
        self.poll: Callable[[], object] = no_poll
        self.clear()

    def clear(self) -> None:
        """Drop all positions."""
        self.length = 0
        self._kept: list[np.ndarray] = []  # keys and values, once their shapes are known

    def positions(self, rows: int) -> np.ndarray:
        return np.arange(self.length, self.length + rows)

    def advance(self, rows: int) -> None:
        self._check_room(rows)
        self.length += rows

    def forward(self, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, None]:
        """Append the keys and values of p new positions, and attend to all positions so far.

        Parameters
        ----------
        q, k, v : numpy.ndarray
            (batch, p, heads, head_dim), (batch, p, kv_heads, head_dim) and (batch, p, kv_heads,
            value_dim).

        Returns
        -------
        out : numpy.ndarray
            (batch, p, heads, value_dim).
        saved : None

        Raises
        ------
        ArgumentError
            If arrays do not fit together or to the cache, or exceed its capacity. Nothing is
            appended then.
        """
        self._check(q, k, v)
        kernel = kernels.chosen(q, k, v)
        start = self.length
        rows = k.shape[1]
        if not self._kept:
            self._kept = [rows_like(x, self.capacity, x.dtype) for x in (k, v)]
        self.length = start + rows
        for kept, x in zip(self._kept, (k, v)):
            kept[:, start : self.length] = x
        low = 0
        if self.window is not None:
            low = max(0, start + 1 - self.window)
        keys, values = (kept[:, low : self.length] for kept in self._kept)
        scale = self.scale
        if scale is None:
            scale = q.shape[3] ** -0.5
        if rows == 1:
            return _attend_one(q, keys, values, scale), None
        queries = PositionRange(0, rows, start, 1)
        seen = PositionRange(0, self.length - low, low, 1)
        slices = mask.mask_slices([queries], [seen], True, self.window)
        block = KVBlock(q, keys, values, scale, slices, self.poll)
        return attend_once(kernel, block, mask.each_row_once(slices, rows)).out, None

    def backward(self, dout: Array, saved: None, room: object = None) -> NoReturn:
        raise ArgumentError(
            "a cache of keys and values has no backward",
            expected="a model that only runs forward",
            remedy="train with attention.Local or attention.Ring",
        )

    def _check(self, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
        check_arrays(q, k, v)
        if is_device(q):
            raise ArgumentError(
                "a cache of keys and values is kept on the host",
                found="device arrays",
                expected="numpy arrays",
                remedy="build the model that generates with device='cpu'",
            )
        if q.shape[1] != k.shape[1]:
            raise ArgumentError(
                "a cache takes queries, keys and values of the same new positions",
                found=f"{q.shape[1]} queries, {k.shape[1]} keys",
                expected="as many keys as queries",
            )
        self._check_room(k.shape[1])
        for name, x, kept in zip("kv", (k, v), self._kept):
            if (len(x), *x.shape[2:], x.dtype) != (len(kept), *kept.shape[2:], kept.dtype):
                raise ArgumentError(
                    f"{name} does not fit to what is in the cache",
                    found=f"{x.shape} {x.dtype}",
                    expected=f"{kept.dtype} with all axes but the second of {kept.shape}",
                    remedy="clear() the cache before a text of another kind",
                )

    def _check_room(self, rows: int) -> None:
        if self.length + rows > self.capacity:
            raise ArgumentError(
                "the capacity of the cache is exceeded",
                found=f"{self.length} positions and {rows} more",
                expected=f"{self.capacity} in all",
                remedy="make the cache with a larger capacity, or clear() it before a new text",
            )


def _attend_one(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float) -> np.ndarray:
    """Attend with one query of each head to all keys at once.

    The query is (batch, 1, heads, dim), keys are (batch, keys, kv_heads, dim).

    The kernels go head by head, in tiles made for many queries.
    """
    batch, _, heads, dim = q.shape
    sums = accumulator(q.dtype)
    keys, values = (x.swapaxes(1, 2).astype(sums, copy=False) for x in (k, v))
    queries = np.multiply(q, scale, dtype=sums).reshape(batch, k.shape[2], -1, dim)
    scores = np.matmul(queries, keys.swapaxes(2, 3))
    np.subtract(scores, scores.max(3, keepdims=True), out=scores)
    np.exp(scores, out=scores)
    out = np.matmul(scores, values)
    np.divide(out, scores.sum(3, keepdims=True), out=out)
    return cast(out.reshape(batch, 1, heads, v.shape[3]), q.dtype)
