"""python -m faults.soak: a job that works for minutes while its ranks are stopped at random, and what it leaks.

python -m faults.soak --seconds 1200 --ranks 2
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from support.launch import Job, mpiexec

from mpipipe.job.settings import RANK_VARIABLES

SCRIPT = Path(__file__).with_name("soak_job.py")
WARM = 0.2  # of the samples, in which caches fill
PAUSES = (0.3, 3.0)  # seconds between two stops
STOPS = (0.02, 1.5)  # seconds of a stop
WATCHDOG = 10  # seconds: none of this may count as a hang
EXACT = ("descriptors", "threads", "python threads", "communicators", "requests")
MAY_GROW = {"memory": 8 << 20, "objects": 1000}  # from the first to the last third: far less than a leak in each round
Samples = Sequence[Mapping[str, float]]


def soak(
    seconds: float, ranks: int, folder: Path, python: str = sys.executable
) -> tuple[list[str], dict[int, Samples]]:
    """Run the job; return what went wrong, and the samples of each rank."""
    command = [mpiexec(python), "-n", ranks, python, "-m", "mpipipe", "run", SCRIPT, seconds, folder]
    job = Job(command, folder, {"MPIPIPE_WATCHDOG": str(WATCHDOG)})
    stops = 0
    try:
        stops = _stop_at_random(job, ranks, time.monotonic() + 3 * seconds + 120)
    finally:
        if job.returncode is None:
            job.end()
    problems = [] if job.returncode == 0 else [f"exit code {job.returncode}"]
    if job.stdout.count("finished") != ranks or job.stderr:
        problems.append(f"stdout {job.stdout[-500:]!r}, stderr {job.stderr[-2000:]!r}")
    if left := job.outlived_by(5):
        problems.append(f"{len(left)} processes outlive the job")
        job.kill_processes()
    samples = {rank: _read(folder / f"rank-{rank}.jsonl") for rank in range(ranks)}
    for rank, found in samples.items():
        problems += [f"rank {rank}: {text}" for text in leaks(found)]
    if not stops:
        problems.append("no rank was stopped")
    return problems, samples


def _stop_at_random(job: Job, ranks: int, deadline: float) -> int:
    """Stop random ranks for a while, again and again, until the job ends; returns how often."""
    count = 0
    while job.returncode is None and time.monotonic() < deadline:
        time.sleep(random.uniform(*PAUSES))
        if "working" not in job.stdout:
            continue
        rank = str(random.randrange(ranks))
        found = [pid for pid, env in job.processes().items() if rank in map(env.get, RANK_VARIABLES)]
        for pid in found:
            job.send(signal.SIGSTOP, pid)
        time.sleep(random.uniform(*STOPS))
        for pid in found:
            job.send(signal.SIGCONT, pid)
        count += bool(found)
    return count


def _read(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def leaks(samples: Samples) -> Iterator[str]:
    """What grows from the first to the last third of the samples, the warm ones alone."""
    warm = samples[int(WARM * len(samples)) :]
    third = len(warm) // 3
    if third < 2:
        yield f"only {len(samples)} samples"
        return
    for name in (*EXACT, *MAY_GROW):
        first, last = ([each[name] for each in part] for part in (warm[:third], warm[-third:]))
        if name in EXACT and max(last) > max(first):
            yield f"{name} grew from {max(first)} to {max(last)}"
        if name in MAY_GROW and statistics.median(last) - statistics.median(first) > MAY_GROW[name]:
            yield f"{name} grew from {statistics.median(first):.0f} to {statistics.median(last):.0f}"


def shown(samples: Mapping[int, Samples]) -> str:
    """The first warm and the last sample of each rank."""
    lines = []
    for rank, found in samples.items():
        if found:
            for title, each in (("warm", found[int(WARM * len(found))]), ("end", found[-1])):
                facts = ", ".join(f"{name} {value}" for name, value in each.items())
                lines.append(f"rank {rank}, {title}: {facts}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m faults.soak", description=str(__doc__).splitlines()[0])
    parser.add_argument("--seconds", type=float, default=1200)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--python", default=sys.executable, help="interpreter of the environment of another MPI")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mpipipe-soak-") as folder:
        problems, samples = soak(options.seconds, options.ranks, Path(folder), options.python)
    print("\n".join([shown(samples), *problems, f"mpipipe: soak {'failed' if problems else 'ok'}"]))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
