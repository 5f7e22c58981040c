"""Consensus: all ranks of a group find that they do the same thing, or all raise the same error.

    rank 0   [number of "step" and its facts, call 7 | values]   |
    rank 1   [number of "step" and its facts, call 7 | values]   |  one all-gather
    rank 2   [number of "close" and its facts, call 7 | values]  |

    all alike: go on, with all values; else: a second, slow all-gather, in words

The facts of a call are named values that must be the same on every rank. What travels is one number
made of them. Names and values are exchanged only once something is wrong, for an error that says
which fact differs, on which ranks, and how. One rank is left to report that error; on the others it
is marked `reported_elsewhere`.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeAlias

import numpy as np

from mpipipe.errors import ArgumentError, MismatchError, MpipipeError, PeerError
from mpipipe.job import rank_list
from mpipipe.job.requests import own
from mpipipe.job.wait import wait_for

if TYPE_CHECKING:
    from mpipipe.job.group import RankGroup

VALUES = 14  # most values of one rank in an agreement; RankGroup.gather takes anything larger
LONGEST = 200  # characters of a value in an error
ABSENT = ("None", "None")  # a fact that a rank does not have
REFUSED = -1  # sent by a rank that has an error, in place of the number of its facts
Facts: TypeAlias = tuple[tuple[str, object], ...]  # ((name, value), ...)


class Reason(NamedTuple):
    """What one rank says once something is wrong."""

    error: MpipipeError | None
    call: tuple[str, int | None]  # its name and number
    text: str  # the call in words
    facts: dict[str, tuple[str, str]]  # name -> (value as Python writes it, value in words)
    world_rank: int


@dataclass(eq=False)
class Ballot:
    """One agreement, over a group or over those along two axes of a grid, one by one.

    Beyond those of `RankGroup.agree`: the `number` of the call, for callers that count; `where`, a
    text that errors add to its name; `code`, the `digest(call, facts)` of a call that is repeated.
    """

    call: str
    facts: Facts = ()
    error: Exception | None = None
    message: str | None = None
    remedy: str | None = None
    number: int | None = None
    where: str = ""
    code: int = 0

    def __post_init__(self) -> None:
        self.groups: list[RankGroup] = []
        self.failed = self.error is not None

    def cast(self, group: RankGroup, values: Sequence[int] = ()) -> np.ndarray:
        """Return the values of all ranks, int64 (size, values); collective, also after an error."""
        self.groups.append(group)
        if self.number is None:
            self.number = group.calls + 1
        code = REFUSED
        if not self.failed:
            code = self.code or digest(self.call, self.facts)
        table = exchange(group, [code, self.number, *values], self.text)
        heads = table[:, :2].tolist()
        if heads[0][0] == REFUSED or heads.count(heads[0]) < len(heads):
            self.failed = True
        return table[:, 2 : 2 + len(values)]

    def refuse(self, error: MpipipeError) -> None:
        """Add an error that this rank has found in the values of other ranks."""
        self.error = self.error or error
        self.failed = True

    @property
    def text(self) -> str:
        return f"{self.call} (call {self.number}){self.where}"

    def decide(self) -> None:
        """Raise the same error on all ranks if they do not agree; one of them is to report it."""
        if not self.failed:
            return
        facts = {name: (repr(value), _in_words(value)) for name, value in self.facts}
        world_rank = self.groups[0].world_rank
        reasons = [
            Reason(_sendable(self.error), (self.call, self.number), self.text, facts, world_rank)
        ]
        for group in self.groups:
            reasons = _gather(group, reasons, f"the reasons why ranks disagree in {self.text}")
        origin, problem = _first_problem(reasons, self.message, self.remedy)
        problem.reported_elsewhere = reasons[origin].world_rank != world_rank
        problem.agreed = frozenset(reason.world_rank for reason in reasons)
        raise problem


def raise_on_all(origin: int, problem: MpipipeError, group: RankGroup) -> NoReturn:
    """Raise an error that all ranks of a group have found alike; rank `origin` reports it."""
    raise found_by_all(problem, [group], origin)


def agreed_by(problem: MpipipeError, group: RankGroup) -> MpipipeError:
    """Return the error, marked as one that all ranks of one more group raise."""
    problem.agreed |= frozenset(group.members)
    return problem


def found_by_all(
    problem: MpipipeError, groups: Sequence[RankGroup], origin: int = 0
) -> MpipipeError:
    """Return an error that all ranks of the groups have found; ranks `origin` report it."""
    problem.reported_elsewhere = False
    problem.agreed = frozenset()
    for group in groups:
        agreed_by(problem, group)
        if group.rank != origin:
            problem.reported_elsewhere = True
    return problem


def _first_problem(
    reasons: list[Reason], message: str | None, remedy: str | None
) -> tuple[int, MpipipeError]:
    """Return (rank that reports, error), from the entries of all ranks."""
    for index, reason in enumerate(reasons):
        problem = reason.error
        if problem is not None:
            if problem.rank is None and len(reasons) > 1:
                text = str(problem)
                same = [rank for rank, other in enumerate(reasons) if str(other.error) == text]
                problem.rank = rank_list.numbers(same, len(reasons))
            return index, problem
    first = reasons[0]
    for reason in reasons:
        if reason.call != first.call:
            return 0, MismatchError(
                message or "ranks make different calls",
                rank=_ranks_without([other.call for other in reasons], first.call),
                found=reason.text,
                expected=f"{first.text}, as on rank 0",
                remedy=remedy or "make the same calls in the same order on all ranks",
            )
    for reason in reasons:
        for name, value in reason.facts.items():
            values = [other.facts.get(name, ABSENT) for other in reasons]
            if value != values[0]:
                label = ""
                if message:
                    label = f"{name} "
                mismatch = MismatchError(
                    message or f"ranks differ in {name}",
                    rank=_ranks_without(values, values[0]),
                    found=f"{label}{value[1]}",
                    expected=f"{label}{values[0][1]}, as on rank 0",
                    remedy=remedy,
                )
                mismatch.fact = name
                return 0, mismatch
    return 0, MismatchError(
        "ranks disagree, and none can say in what", remedy="report this as a bug of mpipipe"
    )


def _in_words(value: object) -> str:
    text = str(value)
    if len(text) > LONGEST:
        text = f"{text[:LONGEST]}..."
    return text


def _ranks_without(values: Sequence[object], value: object) -> str:
    """Name the ranks that have another value."""
    return rank_list.numbers(rank for rank, other in enumerate(values) if other != value)


def digest(call: str, facts: Facts) -> int:
    """Return a hash from 0 to 2^63 - 1 of a call and its facts, the same in every process."""
    content = repr((call, facts)).encode("utf-8", "backslashreplace")
    return int.from_bytes(blake2b(content, digest_size=8).digest(), "big") >> 1


# -- What travels: every agreement is made of exchanges --------------------------------------------


def _gather(group: RankGroup, reasons: list[Reason], what: str) -> list[Reason]:
    """Return the entries of all ranks, which all know that something is wrong."""
    content = pickle.dumps(reasons)
    sizes = exchange(group, [len(content)], what)[:, 0].tolist()
    gathered: list[Reason] = []
    for block in spread(group, content, sizes, what):
        gathered += block
    with suppress(PeerError):  # no rank may end over this before all know what it is about
        exchange(group, [], what)
    return gathered


def _sendable(error: Exception | None) -> MpipipeError | None:
    """Return an error that can be sent to other ranks; another one becomes its text."""
    if error is None:
        return None
    if isinstance(error, MpipipeError):
        with suppress(Exception):  # a class of the user's may refuse one or the other
            pickle.loads(pickle.dumps(error))
            return error
    return ArgumentError(f"{type(error).__name__}: {error}")


def spread(group: RankGroup, content: bytes, sizes: list[int], what: str) -> list[Any]:
    """Return what every rank has pickled, where all know the `sizes` in bytes."""
    table = _all_rows(group, np.frombuffer(content, np.uint8), max(sizes), what)
    return [pickle.loads(row.tobytes()) for row in table]


def exchange(group: RankGroup, row: Sequence[int], what: str) -> np.ndarray:
    """Return the rows of all ranks, int64 (size, 2 + VALUES), by one all-gather.

    `what` names the call in errors. An error during the wait ends the life of the group.
    """
    group.begin()
    return _all_rows(group, np.array(row, np.int64), 2 + VALUES, what)


def _all_rows(group: RankGroup, row: np.ndarray, length: int, what: str) -> np.ndarray:
    """Return the rows of all ranks, one below the other, each filled up with zeros."""
    with group.failing(what):
        padded = np.zeros(length, row.dtype)
        padded[: len(row)] = row
        if group.size == 1:
            return padded[None]
        table = np.empty((group.size, length), row.dtype)
        wait_for(own(group.comm.Iallgather(padded, table)), what, group)
    return table
