"""Many cases one after another, and the table of what came of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from faults.fault import Case
from faults.play import HUNG, PASSED, SILENT, WRONG, Verdict, play
from mpipipe.text import text_table

STATUSES = (PASSED, HUNG, SILENT, WRONG)


def play_all(
    jobs: Iterable[tuple[str, str, Case]],
    limit: float | None = None,
    at_once: int = 1,
    show: Callable[[str], object] = print,
) -> list[tuple[str, Verdict]]:
    """Return (MPI, verdict) of cases, `at_once` of them played at a time; show failures as they come.

    Each job is the name of an MPI, its python, and the case. After Ctrl-C these are the cases that were done.
    """
    jobs = list(jobs)
    results: list[tuple[str, Verdict]] = []

    def one(name: str, python: str, case: Case) -> None:
        verdict = play(case, python, limit)
        results.append((name, verdict))
        if verdict.status != PASSED:
            show(f"{len(results)}/{len(jobs)} {name} {verdict}")

    with ThreadPoolExecutor(at_once) as pool:
        started = [pool.submit(one, *job) for job in jobs]
        try:
            for each in started:
                each.result()
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)
            show(f"interrupted after {len(results)} of {len(jobs)} cases")
    return results


def table(results: Iterable[tuple[str, Verdict]]) -> str:
    """Rows of MPI and class: jobs, what came of them, and their seconds."""
    groups: dict[tuple[str, str], list[Verdict]] = {}
    for name, verdict in results:
        groups.setdefault((name, verdict.case.fault.kind), []).append(verdict)
        groups.setdefault((name, "all"), []).append(verdict)
    titles = ("mpi", "class", "cases", *STATUSES, "median s", "worst s")
    order = sorted(groups, key=lambda key: (key[0], key[1] == "all", key[1]))
    return "\n".join(text_table(titles, [(*key, *_numbers(groups[key])) for key in order], left=(0, 1)))


def _numbers(verdicts: list[Verdict]) -> list[str]:
    """The columns of one row; the seconds are those of the jobs that ended."""
    counts = [sum(verdict.status == status for verdict in verdicts) for status in STATUSES]
    seconds = [verdict.seconds for verdict in verdicts if verdict.status != HUNG] or [0.0]
    return [str(len(verdicts)), *map(str, counts), f"{statistics.median(seconds):.1f}", f"{max(seconds):.1f}"]


def last_line(results: list[tuple[str, Verdict]], asked: int, start: float) -> str:
    """A line for programs: ok or failed, and the counts; failed also where fewer jobs ran than were asked for."""
    counts = {status: sum(verdict.status == status for _, verdict in results) for status in STATUSES}
    word = "ok" if results and counts[PASSED] == asked else "failed"
    numbers = " ".join(f"{status}={counts[status]}" for status in STATUSES)
    return f"mpipipe: faults {word} cases={len(results)} {numbers} seconds={time.monotonic() - start:.0f}"
