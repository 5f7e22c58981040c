"""Consensus: all ranks of a group find that they do the same thing, or all raise the same error.

    rank 0   [number of "step" and its facts, call 7 | values]   |                   all alike: go on, with all values
    rank 1   [number of "step" and its facts, call 7 | values]   |  one all-gather
    rank 2   [number of "close" and its facts, call 7 | values]  |                   else: a second, slow one, in words

The facts of a call are named values that must be the same on every rank. What travels is one number made of them. Names
and values are exchanged only once something is wrong, for an error that says which fact differs, on which ranks, and
how. One rank is left to report that error; on the others it is marked `reported_elsewhere`.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple, NoReturn, Protocol, TypeAlias

import numpy as np

from mpipipe.errors import ArgumentError, MismatchError, MpipipeError, PeerError
from mpipipe.job import rank_list
from mpipipe.job.context import Failure
from mpipipe.job.peers import PeerStatus

VALUES = 14  # most values of one rank in an agreement; Group.gather takes anything larger
REFUSED = -1  # sent by a rank that has an error, in place of the number of its facts
Facts: TypeAlias = tuple[tuple[str, Any], ...]  # ((name, value), ...)


class Voters(Protocol):
    """What an agreement needs of a group; job.group.Group has it."""

    @property
    def peers(self) -> PeerStatus: ...

    @property
    def rank(self) -> int: ...

    @property
    def world_rank(self) -> int: ...

    def exchange(self, row: Sequence[int], what: str) -> np.ndarray: ...

    def gather_reasons(self, entries: list[Entry], what: str) -> list[Entry]: ...


class Call(NamedTuple):
    """A call as errors name it: its name, its number in the order of calls, and both in words."""

    name: str
    number: int | None
    text: str


class Entry(NamedTuple):
    """What one rank says once something is wrong."""

    error: MpipipeError | None
    call: Call
    facts: Facts
    world_rank: int


class Ballot:
    """One agreement, over one group or over the groups along two axes of a grid, one after the other.

    Parameters
    ----------
    call, facts, error, message, remedy
        As for Group.agree.
    number : int, optional
        Number of the call, if the callers count their calls; by default the group counts them.
    where : str
        Text that errors add to the name of the call, such as the object that it is made on.
    code : int
        `digest(call, facts)`, from callers that repeat a call; 0: it is computed here.
    """

    def __init__(
        self,
        call: str,
        facts: Facts = (),
        error: Exception | None = None,
        message: str | None = None,
        remedy: str | None = None,
        number: int | None = None,
        where: str = "",
        code: int = 0,
    ) -> None:
        self.call, self.facts, self.error, self.number = call, facts, error, number
        self.message, self.remedy, self.where, self.code = message, remedy, where, code
        self.groups: list[Voters] = []
        self.failed = error is not None

    def cast(self, group: Voters, values: Sequence[int] = ()) -> np.ndarray:
        """Return the values of all ranks, int64 (size, values); collective, even for a rank that has an error."""
        row = self.row(group, values)
        return self.count(group.exchange(row, self.text), len(values))

    def row(self, group: Voters, values: Sequence[int]) -> list[int]:
        """Return the row that this rank sends in an exchange of the group."""
        if len(values) > VALUES:
            raise ArgumentError("too many values in an agreement", found=len(values), expected=f"at most {VALUES}")
        self.groups.append(group)
        number = group.peers.calls + 1 if self.number is None else self.number
        self.number = number
        code = REFUSED
        if not self.failed:
            try:
                code = self.code or digest(self.call, self.facts)
            except Exception as error:
                self.refuse(ArgumentError(f"facts that have no text: {type(error).__name__}: {error}"))
        return [code, number, *values]

    def count(self, table: np.ndarray, values: int) -> np.ndarray:
        """Return the values in the rows of all ranks, (size, values), and note whether the ranks agree."""
        if not _alike(table):
            self.failed = True
        return table[:, 2 : 2 + values]

    def refuse(self, error: MpipipeError) -> None:
        """Add an error that this rank has found in the values of other ranks."""
        self.error = self.error or error
        self.failed = True

    @property
    def text(self) -> str:
        """The call in words."""
        return f"{self.call} (call {self.number}){self.where}"

    def decide(self) -> None:
        """Raise the same error on all ranks if they do not agree; one of them is to report it."""
        if not self.failed:
            return
        error = self.error
        if error is not None and not isinstance(error, MpipipeError):
            error = ArgumentError(f"{type(error).__name__}: {error}")
        world_rank = self.groups[0].world_rank
        entries = [Entry(error, Call(self.call, self.number, self.text), self.facts, world_rank)]
        for group in self.groups:
            entries = group.gather_reasons(entries, f"the reasons why ranks disagree in {self.text}")
        origin, problem = _first_problem(entries, self.message, self.remedy)
        _raise(problem, entries[origin].world_rank != world_rank, [entry.world_rank for entry in entries])


def raise_on_all(origin: int, problem: MpipipeError, group: Voters) -> NoReturn:
    """Raise an error that every rank of a group raises, having found the same; only rank `origin` is to report it."""
    _raise(problem, origin != group.rank, group.peers.members)


def raise_for_partners(problem: MpipipeError, reported_elsewhere: bool) -> NoReturn:
    """Raise an error that ranks have found in different groups, so that no group can take it for agreed."""
    _raise(problem, reported_elsewhere, ())


def agreed_by(problem: MpipipeError, group: Voters) -> MpipipeError:
    """Return the error, marked as one that all ranks of one more group raise."""
    problem.agreed |= frozenset(group.peers.members)
    return problem


def found_by_all(problem: MpipipeError, groups: Sequence[Voters]) -> MpipipeError:
    """Return the error, as one that all ranks of the groups have found in the same numbers; their ranks 0 report it."""
    problem.reported_elsewhere = any(group.rank for group in groups)
    problem.agreed = frozenset(rank for group in groups for rank in group.peers.members)
    return problem


def _raise(problem: MpipipeError, reported_elsewhere: bool, ranks: Iterable[int]) -> NoReturn:
    problem.reported_elsewhere, problem.agreed = reported_elsewhere, frozenset(ranks)
    raise problem


def peer_error(failure: Failure, remedy: str | None = None) -> PeerError:
    """The error of a rank that has heard of a failure. Another rank reports that failure."""
    error = PeerError(failure.text, remedy=remedy)
    error.reported_elsewhere = True
    error.failure = failure
    return error


def _first_problem(entries: list[Entry], message: str | None, remedy: str | None) -> tuple[int, MpipipeError]:
    """Return (rank that reports, error), from the entries of all ranks."""
    for index, entry in enumerate(entries):
        problem = entry.error
        if problem is not None:
            if problem.rank is None and len(entries) > 1:
                same = [rank for rank, other in enumerate(entries) if str(other.error) == str(problem)]
                problem.rank = rank_list.numbers(same, len(entries))
            return index, problem
    call, facts = entries[0].call, entries[0].facts
    odd = [rank for rank, entry in enumerate(entries) if entry.call[:2] != call[:2]]
    if odd:
        return 0, MismatchError(
            message or "ranks make different calls",
            rank=odd[0] if len(odd) == 1 else rank_list.numbers(odd),
            found=entries[odd[0]].call.text,
            expected=f"{call.text}, as on rank 0",
            remedy=remedy or "make the same calls in the same order on all ranks",
        )
    known = dict(facts)
    for entry in entries:
        for name, value in entry.facts:
            if repr(value) != repr(known.get(name)):
                expected = repr(known.get(name))
                odd = [rank for rank, other in enumerate(entries) if repr(dict(other.facts).get(name)) != expected]
                mismatch = MismatchError(
                    message or f"ranks differ in {name}",
                    rank=odd[0] if len(odd) == 1 else rank_list.numbers(odd),
                    found=_shown(name, value, message),
                    expected=f"{_shown(name, known.get(name), message)}, as on rank 0",
                    remedy=remedy,
                )
                mismatch.fact = name
                return 0, mismatch
    return 0, MismatchError("ranks disagree, and none can say in what", remedy="report this as a bug of mpipipe")


def _shown(name: str, value: object, message: str | None) -> str:
    text = value if isinstance(value, str) else repr(value)
    text = text if len(text) <= 200 else f"{text[:200]}..."
    return f"{name} {text}" if message else text


def _alike(table: np.ndarray) -> bool:
    """Return whether all ranks have sent the same code and number, and none has refused."""
    heads = table[:, :2].tolist()
    first = heads[0]
    return first[0] != REFUSED and heads.count(first) == len(heads)


def dumps_anyhow(entries: list[Entry]) -> bytes:
    """Return entries as bytes, even if an error or a fact cannot be pickled.

    In that case errors become ArgumentErrors with the same text, and facts become text.
    """
    try:
        return pickle.dumps(entries)
    except Exception:
        return pickle.dumps([_in_words(entry) for entry in entries])


def _in_words(entry: Entry) -> Entry:
    error = entry.error
    plain = None if error is None else ArgumentError(f"{type(error).__name__}: {error}")
    return Entry(plain, entry.call, (("facts", repr(entry.facts)),), entry.world_rank)


def digest(call: str, facts: Facts) -> int:
    """Return a hash from 0 to 2^63 - 1 of a call and its facts, the same in every process."""
    content = repr((call, facts)).encode("utf-8", "backslashreplace")
    return int.from_bytes(blake2b(content, digest_size=8).digest(), "big") >> 1
