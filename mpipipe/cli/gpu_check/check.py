"""One part of a GPU check: a command with a limit, its log, and what became of it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Literal

GRACE = 10.0  # seconds between the polite and the final signal
SHORTEST = 5.0  # seconds; with less time left a check is skipped
LONGEST_LINE = 200

Kind = Literal["information", "correctness", "measurement"]
Status = Literal["ok", "failed", "cut", "skipped"]


@dataclass(frozen=True)
class Outcome:
    """What became of one check.

    Attributes
    ----------
    kind : only a failed "correctness" check makes the whole check fail
    check : its name
    status : "cut" where a limit, its own or that of everything, ended it before a test had failed
    seconds : that it took
    why : the summary line of pytest, or the reason
    """

    kind: Kind
    check: str
    status: Status
    seconds: int
    why: str

    def __str__(self) -> str:
        return f"{self.check} {self.status}" + (f" ({self.why})" if self.why else "")


class Clock:
    """The time that all checks share.

    Parameters
    ----------
    seconds : in all, from now
    """

    def __init__(self, seconds: float) -> None:
        self._deadline = monotonic() + seconds

    def left(self) -> float:
        """Seconds that are left."""
        return self._deadline - monotonic()


def run_check(
    kind: Kind,
    name: str,
    limit: float,
    command: Sequence[str],
    *,
    clock: Clock,
    log: Path,
    variables: Mapping[str, str],
) -> Outcome:
    """Run a command for `limit` seconds at most, and no longer than `clock` allows.

    Its output goes to the file `log`; `variables` are set on top of the environment.
    """
    left = clock.left()
    whose = "its own limit" if limit <= left else "what was left for everything"
    limit = min(limit, left)
    if limit < SHORTEST:
        return Outcome(kind, name, "skipped", 0, "no time left")
    start = monotonic()
    code = _run_limited(command, limit, log, variables)
    seconds = round(monotonic() - start)
    printed = log.read_text(errors="replace").splitlines()
    tests = next((line for line in reversed(printed) if _counts_tests(line)), "").replace("=", "").strip()
    if code == 0:
        return Outcome(kind, name, "ok", seconds, tests)
    if code is None:
        found_failure = "failed" in tests or "error" in tests
        why = f"ended at {limit:.0f} s, {whose}; see {log}" + (f": {tests}" if tests else "")
        return Outcome(kind, name, "failed" if found_failure else "cut", seconds, why)
    why = tests or next((line for line in reversed(printed) if line.strip(" \t=_-")), "")[:LONGEST_LINE]
    return Outcome(kind, name, "failed", seconds, f"exit {code}; see {log}: {why}")


def _counts_tests(line: str) -> bool:
    return re.search(r"\d+ (passed|skipped|failed|error).* in [\d.]+s", line) is not None


def _run_limited(command: Sequence[str], limit: float, log: Path, variables: Mapping[str, str]) -> int | None:
    """Return the exit code of a command, or None if it was ended at its limit with all processes of its group."""
    with open(log, "wb") as output:
        try:
            job = subprocess.Popen(
                command,
                env={**os.environ, **variables},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            output.write(f"{command[0]}: {error.strerror}\n".encode())
            return 127
        try:
            return job.wait(limit)
        except subprocess.TimeoutExpired:
            _end(job, signal.SIGINT)  # pytest then tells what it has found so far
            return None
        except BaseException:
            _end(job, signal.SIGTERM)
            raise


def _end(job: subprocess.Popen[bytes], polite: signal.Signals) -> None:
    """Signal the process group of a job; kill what is left of it after GRACE seconds."""
    os.killpg(job.pid, polite)
    try:
        job.wait(GRACE)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()
