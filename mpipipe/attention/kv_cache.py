"""Keys and values of all positions so far, for one layer of a model that decodes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np

from mpipipe.arrays import Array, aligned_empty
from mpipipe.attention import mask
from mpipipe.attention.decode import agree_on_facts, attend_over_ranks, causal_block, shared_facts, sharing_group
from mpipipe.attention.kernels import no_poll
from mpipipe.comm.types import Communicator
from mpipipe.errors import ArgumentError
from mpipipe.nn.layers.attend import Attend


class KVCache(Attend):
    """Causal attention that keeps the keys and values of all positions so far, in one layer of a model that decodes.

    Rank r of N keeps positions r c ... (r + 1) c - 1 with c = ceil(capacity / N), so a prompt that fills most of the
    capacity is spread evenly. There is no backward. A cache holds one sequence of positions at a time, on the host.

    Parameters
    ----------
    capacity : int
        Number of positions that there may be in all.
    comm : mpi4py.MPI.Comm, optional
        Ranks that share the cache. Each brings the same queries, keys and values, and gets the same result. The
        constructor and `forward` are collective over it. None: this rank alone.
    window : int, optional
        A query sees itself and the window - 1 positions before it.
    scale : float, optional
        Factor on the scores, finite and above 0; default 1 / sqrt(head_dim).

    Attributes
    ----------
    length : int
        Positions so far.
    first, stop : int
        This rank keeps positions first ... stop - 1.
    poll : callable
        Called after each tile.

    Raises
    ------
    ArgumentError
        For a capacity, a window or a scale that makes no sense.

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
        self, capacity: int, comm: Communicator | None = None, window: int | None = None, scale: float | None = None
    ) -> None:
        if not isinstance(capacity, (int, np.integer)) or capacity < 1:
            raise ArgumentError(
                "capacity of a cache", found=repr(capacity), expected="an integer of at least 1, the positions in all"
            )
        mask.check_window(True, window)
        mask.check_scale(scale)
        self.capacity, self.window, self.scale = int(capacity), window, scale
        self.group = sharing_group(comm)
        size, rank = (1, 0) if self.group is None else (self.group.size, self.group.rank)
        part = -(-self.capacity // size)
        self.first, self.stop = (min(r * part, self.capacity) for r in (rank, rank + 1))
        self.poll: Callable[[], object] = no_poll
        self.clear()

    def clear(self) -> None:
        """Drop all positions."""
        self.length = 0
        self._kept: list[np.ndarray] = []  # keys and values, once their shapes are known

    def positions(self, rows: int) -> np.ndarray:
        """Return the positions of the next rows.

        Parameters
        ----------
        rows : int
            Number of rows.

        Returns
        -------
        numpy.ndarray
            length ... length + rows - 1.
        """
        return np.arange(self.length, self.length + rows)

    def advance(self, rows: int) -> None:
        """Count new positions without keys and values, for a layer that asks for positions alone.

        Parameters
        ----------
        rows : int
            Number of rows.

        Raises
        ------
        ArgumentError
            If they exceed the capacity.
        """
        self._check_room(rows)
        self.length += rows

    def forward(self, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, None]:
        """Append the keys and values of p new positions, and attend to all positions so far; collective.

        Parameters
        ----------
        q : numpy.ndarray
            (batch, p, heads, head_dim), the same on every rank.
        k : numpy.ndarray
            (batch, p, kv_heads, head_dim), the same on every rank.
        v : numpy.ndarray
            (batch, p, kv_heads, value_dim), the same on every rank.

        Returns
        -------
        out : numpy.ndarray
            (batch, p, heads, value_dim), with the same bits on every rank.
        saved : None

        Raises
        ------
        ArgumentError
            If the arrays do not fit together or to the cache, or exceed its capacity. Nothing is appended then.
        MismatchError
            If arrays differ in shape between ranks.
        """
        kernel = agree_on_facts(self.group, lambda: self._facts(q, k, v))
        start, end = self.length, self.length + k.shape[1]
        keys, values = self._append(k, v, end)
        block = causal_block(q, keys, values, start=start, first=self.first, window=self.window, scale=self.scale)
        out = attend_over_ranks(self.group, kernel, replace(block, poll=self.poll))
        self.length = end
        return out, None

    def backward(self, dout: Array, saved: None) -> NoReturn:
        """Raise ArgumentError: a cache is for models that only run forward.

        Parameters
        ----------
        dout : array
            Not used.
        saved : None
            Not used.

        Raises
        ------
        ArgumentError
            Always.
        """
        raise ArgumentError(
            "a cache of keys and values has no backward",
            expected="a model that only runs forward",
            remedy="train with attention.Local or attention.Ring",
        )

    def _facts(self, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> dict[str, Any]:
        facts = shared_facts(q, k, v, start=self.length, window=self.window, scale=self.scale)
        if q.shape[1] != k.shape[1]:
            raise ArgumentError(
                "a cache takes queries, keys and values of the same new positions",
                found=f"{q.shape[1]} queries, {k.shape[1]} keys",
                expected="as many keys as queries",
            )
        self._check_room(k.shape[1])
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

    def _check_room(self, rows: int) -> None:
        if self.length + rows > self.capacity:
            raise ArgumentError(
                "the capacity of the cache is exceeded",
                found=f"{self.length} positions and {rows} more",
                expected=f"{self.capacity} in all",
                remedy="make the cache with a larger capacity, or clear() it before a new text",
            )

    def _append(self, k: np.ndarray, v: np.ndarray, end: int) -> list[np.ndarray]:
        """Keep this rank's part of positions length ... end - 1; returns views of all that it has."""
        if not self._kept:
            self._kept = [_storage(x, self.stop - self.first) for x in (k, v)]
        low, high = max(self.length, self.first), min(end, self.stop)
        if low < high:
            for kept, x in zip(self._kept, (k, v)):
                kept[:, low - self.first : high - self.first] = x[:, low - self.length : high - self.length]
        filled = max(0, high - self.first)
        return [kept[:, :filled] for kept in self._kept]


def _storage(x: np.ndarray, rows: int) -> np.ndarray:
    """An array for `rows` rows like those of x, in which the rows of one head lie together: kernels need no copy."""
    batch, _, heads, dim = x.shape
    return aligned_empty((batch, heads, rows, dim), x.dtype).swapaxes(1, 2)


Cached = KVCache  # an older name
