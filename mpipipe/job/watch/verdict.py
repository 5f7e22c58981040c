"""What the dumps of all ranks mean together: which rank waits for which, and which is to blame.
Pure functions of data.

A rank that waits is blocked by those that must come. These blocks, followed from rank to rank, lead
to ranks that do not wait for others: they are silent, or they compute, or they are in code outside
of this package, or they wait for something of their own, such as a disk. Before that, the plans are
asked: a rank that went past an action without sending what the plan says has diverged, and so has
one that sent a message under another tag or size than the receiver expects.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from mpipipe import files
from mpipipe.job.flight import Message
from mpipipe.job.rank_list import by_text, named
from mpipipe.job.report import heading, write
from mpipipe.job.watch.channel import STATES, Dump, RankPlace
from mpipipe.text import counted

LISTED = 8  # waits that a report lists, and ranks that it blames


class Unresponsive(NamedTuple):
    """A rank that has not answered."""

    rank: int  # in COMM_WORLD
    place: RankPlace
    seconds: float


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
        more = (
            [f"and {counted(len(self.culprits) - LISTED, 'rank')} more"]
            if len(self.culprits) > LISTED
            else []
        )
        waits = (
            [f"and {counted(len(self.waiting) - LISTED, 'wait')} more"]
            if len(self.waiting) > LISTED
            else []
        )
        return [*(c.text for c in self.culprits[:LISTED]), *more, *self.waiting[:LISTED], *waits]


def judge(dumps: Mapping[int, Dump], unresponsive: Sequence[Unresponsive] = ()) -> HangVerdict:
    """Compare the dumps of all ranks that have answered; keys are world ranks."""
    blockers = {rank: _blockers(dump, dumps) for rank, dump in dumps.items()}
    culprits = [Culprit(each.rank, _silence(each, dumps)) for each in unresponsive]
    lost: list[Culprit] = []
    for dump in dumps.values():
        culprits += _skipped(dump)
    for dump in dumps.values():
        _compare_message(dump, dumps, culprits, lost)
    blamed = {each.rank for each in culprits}
    wanted = _reachable(blockers)
    for rank, dump in dumps.items():
        if rank not in blamed and (_waits_alone(dump) or (rank in wanted and not dump.waits)):
            culprits.append(Culprit(rank, _occupation(dump)))
    if not culprits:
        culprits = lost or [
            Culprit(
                rank,
                f"{_named(dumps[rank])} waits for {named(blockers[rank])}, which waits too: "
                + "; ".join(wait.text for wait in dumps[rank].waits),
            )
            for rank in _first_circle(blockers)
        ]
    return HangVerdict(culprits, _waiting(dumps))


def _blockers(dump: Dump, dumps: Mapping[int, Dump]) -> set[int]:
    """Return the ranks that one rank waits for: of a meeting, those that have not come to it."""
    blocking: set[int] = set()
    for wait in dump.waits:
        met = {
            rank
            for rank, other in dumps.items()
            if wait.meeting in [entered.meeting for entered in other.waits]
        }
        blocking |= set(wait.peers) - {dump.rank} - (met if wait.meeting is not None else set())
    return blocking


def _waits_alone(dump: Dump) -> bool:
    """Return whether a rank waits, and for no other rank: for a disk, say."""
    return bool(dump.waits) and not any(wait.peers for wait in dump.waits)


def _reachable(blockers: Mapping[int, set[int]]) -> set[int]:
    """Return all ranks that some rank waits for, also through others."""
    reached: set[int] = set()
    left = [peer for peers in blockers.values() for peer in peers]
    while left:
        rank = left.pop()
        if rank not in reached:
            reached.add(rank)
            left += blockers.get(rank, ())
    return reached


def _first_circle(blockers: Mapping[int, set[int]]) -> list[int]:
    """Return ranks that each wait for the next one, and the last for the first; else all that
    wait.
    """
    for start in sorted(blockers):
        path = [start]
        while nexts := sorted(blockers.get(path[-1], ())):
            if nexts[0] in path:
                return path[path.index(nexts[0]) :]
            path.append(nexts[0])
    return sorted(rank for rank, peers in blockers.items() if peers)


# -- what is wrong, as text ------------------------------------------------------------------------


def _named(dump: Dump) -> str:
    return f"rank {dump.rank} on {dump.host}"


def _silence(it: Unresponsive, dumps: Mapping[int, Dump]) -> str:
    place = it.place
    if not place.host:
        return (
            f"rank {it.rank} does not answer: it has left, has not called mpipipe yet, or one "
            "call keeps it busy"
        )
    state = next(
        (d.neighbours[it.rank].state for d in dumps.values() if it.rank in d.neighbours), ""
    )
    name = f"rank {it.rank} on {place.host} (process {place.pid})"
    if not place.threaded and state in ("", STATES["R"], STATES["S"]):
        return (
            f"{name} waits for no message; more is not known, since MPI was initialised "
            "without MPI_THREAD_MULTIPLE"
        )
    unknown = "nothing is known of its process: a slow node, a lost one, or one without a watchdog"
    return f"{name} is silent: it has not answered for {it.seconds:.0f} s; {state or unknown}"


def _skipped(dump: Dump) -> Iterable[Culprit]:
    for snapshot in dump.snapshots:
        for message in snapshot.skipped[:1]:
            text = f"it has not sent {message.text} to rank {message.peer} ({_transfer(message)})"
            past = "although it went past the action that makes it"
            yield Culprit(dump.rank, f"{_named(dump)} diverged: {text}, {past}")


def _compare_message(
    dump: Dump, dumps: Mapping[int, Dump], culprits: list[Culprit], lost: list[Culprit]
) -> None:
    """Look at the other end of each message that a rank waits for."""
    for snapshot in dump.snapshots:
        wanted = snapshot.expects
        if wanted is None or wanted.peer not in dumps:
            continue
        sender = _named(dumps[wanted.peer])
        for other in dumps[wanted.peer].snapshots:
            if (other.key, other.call) != (
                snapshot.key,
                snapshot.call,
            ):  # ranks may be a step apart
                continue
            for sent in other.sent:
                if (sent.peer, sent.name) != (dump.rank, wanted.name):
                    continue
                if sent.tag != wanted.tag or len({sent.nbytes, wanted.nbytes} - {None}) > 1:
                    text = (
                        f"sent {sent.text} as {_transfer(sent)}; rank {dump.rank} expects "
                        f"{_transfer(wanted)}"
                    )
                    culprits.append(Culprit(wanted.peer, f"{sender} diverged: it {text}"))
                else:
                    text = (
                        f"sent {sent.text} to rank {dump.rank} ({_transfer(sent)}), where it "
                        "has not arrived"
                    )
                    lost.append(Culprit(wanted.peer, f"{sender} {text}"))


def _transfer(message: Message) -> str:
    size = "" if message.nbytes is None else f", {message.nbytes} bytes"
    return f"channel {message.tag[0]}, tag {message.tag[1]}{size}"


def _occupation(dump: Dump) -> str:
    place = f", at {dump.where}" if dump.where else ""
    if dump.ended:
        return f"{_named(dump)} has come to the end of its program"
    if _waits_alone(dump):
        wait = dump.waits[0]
        return (
            f"{_named(dump)} has waited {wait.seconds:.0f} s for {wait.text}, and for no other rank"
        )
    busy = sorted(
        (snapshot for snapshot in dump.snapshots if snapshot.doing),
        key=lambda each: not each.computes,
    )
    if busy and busy[0].computes:
        return f"{_named(dump)} has been computing for {dump.quiet:.0f} s: {busy[0].doing}{place}"
    what = f"in {busy[0].doing}" if busy else "busy elsewhere"
    return f"{_named(dump)} has been {what} for {dump.quiet:.0f} s{place}"


def _waiting(dumps: Mapping[int, Dump]) -> list[str]:
    """Say who waits for what, ranks with the same text in one line."""
    texts = []
    for rank, dump in sorted(dumps.items()):
        doing = next((f", in {each.doing}" for each in dump.snapshots if each.doing), "")
        texts += [(rank, f"for {wait.text}{doing}") for wait in dump.waits]
    return [
        f"{named(them)} {'waits' if len(them) == 1 else 'wait'} {text}"
        for text, them in by_text(texts).items()
    ]


# -- The report of a hang: some lines on stderr, and a folder with stacks and what all ranks do ----


HUNG = 124  # exit code of a job that hangs, as of timeout(1)
REMEDY = (
    "look at the first rank named; --watchdog of train, or MPIPIPE_WATCHDOG, sets the limit "
    "(0: none)"
)


def publish(
    verdict: HangVerdict,
    dumps: Mapping[int, Dump],
    quiet: float,
    folder: Path | None,
    place: tuple[int, int],
) -> None:
    """Write the files and the report; `place` is (world rank, ranks) of the rank that reports.
    Never raises OSError.
    """
    lines = [f"no rank has made progress for {quiet:.1f} s", *verdict.lines()]
    try:
        lines.append(f"stacks: {_write_files(verdict, dumps, folder)}")
    except OSError as error:
        lines.append(f"no file could be written ({error}); stacks of the first rank named:")
        stacks = _stacks(dumps)
        lines += next(
            (stacks[each.rank] for each in verdict.culprits if each.rank in stacks), "none"
        ).splitlines()
    lines.append(f"remedy: {REMEDY}")
    write("\n".join([heading(*place), *(f"  {line}" for line in lines), ""]))


def _write_files(verdict: HangVerdict, dumps: Mapping[int, Dump], folder: Path | None) -> Path:
    """Return a folder named by the time: report.txt for all ranks, rank-N.txt for each of the first
    culprits.
    """
    parent = folder if folder is not None and folder.is_dir() else Path()
    path = files.new_folder(parent / time.strftime("hang-%Y%m%d-%H%M%S"))
    texts = [*verdict.lines(), ""]
    for rank, dump in sorted(dumps.items()):
        texts += [
            f"rank {rank} on {dump.host}, quiet for {dump.quiet:.1f} s, at {dump.where}",
            *_state(dump),
            "",
        ]
    (path / "report.txt").write_text("\n".join(texts), encoding="utf-8", errors="backslashreplace")
    stacks = _stacks(dumps)
    for rank in list(dict.fromkeys(each.rank for each in verdict.culprits if each.rank in stacks))[
        :LISTED
    ]:
        (path / f"rank-{rank}.txt").write_text(
            stacks[rank], encoding="utf-8", errors="backslashreplace"
        )
    return path


def _stacks(dumps: Mapping[int, Dump]) -> dict[int, str]:
    """Return stacks by world rank, of ranks that answer and of those that were looked at from
    outside.
    """
    stacks = {
        rank: seen.stacks
        for dump in dumps.values()
        for rank, seen in dump.neighbours.items()
        if seen.stacks
    }
    for rank, dump in dumps.items():
        stacks[rank] = "\n".join([f"rank {rank} on {dump.host}", *_state(dump), "", dump.stacks])
    return stacks


def _state(dump: Dump) -> list[str]:
    lines = [f"  waits {wait.seconds:.1f} s for {wait.text}" for wait in dump.waits]
    for snapshot in dump.snapshots:
        state = f"in {snapshot.doing}" if snapshot.doing else "between calls"
        expects = "" if snapshot.expects is None else f"; expects {snapshot.expects.text}"
        lines.append(f"  {state}{expects}")
    return lines
