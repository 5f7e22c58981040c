"""A schedule: for each rank, the actions that it runs, in order. Pure data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import blake2b
from keyword import iskeyword
from typing import NamedTuple

from mpipipe.errors import ArgumentError, ScheduleError
from mpipipe.schedules.action import FORWARD, RECOMPUTE, Action, Order, cell
from mpipipe.schedules.checks import at_least_one
from mpipipe.text import counted


@dataclass(frozen=True)
class Schedule:
    """Who computes what, in which order.

    `check` proves that it can run; `simulate` tells how long it takes.

    Parameters
    ----------
    name : str
        How it was made, for reports.
    placement : sequence of int
        Rank of each logical stage.
    microbatches : int
        M, the number of micro-batches.
    orders : sequence of sequences of Action
        For each rank its actions in order.
    trained_from : int
        The first stage that has backwards: those before it have nothing to train (see
        `with_frozen`).
    skips : sequence of Skip
        What stages hand to others than the next one (see `with_skips`).
    slices : int
        n, the parts into which each sequence is cut: unit u is slice u mod n of micro-batch u // n,
        and an action is of one unit. 1: a unit is a whole micro-batch.

    Attributes
    ----------
    units : int
        M n: how many units each stage has.
    proven : bool
        Whether `check` has passed.

    Examples
    --------
    >>> from mpipipe.schedules import Action, Schedule, check
    >>> order = [Action(0, "F", 0), Action(0, "B", 0)]
    >>> schedule = Schedule("by hand", placement=(0,), microbatches=1, orders=[order])
    >>> check(schedule)
    """

    name: str
    placement: tuple[int, ...]
    microbatches: int
    orders: Sequence[Order]
    trained_from: int = 0
    skips: tuple[Skip, ...] = ()
    slices: int = 1
    proven: bool = field(default=False, init=False, compare=False)

    def __post_init__(self) -> None:
        # frozen all the way down: `check` and `fingerprint` remember their result
        object.__setattr__(self, "placement", tuple(self.placement))
        object.__setattr__(self, "skips", tuple(self.skips))
        object.__setattr__(self, "orders", tuple(map(tuple, self.orders)))

    def __repr__(self) -> str:
        parts = [counted(self.ranks, "rank"), counted(self.stages, "stage"), self.batch]
        if self.trained_from:
            parts.append(f"trained from stage {self.trained_from}")
        for name, source, target in self.skips:
            parts.append(f"skip {name} from stage {source} to {target}")
        return f"<Schedule {self.name}: {', '.join(parts)}>"

    def _repr_svg_(self) -> str | None:
        """Draw the schedule in a notebook, with equal costs of all stages."""
        from mpipipe.schedules.simulate import simulate

        return simulate(self)._repr_svg_()

    @property
    def ranks(self) -> int:
        """The number of ranks, P."""
        return len(self.orders)

    @property
    def stages(self) -> int:
        """The number of logical stages, S."""
        return len(self.placement)

    @property
    def units(self) -> int:
        """What goes through each stage in a step: M micro-batches in n slices each."""
        return self.microbatches * self.slices

    @property
    def batch(self) -> str:
        """What a step runs, in words: "8 micro-batches", or "2 micro-batches in 4 slices each"."""
        text = counted(self.microbatches, "micro-batch")
        if self.slices == 1:
            return text
        text += f" in {self.slices} slices"
        if self.microbatches > 1:
            text += " each"
        return text

    def cell(self, action: object) -> str:
        """Write an action as the table has it: ``0F3``, or ``0F3.1`` for slice 1.

        Parameters
        ----------
        action : Action
            Whatever else an order may hold is written as its text.
        """
        if type(action) is Action and type(action.microbatch) is int:
            return cell(action, self.slices)
        # `check` writes wrong ones, too.
        return str(action)

    @cached_property
    def chunks(self) -> int:
        """The largest number of stages on one rank."""
        return max(Counter(self.placement).values(), default=0)

    @cached_property
    def recomputed(self) -> frozenset[tuple[int, int]]:
        """Every (stage, unit) whose forward is run again, by an R."""
        pairs = set()
        for order in self.orders:
            for stage, op, unit in order:
                if op == RECOMPUTE:
                    pairs.add((stage, unit))
        return frozenset(pairs)

    @cached_property
    def forwards_only(self) -> bool:
        """Whether there is no backward at all."""
        return all(action.op == FORWARD for order in self.orders for action in order)

    @property
    def skip_ends(self) -> list[tuple[int, int]]:
        """The two stages of each skip."""
        return [(skip.source, skip.target) for skip in self.skips]

    def has_backward(self, stage: int) -> bool:
        """Tell whether a stage has backwards in a training step: not before `trained_from`."""
        return stage >= self.trained_from

    @cached_property
    def fingerprint(self) -> int:
        """Hash of 63 bits of placement, micro-batches, orders and skips, the same in every process.

        The name does not count: a schedule read back from its CSV runs together with the one that
        wrote it.
        """
        text = f"{self.placement} {self.microbatches}"
        if self.slices > 1:
            text += f" in {self.slices}"
        if self.skips:
            text += f" {[*map(tuple, self.skips)]}"
        content = blake2b(f"{text}\n".encode(), digest_size=8)
        for order in self.orders:
            content.update(_row(order, self.slices).encode())
        return int.from_bytes(content.digest(), "big") >> 1

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """List the logical stages that lie on `rank`, in ascending order."""
        return tuple(stage for stage, owner in enumerate(self.placement) if owner == rank)

    def forward_only_part(self, microbatches: int) -> Schedule:
        """Take the forwards of the first micro-batches, in the same order on the same ranks.

        The name is "forward" then, and the skips stay. Other numbers than 1 to M raise
        ArgumentError.
        """
        count = at_least_one("microbatches", microbatches)
        if count > self.microbatches:
            raise ArgumentError(
                "a part of a schedule cannot have more micro-batches than the schedule",
                found=f"microbatches={count}",
                expected=f"1 to {self.microbatches}",
                remedy="build a schedule with more micro-batches",
            )
        units = count * self.slices
        orders = []
        for order in self.orders:
            forwards = []
            for action in order:
                if action.op == FORWARD and action.microbatch < units:
                    forwards.append(action)
            orders.append(tuple(forwards))
        return Schedule(
            "forward", self.placement, count, orders, skips=self.skips, slices=self.slices
        )

    def to_csv(self) -> str:
        r"""Write one row for each rank, one cell such as ``2F0`` for each action, as PyTorch does.

        With slices a cell is ``2F0.1``: slice 1 of micro-batch 0. `from_csv` reads it. It has no
        skips and no `trained_from`.

        Examples
        --------
        >>> from mpipipe import schedules
        >>> schedules.gpipe(1, 2).to_csv()
        '0F0,0F1,0B0,0B1\n'
        """
        return "".join(_row(order, self.slices) for order in self.orders)


def looped_placement(ranks: int, chunks: int) -> tuple[int, ...]:
    """Place stage l on rank l mod ranks: chunk v of rank r is stage r + v * ranks."""
    return tuple(range(ranks)) * chunks


def _row(order: Iterable[Action], slices: int) -> str:
    if slices == 1:  # a schedule may have millions of actions
        return ",".join([f"{stage}{op}{microbatch}" for stage, op, microbatch in order]) + "\n"
    return ",".join([cell(action, slices) for action in order]) + "\n"


# -- Skips: data that a stage hands to a later one past those between ------------------------------


class Skip(NamedTuple):
    """An edge between two stages, besides those of the chain.

    Attributes
    ----------
    name : str
        What the stages at both ends call it; skips of one name have one source.
    source, target : int
        The stage that gives, and a later one that takes.
    """

    name: str
    source: int
    target: int


#     stage    0     1     2     3
#     F        F --> F --> F --> F
#               \______________/      "residual": (0, 3); its gradient comes back the same way
def with_skips(schedule: Schedule, skips: Mapping[str, object]) -> Schedule:
    """Give a schedule these skips in place of those that it has; its orders stay.

    It is another schedule then: its `fingerprint` differs. `simulate` counts no time for skips,
    since they are sent some stages before they are needed, and `peak_memory` no bytes: add what
    they hold to `activation` of both ends. ScheduleError is raised where a name is no identifier,
    there is no such stage, or a skip leads back.

    Parameters
    ----------
    schedule : Schedule
        A schedule of any kind.
    skips : mapping of str to (int, int), or to a list of such
        For each name, an identifier of Python, the stage that gives and the later stage that takes.
        A stage may give and take several; two stages may have several. Where several stages take
        what one gives, ``[(0, 2), (0, 3)]``, the same goes to each, and their gradients are summed.

    Examples
    --------
    >>> from mpipipe import schedules
    >>> schedule = schedules.with_skips(schedules.one_f_one_b(4, 8), {"residual": (0, 3)})
    >>> schedule.skips
    (Skip(name='residual', source=0, target=3),)
    """
    if not isinstance(skips, Mapping):
        raise ScheduleError(
            "skips are not a mapping",
            found=type(skips).__name__,
            expected="a dict as in {'residual': (0, 3)}",
        )
    edges = []
    for name, value in skips.items():
        pairs: list[object] = [value]
        if isinstance(value, list) and value and not isinstance(value[0], int):
            pairs = value
        for ends in pairs:
            if not isinstance(ends, (tuple, list)) or len(ends) != 2:
                raise ScheduleError(
                    f"skip {name!r} has no two ends", found=repr(ends), expected="(source, target)"
                )
            edges.append(Skip(name, *ends))
    check_skips(edges, schedule.stages)
    return replace(schedule, skips=tuple(sorted(edges)))


def check_skips(skips: Sequence[Skip], stages: int) -> None:
    """Raise ScheduleError if skips do not fit a chain of `stages`."""
    met: dict[str, tuple[int, set[int]]] = {}  # name -> source and targets
    for skip in skips:
        if type(skip) is not Skip:
            raise ScheduleError(
                "not a skip", found=repr(skip), expected="Skip(name, source, target)"
            )
        name, source, target = skip
        if not isinstance(name, str) or not name.isidentifier() or iskeyword(name):
            raise ScheduleError(
                "the name of a skip", found=repr(name), expected="an identifier, as in 'residual'"
            )
        if name in met and (met[name][0] != source or target in met[name][1]):
            ends = [str(other[1:]) for other in skips if other.name == name]
            raise ScheduleError(
                f"two skips are called {name!r}",
                found=", ".join(ends),
                expected="a name for each, or one source and other targets",
            )
        met.setdefault(name, (source, set()))[1].add(target)
        for end in (source, target):
            if type(end) is not int or not 0 <= end < stages:
                raise ScheduleError(
                    f"skip {name!r}: there is no stage {end!r}",
                    found=str((source, target)),
                    expected=f"stages from 0 to {stages - 1}",
                )
        if target <= source:
            raise ScheduleError(
                f"skip {name!r} does not lead to a later stage",
                stage=source,
                found=str((source, target)),
                expected=f"a stage after {source}",
                remedy="within a stage, or to an earlier one, nothing is handed on",
            )
