"""A schedule: for each rank, the actions that it runs, in order. Pure data."""

from __future__ import annotations

import operator
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b

from mpipipe.errors import ArgumentError
from mpipipe.schedules.action import FORWARD, INPUT_GRAD, WEIGHT_GRAD, Action


@dataclass(frozen=True)
class Schedule:
    """Who computes what, in which order. `check` proves that it can run, `simulate` says how long that takes.

    Attributes
    ----------
    name : how it was made, for reports
    placement : rank of each logical stage
    microbatches : M
    orders : for each rank its actions in order
    """

    name: str
    placement: tuple[int, ...]
    microbatches: int
    orders: tuple[tuple[Action, ...], ...] = field(repr=False)

    def __post_init__(self):
        # frozen all the way down: `check` and `fingerprint` remember their result
        object.__setattr__(self, "placement", tuple(self.placement))
        object.__setattr__(self, "orders", tuple(map(tuple, self.orders)))

    @property
    def ranks(self) -> int:
        return len(self.orders)

    @property
    def stages(self) -> int:
        return len(self.placement)

    @cached_property
    def chunks(self) -> int:
        """The largest number of stages on one rank."""
        return max(Counter(self.placement).values(), default=0)

    @cached_property
    def splits_backward(self) -> bool:
        """Whether any backward is split into I and W."""
        return any(action.op in (INPUT_GRAD, WEIGHT_GRAD) for order in self.orders for action in order)

    @cached_property
    def fingerprint(self) -> int:
        """63 bits that are the same in every process for the same placement, micro-batches and orders.

        The name does not count: a schedule read back from its CSV runs together with the one that wrote it.
        """
        content = blake2b(f"{self.placement} {self.microbatches}\n".encode(), digest_size=8)
        for order in self.orders:
            content.update(_row(order).encode())
        return int.from_bytes(content.digest(), "big") >> 1

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The logical stages that lie on `rank`, in order."""
        return tuple(stage for stage, owner in enumerate(self.placement) if owner == rank)

    def forward_only_part(self, microbatches: int) -> Schedule:
        """The forwards of the first `microbatches` micro-batches, in the same order on the same ranks.

        Raises
        ------
        ArgumentError : `microbatches` is not in 1..M
        """
        count = at_least_one("microbatches", microbatches)
        if count > self.microbatches:
            raise ArgumentError(
                "a part of a schedule cannot have more micro-batches than the schedule",
                found=f"microbatches={count}",
                expected=f"1 to {self.microbatches}",
                remedy="build a schedule with more micro-batches",
            )
        orders = tuple(
            tuple(action for action in order if action.op == FORWARD and action.microbatch < count)
            for order in self.orders
        )
        return Schedule("forward", self.placement, count, orders)

    def to_csv(self) -> str:
        """One row per rank, one cell ``2F0`` per action: the table that PyTorch's pipeline schedules write and read."""
        return "".join(map(_row, self.orders))


def looped_placement(ranks: int, chunks: int) -> tuple[int, ...]:
    """Stage l on rank l mod ranks: chunk v of rank r is stage r + v * ranks."""
    return tuple(range(ranks)) * chunks


def at_least_one(name: str, value) -> int:
    """`value` as an int, refused with the argument's name if it is no integer or below one."""
    try:
        number = operator.index(value)
    except TypeError:
        number = 0
    if number < 1:
        raise ArgumentError(
            f"{name} is not a count",
            found=f"{name}={value!r}",
            expected="an integer of at least 1",
            remedy=f"pass {name} >= 1",
        )
    return number


def _row(order) -> str:
    return ",".join([f"{stage}{op}{microbatch}" for stage, op, microbatch in order]) + "\n"
