"""What the dumps of all ranks mean together: which rank waits for which, and which is to blame.

A rank that waits is blocked by those that must come. These blocks, followed from rank to rank, lead
to ranks that do not wait for others: they are silent, or they compute, or they are in code outside
of this package, or they wait for something of their own, such as a disk.

Ranks that wait for each other in different calls are known at once: no time need pass.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from graphlib import CycleError, TopologicalSorter
from math import inf

from mpipipe.errors import MismatchError
from mpipipe.job.rank_list import named
from mpipipe.job.types import GroupName
from mpipipe.job.watch.dump import BUSY, Dump, Dumps, RankPlace, Waits
from mpipipe.text import counted

LISTED = 8  # waits that a report lists, and ranks that it blames
# A rank has waited so long for all others when it asks where they are.
TELL_SECONDS = 2.0


def judge(
    dumps: Dumps, silent: Mapping[int, RankPlace] | None = None, quiet: float = 0.0
) -> list[str]:
    """Compare the dumps of all ranks that have answered; name those that are to blame.

    Keys are world ranks. `silent` are those that have not answered, for `quiet` seconds.
    """
    culprits = [_silence(rank, place, quiet) for rank, place in (silent or {}).items()]
    blockers = {rank: _blockers(dump, dumps) for rank, dump in dumps.items()}
    blocking = set().union(*blockers.values())
    for rank, dump in dumps.items():
        alone = bool(dump.waits) and not any(wait.peers for wait in dump.waits)
        if alone or (rank in blocking and not dump.waits):
            culprits.append(_occupation(dump, alone))
    culprits = culprits or _diverged(dumps)
    if culprits:
        return culprits
    for rank in circle(blockers) or sorted(filter(blockers.get, blockers)):
        for_what = "; ".join(wait.text for wait in dumps[rank].waits)
        others = f"waits for {named(blockers[rank])}, which waits too"
        culprits.append(f"{_named(dumps[rank])} {others}: {for_what}")
    return culprits


def _blockers(dump: Dump, dumps: Dumps) -> set[int]:
    """Return the ranks that one rank waits for: of a meeting, those that have not come to it."""
    blocking: set[int] = set()
    for wait in dump.waits:
        missing = set(wait.peers)
        for rank, other in dumps.items():
            if wait.meeting and wait.meeting in [entered.meeting for entered in other.waits]:
                missing.discard(rank)
        blocking |= missing
    return blocking - {dump.rank}


def circle(blockers: Mapping[int, Collection[int]]) -> list[int]:
    """Return ranks that wait for the next one, and the last for the first; [] if there are none."""
    try:
        TopologicalSorter(blockers).prepare()
    except CycleError as error:
        ranks = error.args[1][:0:-1]  # the first one is the last one, too
        first = ranks.index(min(ranks))
        return [*ranks[first:], *ranks[:first]]
    return []


def mismatch(dumps: Dumps) -> MismatchError | None:
    """Return the error of ranks that wait for each other in different calls, if there are any.

    One waits in a call for another that has not begun it, and waits itself. Where each of them has
    one thread, none will ever come. A rank that is seen later is still where it was seen, so it
    does not matter that ranks are seen one after the other.
    """
    blockers: dict[int, set[int]] = {}
    for rank, dump in dumps.items():
        blockers[rank] = set()
        for wait in dump.waits:
            if wait.meeting is None or dump.reached is None:
                continue
            name, number = wait.meeting
            for peer in {*wait.peers}.intersection(dumps) - {rank}:
                reached = dumps[peer].reached
                if reached is not None and _last_call(reached, name) < number:
                    blockers[rank].add(peer)
    ranks = circle(blockers)
    if not ranks:
        return None
    first, second = dumps[ranks[0]], dumps[ranks[1]]
    return MismatchError(
        "ranks wait for each other in different calls",
        rank=first.rank,
        found=first.waits[0].text,
        expected=f"{second.waits[0].text}, in which rank {second.rank} waits",
        remedy="make the same calls on the same objects, in the same order on all ranks",
    )


def _last_call(reached: Mapping[GroupName, int], name: GroupName) -> float:
    """Return the last call that a rank has begun; one that has closed a group began them all."""
    if len(name) > 1:
        return reached.get(name, inf)
    return reached.get(name, 0)


# -- what is wrong, as text ------------------------------------------------------------------------


def _named(dump: Dump) -> str:
    return f"rank {dump.rank} on {dump.host}"


def _silence(rank: int, place: RankPlace, quiet: float) -> str:
    if not place.host:
        return (
            f"rank {rank} does not answer: it has left, has not called mpipipe yet, or one "
            "call keeps it busy"
        )
    state = place.state
    name = f"rank {rank} on {place.host} (process {place.pid})"
    if not place.threaded and state in ("", *BUSY):
        return (
            f"{name} waits for no message; more is not known, since MPI was initialised "
            "without MPI_THREAD_MULTIPLE"
        )
    unknown = "nothing is known of its process: a slow node, a lost one, or one without a watchdog"
    return f"{name} is silent: it has not answered for {quiet:.0f} s; {state or unknown}"


def _occupation(dump: Dump, alone: bool) -> str:
    name = _named(dump)
    if dump.ended:
        return f"{name} has come to the end of its program"
    if alone:
        wait = dump.waits[0]
        return f"{name} has waited {wait.seconds:.0f} s for {wait.text}, and for no other rank"
    place = ""
    if dump.where:
        place = f", at {dump.where}"
    what = "busy elsewhere"
    for snapshot in dump.active:
        if snapshot.computes:
            return f"{name} has been computing for {dump.quiet:.0f} s: {snapshot.doing}{place}"
        what = f"in {snapshot.doing}"
    return f"{name} has been {what} for {dump.quiet:.0f} s{place}"


def _diverged(dumps: Dumps) -> list[str]:
    """Say which ranks are past an action for whose message another one waits."""
    culprits = []
    for rank, dump in dumps.items():
        for wait in dump.waits:
            for peer in dumps.keys() & wait.peers:
                action = _maker(wait, dumps[peer])
                if action:
                    culprits.append(
                        f"{_named(dumps[peer])} diverged: it is past {action}, but rank {rank} "
                        f"still waits for what this makes, {wait.text}"
                    )
    return culprits


def _maker(wait: Waits, sender: Dump) -> str:
    """Return the action, done by its sender, that makes a message; "" if there is none."""
    for snapshot in sender.active:
        for text, action in snapshot.made:
            if wait.meeting is None and wait.text.startswith(text):
                return action
    return ""


def _waiting(dumps: Dumps) -> list[str]:
    """Say who waits for what, ranks with the same text in one line."""
    texts: dict[str, list[int]] = {}
    for rank, dump in dumps.items():
        doing = ""
        for snapshot in dump.active[:1]:
            doing = f", in {snapshot.doing}"
        for wait in dump.waits:
            texts.setdefault(f"for {wait.text}{doing}", []).append(rank)
    lines = []
    for text, ranks in texts.items():
        verb = "wait"
        if len(ranks) == 1:
            verb = "waits"
        lines.append(f"{named(ranks)} {verb} {text}")
    return lines


# -- The report of a hang --------------------------------------------------------------------------


HUNG = 124  # exit code of a job that hangs, as of timeout(1)
REMEDY = (
    "look at the first rank named; --watchdog of train, or MPIPIPE_WATCHDOG, sets the limit "
    "(0: none)"
)


def report_lines(
    dumps: Dumps, silent: Mapping[int, RankPlace] | None = None, quiet: float = 0.0
) -> list[str]:
    """Return which ranks are to blame, and then who waits for what."""
    ordered = dict(sorted(dumps.items()))
    blamed = judge(ordered, silent, quiet)
    return [*_first(blamed, "rank"), *_first(_waiting(ordered), "wait")]


def _first(lines: list[str], what: str) -> list[str]:
    more = len(lines) - LISTED
    if more <= 0:
        return lines
    return [*lines[:LISTED], f"and {counted(more, what)} more"]
