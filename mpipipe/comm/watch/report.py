"""The report of a hang: some lines on stderr, and a folder with stacks and the last operations of all ranks."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from mpipipe.comm.report import heading, write
from mpipipe.comm.watch.dump import Dump
from mpipipe.comm.watch.verdict import LISTED, Verdict

HUNG = 124  # exit code of a job that hangs, as of timeout(1)
REMEDY = "look at the first rank named; --watchdog of train, or MPIPIPE_WATCHDOG, sets the limit (0: none)"


def publish(
    verdict: Verdict, dumps: Mapping[int, Dump], quiet: float, folder: Path | None, place: tuple[int, int]
) -> None:
    """Write the files and the report; `place` is (world rank, ranks) of whoever reports. Never raises OSError."""
    lines = [f"no rank has made progress for {quiet:.1f} s", *verdict.lines()]
    try:
        lines.append(f"stacks and last operations: {_write_files(verdict, dumps, folder)}")
    except OSError as error:
        lines.append(f"no file could be written ({error}); stacks of the first rank named:")
        stacks = _stacks(dumps)
        lines += next((stacks[each.rank] for each in verdict.culprits if each.rank in stacks), "none").splitlines()
    lines.append(f"remedy: {REMEDY}")
    write("\n".join([heading(*place), *(f"  {line}" for line in lines), ""]))


def _write_files(verdict: Verdict, dumps: Mapping[int, Dump], folder: Path | None) -> Path:
    """A folder named by the time: report.txt for all ranks, rank-N.txt for each of the first culprits."""
    stem = (folder if folder is not None and folder.is_dir() else Path()) / time.strftime("hang-%Y%m%d-%H%M%S")
    found = stem
    for number in range(1, 100):
        try:
            found.mkdir()
            break
        except FileExistsError:
            found = Path(f"{stem}-{number}")
    texts = [*verdict.lines(), ""]
    for rank, dump in sorted(dumps.items()):
        texts += [f"rank {rank} on {dump.host}, quiet for {dump.quiet:.1f} s, at {dump.where}", *_operations(dump), ""]
    (found / "report.txt").write_text("\n".join(texts), encoding="utf-8", errors="backslashreplace")
    stacks = _stacks(dumps)
    for rank in list(dict.fromkeys(each.rank for each in verdict.culprits if each.rank in stacks))[:LISTED]:
        (found / f"rank-{rank}.txt").write_text(stacks[rank], encoding="utf-8", errors="backslashreplace")
    return found


def _stacks(dumps: Mapping[int, Dump]) -> dict[int, str]:
    """Stacks by world rank, of ranks that answer and of those that were looked at from outside."""
    found = {rank: seen.stacks for dump in dumps.values() for rank, seen in dump.neighbours.items() if seen.stacks}
    for rank, dump in dumps.items():
        found[rank] = "\n".join([f"rank {rank} on {dump.host}", *_operations(dump), "", dump.stacks])
    return found


def _operations(dump: Dump) -> list[str]:
    lines = [f"  waits {wait.seconds:.1f} s for {wait.text}" for wait in dump.waits]
    for account in dump.accounts:
        state = f"in {account.doing}" if account.doing else "between calls"
        expects = "" if account.expects is None else f"; expects {account.expects.text}"
        lines += [f"  {state}{expects}", *(f"    {text}" for text in account.operations)]
    return [*lines, *(f"  {text}" for text in dump.operations)]
