"""Actions, what a rank does next; and the orders of all ranks, which large schedules make on demand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias, overload

from mpipipe.text import counted

FORWARD, BACKWARD, INPUT_GRAD, WEIGHT_GRAD, RECOMPUTE = "F", "B", "I", "W", "R"
OPS = (FORWARD, BACKWARD, INPUT_GRAD, WEIGHT_GRAD, RECOMPUTE)


class Action(NamedTuple):
    """One computation of one micro-batch in one stage; its text form is ``2F0``: stage, op, micro-batch.

    Parameters
    ----------
    stage : int
        Logical stage.
    op : str
        ``F`` forward, ``B`` full backward, ``I`` gradient of the input, ``W`` gradient of the weights; B = I + W. ``R``
        is the forward once more: its F kept the input of the stage alone, from which R makes what the backward needs.
    microbatch : int
        Its index; 0 is the first. In a schedule with n slices that of a unit: slice s of micro-batch m is m n + s.
    """

    stage: int
    op: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.op}{self.microbatch}"


def cell(action: tuple[int, str, int], slices: int) -> str:
    """Write an action as ``2F0``, or as ``2F0.1``, with its slice, where sequences are cut into several."""
    stage, op, unit = action
    return f"{stage}{op}{unit}" if slices == 1 else f"{stage}{op}{unit // slices}.{unit % slices}"


def place_of(unit: int | None, slices: int) -> dict[str, int | None]:
    """Return micro-batch and slice of a unit, by the names of errors; no slice where sequences are whole."""
    if slices == 1 or unit is None:
        return {"microbatch": unit}
    return {"microbatch": unit // slices, "slice": unit % slices}


# -- The orders of all ranks, each one made when it is asked for: no rank needs all orders of a large schedule at once -


Order: TypeAlias = "tuple[Action, ...]"
LogicalTime: TypeAlias = Callable[[int, bool, int], int]  # of (stage, whether backward, micro-batch)


class OrdersOnDemand(Sequence[Order]):
    """The orders of all ranks as a sequence. It keeps the order that was asked for last, and makes any other one anew.

    `make(rank)` gives the actions of a rank: a function of a module, or a `functools.partial` of one, so that it makes
    the same orders in every process. `logical_time` is that of an F, or of a B or I (see classic.py); `check_part`
    proves that it rises as it has to.
    """

    def __init__(
        self, ranks: int, make: Callable[[int], Iterable[Action]], logical_time: LogicalTime | None = None
    ) -> None:
        self.ranks, self.make, self.logical_time = ranks, make, logical_time
        self._kept: tuple[int, Order] | None = None

    def __len__(self) -> int:
        return self.ranks

    @overload
    def __getitem__(self, rank: int) -> Order: ...

    @overload
    def __getitem__(self, rank: slice) -> tuple[Order, ...]: ...

    def __getitem__(self, rank: int | slice) -> Order | tuple[Order, ...]:
        which = range(self.ranks)[rank]
        if isinstance(which, range):
            return tuple(map(self._order, which))
        kept = self._kept  # read once: threads may share a schedule
        if kept is None or kept[0] != which:
            self._kept = kept = which, self._order(which)
        return kept[1]

    def __iter__(self) -> Iterator[Order]:
        return map(self._order, range(self.ranks))

    def _order(self, rank: int) -> Order:
        return tuple(self.make(rank))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, OrdersOnDemand) and repr(self) == repr(other):
            return True
        if not isinstance(other, (tuple, OrdersOnDemand)) or len(self) != len(other):
            return False
        return all(mine == theirs for mine, theirs in zip(self, other))

    def __hash__(self) -> int:
        return hash(tuple(self))  # it equals that tuple

    def __repr__(self) -> str:
        return f"orders of {counted(self.ranks, 'rank')} by {_text(self.make)}"

    def __reduce__(self) -> tuple[Any, ...]:
        return OrdersOnDemand, (self.ranks, self.make, self.logical_time)


def changed(
    orders: Sequence[Order], change: Callable[..., Iterable[Action]], *arguments: object
) -> tuple[Order, ...] | OrdersOnDemand:
    """Return `change(*arguments, order)` for each order. Orders that are made on demand are changed on demand.

    Their logical times stay as they are; `check_part` proves that they fit before they are relied on.
    """
    each = partial(change, *arguments)
    if isinstance(orders, OrdersOnDemand):
        return OrdersOnDemand(len(orders), partial(_changed, each, orders.make), orders.logical_time)
    return tuple(tuple(each(order)) for order in orders)


def _changed(
    change: Callable[..., Iterable[Action]], make: Callable[[int], Iterable[Action]], rank: int
) -> Iterable[Action]:
    return change(tuple(make(rank)))


def _text(value: object) -> str:
    """Write a function and its arguments so that equal texts make equal orders."""
    if isinstance(value, partial):
        given = [*map(_text, value.args), *(f"{name}={_text(each)}" for name, each in sorted(value.keywords.items()))]
        return f"{_text(value.func)}({', '.join(given)})"
    if callable(value):
        return f"{value.__module__}.{value.__qualname__}"  # type: ignore[attr-defined]  # as every function has them
    return repr(sorted(value) if isinstance(value, (set, frozenset)) else value)
