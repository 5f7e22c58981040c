"""Arguments that have to be counts, numbers, or one number for each stage."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from numbers import Real
from typing import Any, SupportsIndex

from mpipipe.errors import ArgumentError

LARGEST = 1e100  # time of an action: sums of times are numbers, too


def at_least_one(name: str, value: SupportsIndex) -> int:
    """Convert `value` to int; refuse it by name if it is no integer or below one."""
    try:
        count = operator.index(value)
    except TypeError:
        count = 0
    if count < 1:
        raise ArgumentError(
            f"{name} is not a count",
            found=f"{name}={value!r}",
            expected="an integer of at least 1",
            remedy=f"pass {name} >= 1",
        )
    return count


def counts(**values: SupportsIndex) -> list[int]:
    """Convert several counts, by the names of their arguments."""
    return [at_least_one(name, value) for name, value in values.items()]


MOST_UNITS = 1 << 18  # forwards of a schedule: 128 ranks x 2 chunks x 1 024 micro-batches


def sizes(
    *,
    ranks: SupportsIndex,
    chunks: SupportsIndex = 1,
    microbatches: SupportsIndex,
    slices: SupportsIndex = 1,
) -> list[int]:
    """Convert the sizes of a schedule; refuse more forwards than each rank can prove in seconds."""
    values = dict(ranks=ranks, chunks=chunks, microbatches=microbatches, slices=slices)
    converted = counts(**values)
    if math.prod(converted) > MOST_UNITS:
        factors = []
        for name, size in zip(values, converted):
            if size > 1:
                factors.append(f"{size:,} {name}")
        raise ArgumentError(
            "the schedule is too large: each rank builds and proves the orders of all ranks",
            found=f"{math.prod(converted):,} forwards: {' x '.join(factors)}",
            expected=f"at most {MOST_UNITS:,} forwards",
            remedy="lower microbatches, slices or chunks, or split the job into several pipelines",
        )
    return converted


def one_per_stage(what: str, name: str, value: float | Sequence[float], stages: int) -> list[float]:
    """Convert a number, or one for each stage, to floats; refuse negative or huge ones."""
    values: Any = value
    if isinstance(value, Real):
        values = [value] * stages
    numbers = floats(values, stages)
    if numbers is None:
        raise ArgumentError(
            f"{what} does not fit the schedule",
            found=f"{name}={value!r}",
            expected=f"a number from 0 to {LARGEST:g}, or {stages} of them, one per stage",
        )
    return numbers


def floats(values: Sequence[float], count: int) -> list[float] | None:
    """Convert to floats; return None if they are not as many numbers from 0 to LARGEST."""
    try:
        numbers = [*map(float, values)]
    except (TypeError, ValueError, OverflowError):
        return None
    if len(numbers) == count and all(0 <= number <= LARGEST for number in numbers):
        return numbers
    return None


def number(name: str, value: float) -> float:
    """Return `value`; refuse by name True, text, NaN and whatever else is no number."""
    if isinstance(value, bool) or not isinstance(value, Real) or math.isnan(value):
        raise ArgumentError(
            f"{name} is no number", found=f"{name}={value!r}", expected="a number such as 4 or 2.5"
        )
    return value


def limit(memory_limit: float | None) -> float | None:
    """Return a limit of memory, None if there is none; refuse what is no number."""
    if memory_limit is None:
        return None
    return number("memory_limit", memory_limit)
