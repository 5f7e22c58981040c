"""Which parts of shards see each other: layouts, causality, windows, packed documents.

A shard is a few ranges of evenly spaced positions. Take a range of queries at a + d i and a range
of keys at b + d j. Causality (no key after its query) and a window of W (the query itself and the W
- 1 before it) both bound j - i:

    j - i <= floor((a - b) / d)                      causal
    j - i >= ceil((a - b - W + 1) / d)               window

So a pair of ranges needs a band of its matrix of scores. Documents cut ranges into shorter ones.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from mpipipe.errors import ArgumentError

UNMASKED = (None, None)  # both bounds of a slice


class PositionRange(NamedTuple):
    """Local rows start ... start + rows - 1, at positions first, first + stride, ..."""

    start: int
    rows: int
    first: int
    stride: int


class Slice(NamedTuple):
    """Query rows q_start ... q_stop - 1 against key rows k_start ... k_stop - 1.

    With i and j counted from q_start and k_start, row i sees key j if low <= j - i <= high. None is
    no bound.
    """

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    low: int | None
    high: int | None

    @property
    def pairs(self) -> int:
        """Number of (query, key) pairs that see each other."""
        rows = np.arange(self.q_stop - self.q_start)
        keys = self.k_stop - self.k_start
        first = np.zeros_like(rows)
        last = np.full_like(rows, keys)
        if self.low is not None:
            first = np.clip(rows + self.low, 0, keys)
        if self.high is not None:
            last = np.clip(rows + self.high + 1, 0, keys)
        return int(np.maximum(last - first, 0).sum())


def mask_slices(
    queries: Sequence[PositionRange],
    keys: Sequence[PositionRange],
    causal: bool,
    window: int | None = None,
    documents: Sequence[int] | None = None,
) -> list[Slice]:
    """The slices in which queries of one shard see keys of another.

    queries, keys : position ranges of the two shards
    causal : a query sees no later position
    window : a query sees itself and the window - 1 positions before it; needs causal
    documents : from `document_offsets`; a query sees its own document only
    """
    by_document = defaultdict(list)
    for document, key in _cut(keys, documents):
        by_document[document].append(key)
    slices = []
    for document, query in _cut(queries, documents):
        for key in by_document[document]:
            found = _band(query, key, causal, window)
            if found is not None:
                slices.append(found)
    return _joined(slices)


def _joined(slices: list[Slice]) -> list[Slice]:
    """Join unmasked slices of the same keys, then those of the same queries.

    Products are fewer and larger then.
    """
    # Places in a slice of the two ends of the axis that grows, and of the range that is equal.
    for start, stop, equal in ((0, 1, slice(2, 4)), (2, 3, slice(0, 2))):
        joined: list[Slice] = []
        for part in sorted(slices, key=lambda part: (part[equal], part[start])):
            last = part
            if joined:
                last = joined[-1]
            adjoins = (last[equal], last[stop]) == (part[equal], part[start])
            if adjoins and last[4:] == part[4:] == UNMASKED:
                joined[-1] = last._replace(q_stop=part.q_stop, k_stop=part.k_stop)
            else:
                joined.append(part)
        slices = joined
    return sorted(slices, key=lambda part: (part.k_start, part.q_start))


def in_one_band(slices: Sequence[Slice]) -> list[Slice]:
    """Join slices of the same queries where each query sees some key in both."""
    joined: list[Slice] = []
    for part in sorted(slices, key=lambda part: (part.q_start, part.q_stop, part.k_start)):
        last = part
        if joined:
            last = joined[-1]
        if (*last[:2], last.k_stop, last.high, part.low) == (*part[:2], part.k_start, None, None):
            high = None
            if part.high is not None:
                high = part.high + last.k_stop - last.k_start
            joined[-1] = last._replace(k_stop=part.k_stop, high=high)
        else:
            joined.append(part)
    return joined


def covers_once(ranges: Sequence[tuple[int, int]], length: int) -> bool:
    """Whether each of 0 ... length - 1 lies in exactly one of the ranges (start, stop)."""
    end = 0
    for start, stop in sorted(ranges):
        if start != end:
            return False
        end = stop
    return end == length


def each_row_once(slices: Sequence[Slice], rows: int) -> bool:
    """Whether each of the first `rows` query rows lies in exactly one slice."""
    return covers_once([(part.q_start, part.q_stop) for part in slices], rows)


def _cut(
    ranges: Sequence[PositionRange], documents: Sequence[int] | None
) -> list[tuple[int, PositionRange]]:
    """Return (document, range): the ranges cut at the starts of documents, without empty ones."""
    if documents is None:
        return [(0, whole) for whole in ranges if whole.rows]
    pieces = []
    for whole in ranges:
        done = 0
        while done < whole.rows:
            first = whole.first + done * whole.stride
            document = bisect_right(documents, first)
            count = min(whole.rows - done, -(-(documents[document] - first) // whole.stride))
            pieces.append((document, PositionRange(whole.start + done, count, first, whole.stride)))
            done += count
    return pieces


def _band(
    query: PositionRange, key: PositionRange, causal: bool, window: int | None
) -> Slice | None:
    """Return the part of one pair of ranges that is seen, without edges that see nothing."""
    if not causal:
        return Slice(
            query.start, query.start + query.rows, key.start, key.start + key.rows, None, None
        )
    stride = query.stride
    apart = query.first - key.first
    high = apart // stride
    low = None
    if window is not None:
        low = -((window - 1 - apart) // stride)
    if low is not None and low > high:
        return None
    q0 = 0
    q1 = query.rows
    k0 = 0
    k1 = key.rows
    while q0 < q1 and k0 < k1:
        before = q0, q1, k0, k1
        q0 = max(q0, k0 - high)
        k1 = min(k1, q1 + high)
        if low is not None:
            k0 = max(k0, q0 + low)
            q1 = min(q1, k1 - low)
        if (q0, q1, k0, k1) == before:
            break
    if q0 >= q1 or k0 >= k1:
        return None
    shift = q0 - k0
    above = None
    if high + shift < k1 - k0 - 1:
        above = high + shift
    below = None
    if low is not None and low + shift > q0 - q1 + 1:
        below = low + shift
    return Slice(query.start + q0, query.start + q1, key.start + k0, key.start + k1, below, above)


def check_window(causal: bool, window: int | None) -> None:
    """Raise ArgumentError for a window that is no positive integer, or not causal."""
    if window is None:
        return
    if not isinstance(window, (int, np.integer)) or window < 1:
        raise ArgumentError(
            "window", found=repr(window), expected="an integer of at least 1, or None"
        )
    if not causal:
        raise ArgumentError(
            "a window looks back from each query, so it needs a causal mask",
            found=f"window={window}, causal=False",
            expected="causal=True, or window=None",
        )


def check_scale(scale: float | None) -> None:
    """Raise ArgumentError unless the factor on scores is None, or a finite number above 0."""
    if scale is None or 0 < scale < math.inf:  # NaN fails this
        return
    raise ArgumentError(
        "scale of attention",
        found=repr(scale),
        expected="a finite number above 0, or None for 1 / sqrt(head_dim)",
    )


def document_offsets(segments: ArrayLike | None, seq_len: int) -> list[int] | None:
    """Where the documents of a packed sequence begin, rising from 0, and `seq_len` at the end.

    segments : None, or integers. `seq_len` integers give the document of each position; equal
    numbers stand together.
        Any other count of integers gives the documents' lengths, which add up to `seq_len`.

    Raises ArgumentError if they do not cover the sequence.
    """
    if segments is None:
        return None
    numbers = np.asarray(segments)
    if numbers.size == seq_len:
        starts = np.flatnonzero(np.diff(numbers)) + 1
        ids = numbers
        if seq_len:
            ids = numbers[np.concatenate([[0], starts]).astype(int)]
        if len(set(ids.tolist())) != len(ids):
            raise ArgumentError(
                "segments: a document's positions do not stand together", found=ids.tolist()[:20]
            )
        return [0, *starts.tolist(), seq_len]
    if numbers.sum() != seq_len or (numbers < 1).any():
        raise ArgumentError(
            "segments do not cover the sequence",
            found=f"{numbers.size} entries that add up to {int(numbers.sum())}",
            expected=f"{seq_len} document numbers, or lengths of at least 1 that add up to "
            f"{seq_len}",
        )
    return [0, *np.cumsum(numbers).tolist()]
