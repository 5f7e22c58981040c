"""python -m faults: the whole table of faults, or what patterns choose from it, under one MPI or several."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from faults.cases import all_cases, quick_cases
from faults.fault import Case
from faults.play import PASSED
from faults.summary import last_line, play_all, table


def main() -> int:
    options = _options()
    jobs = [(name, python, case) for name, python in options.python for case in _chosen(options, name)]
    if options.list:
        print("\n".join(f"{name} {case}" for name, _, case in jobs))
        return 0
    start = time.monotonic()
    results = play_all(jobs, options.limit, options.at_once, partial(print, flush=True))
    if options.verbose:
        for name, verdict in results:
            if verdict.status != PASSED:
                print(f"\n=== {name} {verdict}\n{verdict.output}")
    print(f"\n{table(results)}\n{last_line(results, len(jobs), start)}")
    return 0 if jobs and len(results) == len(jobs) and all(verdict.status == PASSED for _, verdict in results) else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m faults", description=__doc__)
    parser.add_argument("pattern", nargs="*", help="cases that hold one of these texts; default: all")
    parser.add_argument("--python", action="append", type=_environment, help="NAME=PATH of an MPI's interpreter")
    parser.add_argument("--quick", action="store_true", help="only the quick choice")
    parser.add_argument("--at-once", type=int, default=1, metavar="N", help="jobs at the same time")
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="a job that takes longer counts as hung")
    parser.add_argument("--list", action="store_true", help="print the cases and run none")
    parser.add_argument("--verbose", action="store_true", help="print what failed jobs have printed")
    options = parser.parse_args()
    options.python = options.python or [("mpi", sys.executable)]
    return options


def _environment(text: str) -> tuple[str, str]:
    name, _, path = text.partition("=")
    return name, str(Path(path).absolute())


def _chosen(options: argparse.Namespace, name: str) -> Iterator[Case]:
    for case in quick_cases(name) if options.quick else all_cases(name):
        if options.pattern and not any(pattern in str(case) for pattern in options.pattern):
            continue
        yield case


sys.exit(main())
