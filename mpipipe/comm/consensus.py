"""Agreement: all ranks of a communicator find that they do the same thing, or all raise the same error.

    rank 0   [facts of "step", call 7 | values]  |                       all rows alike: go on, with the values of all
    rank 1   [facts of "step", call 7 | values]  |  one all-gather  ->
    rank 2   [facts of "close", call 7 | values] |                       else: a second, slow exchange, in words

The facts of a call are named values that must be the same on every rank. What travels is a number made of them; the
names and values themselves are exchanged only once something is wrong, for an error that says which fact differs, on
which ranks, and how.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np

from mpipipe.errors import ArgumentError, MismatchError, MpipipeError

if TYPE_CHECKING:
    from mpipipe.comm.group import Group

VALUES = 14  # most values of one rank in an agreement; what is longer is gathered
REFUSED = -1  # in place of the number of the facts, by a rank that has an error


class Ballot:
    """One agreement, over one group or over the groups along two axes of a grid, one after the other.

    Parameters
    ----------
    call, facts, error, message, remedy : as for Group.agree
    number : of the call, where the callers count; else the group does
    where : what errors add to the name of the call, such as the object that it is made on
    code : digest(call, facts), from callers that make the same call again and again
    """

    def __init__(
        self,
        call,
        facts=(),
        error=None,
        message=None,
        remedy=None,
        number: int | None = None,
        where: str = "",
        code: int = 0,
    ):
        self.code = code
        self.call, self.facts, self.error, self.number, self.where = call, facts, error, number, where
        self.message, self.remedy = message, remedy
        self.groups: list[Group] = []
        self.failed = error is not None

    def cast(self, group: Group, values: Sequence[int] = ()) -> np.ndarray:
        """Everybody's values, int64 (size, values); collective, whatever this rank has found so far."""
        if len(values) > VALUES:
            raise ArgumentError("too many values in an agreement", found=len(values), expected=f"at most {VALUES}")
        self.groups.append(group)
        number = group.presence.calls + 1 if self.number is None else self.number
        self.number = number
        code = REFUSED
        if not self.failed:
            try:
                code = self.code or digest(self.call, self.facts)
            except Exception as error:
                self.refuse(ArgumentError(f"facts that have no text: {type(error).__name__}: {error}"))
        table = group.exchange([code, number, *values], self.text)
        if code == REFUSED or not _alike(table):
            self.failed = True
        return table[:, 2 : 2 + len(values)]

    def refuse(self, error: MpipipeError):
        """Bring an error that this rank has found in what the others said."""
        self.error = self.error or error
        self.failed = True

    @property
    def text(self) -> str:
        return f"{self.call} (call {self.number}){self.where}"

    def decide(self):
        """Return where all ranks agree; else raise the same error on all of them, which one of them is to report."""
        if not self.failed:
            return
        error = self.error
        if error is not None and not isinstance(error, MpipipeError):
            error = ArgumentError(f"{type(error).__name__}: {error}")
        world_rank = self.groups[0].world_rank
        entries = [(error, (self.call, self.number, self.text), self.facts, world_rank)]
        for group in self.groups:
            entries = group.explain(entries, f"the reasons why ranks disagree in {self.text}")
        ranks = [rank for *_, rank in entries]
        origin, problem = _first_problem([entry[:3] for entry in entries], self.message, self.remedy)
        _raise(problem, ranks[origin] != world_rank, ranks)


def raise_on_all(origin: int, problem: MpipipeError, group: Group):
    """Raise what every rank of a group raises, who all have found the same; only rank `origin` is to report it."""
    _raise(problem, origin != group.rank, group.presence.members)


def _raise(problem, reported_elsewhere, ranks):
    problem.reported_elsewhere, problem.agreed = reported_elsewhere, frozenset(ranks)
    raise problem


def _first_problem(entries, message, remedy):
    """(rank that reports, error) from (error, call, facts) of every rank."""
    for index, (problem, _, _) in enumerate(entries):
        if problem is not None:
            if problem.rank is None:
                same = [rank for rank, (other, _, _) in enumerate(entries) if str(other) == str(problem)]
                problem.rank = ", ".join(map(str, same))
            return index, problem
    _, call, facts = entries[0]
    calls = [rank for rank, entry in enumerate(entries) if entry[1][:2] != call[:2]]
    if calls:
        return 0, MismatchError(
            message or "ranks make different calls",
            rank=_listed(calls),
            found=entries[calls[0]][1][2],
            expected=f"{call[2]}, as on rank 0",
            remedy=remedy or "make the same calls in the same order on all ranks",
        )
    known = dict(facts)
    for _, _, other in entries:
        for name, value in other:
            if repr(value) != repr(known.get(name)):
                odd = [r for r, entry in enumerate(entries) if repr(dict(entry[2]).get(name)) != repr(known.get(name))]
                problem = MismatchError(
                    message or f"ranks differ in {name}",
                    rank=_listed(odd),
                    found=_shown(name, value, message),
                    expected=f"{_shown(name, known.get(name), message)}, as on rank 0",
                    remedy=remedy,
                )
                problem.fact = name
                return 0, problem
    return 0, MismatchError("ranks disagree, and none can say in what", remedy="report this as a bug of mpipipe")


def _listed(ranks) -> int | str:
    if len(ranks) == 1:
        return ranks[0]
    shown = ", ".join(map(str, ranks[:8]))
    return shown if len(ranks) <= 8 else f"{shown} and {len(ranks) - 8} more"


def _shown(name, value, message) -> str:
    text = value if isinstance(value, str) else repr(value)
    text = text if len(text) <= 200 else f"{text[:200]}..."
    return f"{name} {text}" if message else text


def _alike(table) -> bool:
    """Whether all ranks sent the same code and number, and none has refused."""
    heads = table[:, :2].tolist()
    first = heads[0]
    return first[0] != REFUSED and heads.count(first) == len(heads)


def dumps_anyhow(entries) -> bytes:
    """What ranks tell each other of a disagreement; an error that cannot be pickled, as ArgumentError with its text."""
    try:
        return pickle.dumps(entries)
    except Exception:
        plain = [
            (error if error is None else ArgumentError(f"{type(error).__name__}: {error}"), call, repr(facts), rank)
            for error, call, facts, rank in entries
        ]
        return pickle.dumps([(error, call, (("facts", facts),), rank) for error, call, facts, rank in plain])


def digest(call: str, facts: tuple) -> int:
    """A number from 0 to 2^63 - 1 for a call and its facts, the same in every process."""
    content = repr((call, facts)).encode("utf-8", "backslashreplace")
    return int.from_bytes(blake2b(content, digest_size=8).digest(), "big") >> 1
