"""Records of numbers, such as measured costs: one like others, each number of which is a function of theirs."""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

Record = TypeVar("Record")


def record_at(measured: Mapping[int, Record], size: int) -> Record:
    """Return the record of micro-batches of `size` sequences: between measured ones on a line, else in proportion."""
    if size in measured:
        return measured[size]
    known = sorted(measured)
    place = bisect(known, size)
    if place in (0, len(known)):  # in proportion: on a line through two sizes, noise would grow with the distance
        low, high = 0, known[max(0, place - 1)]
    else:
        low, high = known[place - 1], known[place]
    share = (size - low) / (high - low)

    def on_line(ends: Sequence[float]) -> float:
        start, end = (0.0, ends[0]) if len(ends) == 1 else ends
        found = max(0.0, start + (end - start) * share)
        return round(found) if isinstance(end, int) else found

    return combined(on_line, *(measured[each] for each in (low, high) if each))


def combined(function: Callable[[Sequence[Any]], Any], *records: Any) -> Any:
    """Return a record like these, each number of which is a function of theirs."""
    first = records[0]
    if is_dataclass(first):
        kind: Any = type(first)
        names = [entry.name for entry in fields(first) if getattr(first, entry.name) is not None]  # `again` may be
        return kind(**{name: combined(function, *(getattr(each, name) for each in records)) for name in names})
    if isinstance(first, (tuple, list)):
        return tuple(combined(function, *each) for each in zip(*records))
    return function(records)


def checked(numbers: Sequence[Any]) -> Any:
    """Return the only number; raises ValueError unless it is finite and at least 0."""
    (number,) = numbers
    if type(number) not in (int, float) or not 0 <= float(number) < math.inf:
        raise ValueError(f"{number!r} is no number of at least 0")
    return number
