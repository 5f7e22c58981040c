"""What the dumps of all ranks mean together: which rank waits for which, and which is to blame.

A rank that waits is blocked by those that must come. These blocks, followed from rank to rank, lead
to ranks that do not wait for others: they are silent, or they compute, or they are in code outside
of this package, or they wait for something of their own, such as a disk. Before that, the plans are
asked: a rank that went past an action without sending what the plan says has diverged, and so has
one that sent a message under another tag or size than the receiver expects.

Ranks that wait for each other in different calls are known at once: no time need pass.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from graphlib import CycleError, TopologicalSorter
from math import inf
from pathlib import Path
from typing import NamedTuple

from mpipipe import files
from mpipipe.errors import MismatchError
from mpipipe.job.flight import Message
from mpipipe.job.rank_list import named
from mpipipe.job.report import heading, write
from mpipipe.job.types import GroupName
from mpipipe.job.watch.dump import BUSY, Dump, Dumps, RankPlace
from mpipipe.text import counted

LISTED = 8  # waits that a report lists, and ranks that it blames
# A rank has waited so long for all others when it asks where they are.
TELL_SECONDS = 2.0


class Culprit(NamedTuple):
    """A rank that others wait for, and what it does, as text."""

    rank: int
    text: str


class HangVerdict(NamedTuple):
    """Which ranks are to blame, and in words who waits for what."""

    culprits: list[Culprit]
    waiting: list[str]

    def lines(self) -> list[str]:
        """Return text for a person: the culprits first."""
        blamed = [culprit.text for culprit in self.culprits]
        return [*_first(blamed, "rank"), *_first(self.waiting, "wait")]


def _first(lines: list[str], what: str) -> list[str]:
    more = len(lines) - LISTED
    if more <= 0:
        return lines
    return [*lines[:LISTED], f"and {counted(more, what)} more"]


def judge(
    dumps: Dumps, silent: Mapping[int, RankPlace] | None = None, quiet: float = 0.0
) -> HangVerdict:
    """Compare the dumps of all ranks that have answered; keys are world ranks.

    `silent` are those that have not, for `quiet` seconds.
    """
    culprits = []
    for rank, place in (silent or {}).items():
        culprits.append(Culprit(rank, _silence(rank, place, quiet, dumps)))
    for dump in dumps.values():
        for snapshot in dump.snapshots:
            for message in snapshot.skipped[:1]:
                text = (
                    f"it has not sent {message.text} to rank {message.peer} "
                    f"({_transfer(message)}), although it went past the action that makes it"
                )
                culprits.append(Culprit(dump.rank, f"{_named(dump)} diverged: {text}"))
    lost: list[Culprit] = []
    for dump in dumps.values():
        _compare_message(dump, dumps, culprits, lost)
    blockers = {rank: _blockers(dump, dumps) for rank, dump in dumps.items()}
    blamed = {culprit.rank for culprit in culprits}
    blocking = set().union(*blockers.values())
    for rank, dump in dumps.items():
        alone = bool(dump.waits) and not any(wait.peers for wait in dump.waits)
        if rank not in blamed and (alone or (rank in blocking and not dump.waits)):
            culprits.append(Culprit(rank, _occupation(dump, alone)))
    if not culprits:
        culprits = lost
    if not culprits:
        for rank in circle(blockers) or sorted(filter(blockers.get, blockers)):
            for_what = "; ".join(wait.text for wait in dumps[rank].waits)
            others = f"waits for {named(blockers[rank])}, which waits too"
            culprits.append(Culprit(rank, f"{_named(dumps[rank])} {others}: {for_what}"))
    return HangVerdict(culprits, _waiting(dumps))


def blame(dumps: Dumps) -> str:
    """Say what others do that keeps a rank waiting, after "; "; "" if that is not known."""
    culprits = judge(dumps).culprits
    if not culprits:
        return ""
    text = f"; {culprits[0].text}"
    if len(culprits) > 1:
        text += f", and {len(culprits) - 1} ranks more"
    return text


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


def _silence(rank: int, place: RankPlace, quiet: float, dumps: Dumps) -> str:
    if not place.host:
        return (
            f"rank {rank} does not answer: it has left, has not called mpipipe yet, or one "
            "call keeps it busy"
        )
    state = ""
    for dump in dumps.values():
        state = dump.states.get(rank, state)
    name = f"rank {rank} on {place.host} (process {place.pid})"
    if not place.threaded and state in ("", *BUSY):
        return (
            f"{name} waits for no message; more is not known, since MPI was initialised "
            "without MPI_THREAD_MULTIPLE"
        )
    unknown = "nothing is known of its process: a slow node, a lost one, or one without a watchdog"
    return f"{name} is silent: it has not answered for {quiet:.0f} s; {state or unknown}"


def _compare_message(
    dump: Dump, dumps: Dumps, culprits: list[Culprit], lost: list[Culprit]
) -> None:
    """Look at the other end of each message that a rank waits for."""
    for snapshot in dump.snapshots:
        expected = snapshot.expects
        if expected is None or expected.peer not in dumps:
            continue
        sender = dumps[expected.peer]
        for other in sender.snapshots:
            # ranks may be a step apart
            if (other.key, other.call) != (snapshot.key, snapshot.call):
                continue
            for sent in other.sent:
                if (sent.peer, sent.name) != (dump.rank, expected.name):
                    continue
                if sent.tag != expected.tag or len({sent.nbytes, expected.nbytes} - {None}) > 1:
                    text = (
                        f"{_named(sender)} diverged: it sent {sent.text} as {_transfer(sent)}; "
                        f"rank {dump.rank} expects {_transfer(expected)}"
                    )
                    culprits.append(Culprit(sender.rank, text))
                else:
                    text = (
                        f"{_named(sender)} sent {sent.text} to rank {dump.rank} "
                        f"({_transfer(sent)}), where it has not arrived"
                    )
                    lost.append(Culprit(sender.rank, text))


def _transfer(message: Message) -> str:
    size = ""
    if message.nbytes is not None:
        size = f", {message.nbytes} bytes"
    return f"channel {message.tag[0]}, tag {message.tag[1]}{size}"


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


def _waiting(dumps: Dumps) -> list[str]:
    """Say who waits for what, ranks with the same text in one line."""
    texts: dict[str, list[int]] = {}
    for rank, dump in sorted(dumps.items()):
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


# -- The report of a hang: some lines on stderr, and a folder with stacks and what all ranks do ----


HUNG = 124  # exit code of a job that hangs, as of timeout(1)
REMEDY = (
    "look at the first rank named; --watchdog of train, or MPIPIPE_WATCHDOG, sets the limit "
    "(0: none)"
)


def publish(
    dumps: Dumps, silent: Mapping[int, RankPlace], folder: Path | None, rank: int, size: int
) -> None:
    """Write the files and the report of world rank `rank` of `size`. Never raises OSError."""
    quiet = dumps[rank].quiet
    verdict = judge(dict(sorted(dumps.items())), silent, quiet)
    lines = [f"no rank has made progress for {quiet:.1f} s", *verdict.lines()]
    texts = {"report": "\n".join([*verdict.lines(), "", *_states(dumps)])}
    for culprit in verdict.culprits[:LISTED]:
        if culprit.rank in dumps:
            dump = dumps[culprit.rank]
            texts[f"rank-{dump.rank}"] = "\n".join([*_states({dump.rank: dump}), dump.stacks])
            continue
        stacks = silent[culprit.rank].stacks()
        if stacks:
            texts[f"rank-{culprit.rank}"] = stacks
    try:
        parent = Path()
        if folder is not None and folder.is_dir():
            parent = folder
        path = files.new_folder(parent / time.strftime("hang-%Y%m%d-%H%M%S"))
        for name, text in texts.items():
            (path / f"{name}.txt").write_text(text, "utf-8", "backslashreplace")
        lines.append(f"stacks: {path}")
    except OSError as error:
        lines.append(f"no file could be written ({error}); stacks of the first rank named:")
        lines += [*texts.values(), "none"][1].splitlines()
    lines.append(f"remedy: {REMEDY}")
    write("\n  ".join([heading(rank, size), *lines]) + "\n")


def _states(dumps: Dumps) -> list[str]:
    """Say where each rank is, what it waits for, and how far it has come in its plans."""
    lines = []
    for rank, dump in sorted(dumps.items()):
        lines.append(f"rank {rank} on {dump.host}, quiet for {dump.quiet:.1f} s, at {dump.where}")
        for wait in dump.waits:
            lines.append(f"  waits {wait.seconds:.1f} s for {wait.text}")
        for snapshot in dump.snapshots:
            state = "between calls"
            if snapshot.doing:
                state = f"in {snapshot.doing}"
            if snapshot.expects is not None:
                state += f"; expects {snapshot.expects.text}"
            lines.append(f"  {state}")
        lines.append("")
    return lines
