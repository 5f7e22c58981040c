"""Run one case and judge it: exit code, texts, number of reports, seconds, and processes that are left."""

import sys
import tempfile
import time
from pathlib import Path

from support.launch import Job, mpiexec

from faults.fault import ALONE, ANY, HEADING, NONZERO, PLAIN, RUN, Case
from mpipipe.job.settings import RANK_VARIABLES

PAUSE = 0.02  # seconds between two looks at a job
OUTLIVES = 3.0  # seconds after its launcher in which the processes of a job must be gone


def play(case: Case) -> list[str]:
    """Run a case; return what differs from the table, and last what the job printed. Empty where nothing does."""
    with tempfile.TemporaryDirectory(prefix="mpipipe-fault-") as folder:
        script = Path(folder, "job.py")
        script.write_text(case.fault.script)
        command = [mpiexec(), "-n", case.ranks] if case.ranks else []
        runner = ["-m", "mpipipe", "run"] if case.mode == RUN else []
        job = Job([*command, sys.executable, *runner, script], folder, case.fault.env)
        try:
            _watch(job, case)
            problems = ["still running"] if job.returncode is None else _judge(job, case)
        finally:
            job.end()
    if problems:
        problems.append(f"exit code {job.returncode}\n--- stdout\n{job.stdout}\n--- stderr\n{job.stderr}")
    return problems


def _watch(job: Job, case: Case) -> None:
    """Send the fault's signals until the job ends or the deadline passes."""
    deadline = time.monotonic() + case.fault.limit
    begin, due = None, list(case.fault.sends)
    while job.returncode is None and time.monotonic() < deadline:
        if begin is None and "working" in job.stdout:
            begin = time.monotonic()
        if due and begin is not None and time.monotonic() >= begin + due[0].after:
            _send(job, due.pop(0))
        time.sleep(PAUSE)


def _send(job, send):
    """Nothing where the job is over. A rank is the youngest process with its number: wrappers come before it."""
    to = send.to
    if not isinstance(to, str):
        environments = job.processes().items()
        to = max((pid for pid, env in environments if str(to) in map(env.get, RANK_VARIABLES)), default=None)
    if to is not None and job.returncode is None:
        job.send(send.number, to)


def _judge(job: Job, case: Case) -> list[str]:
    """What differs from the table."""
    fault, stdout, stderr = case.fault, job.stdout, job.stderr
    problems = []
    if not _matches(job.returncode, case.code):
        problems.append(f"exit code {job.returncode} instead of {case.code}")
    problems += [f"stderr lacks {text!r}" for text in case.says if text not in stderr]
    problems += [f"{text!r} must not be printed" for text in fault.never if text in stdout + stderr]
    counts = [(text, stdout.count(text), max(1, case.ranks)) for text in fault.by_all]
    problems += [f"{count} times {text!r} for {ranks} ranks" for text, count, ranks in counts if count != ranks]
    reports = stderr.count(HEADING) + stderr.count(ALONE)
    if case.mode != PLAIN and fault.reports not in (None, reports):
        problems.append(f"{reports} reports instead of {fault.reports}")
    if fault.quiet and stderr:
        problems.append(f"stderr is not empty: {stderr[:80]!r}")
    left = job.outlived_by(OUTLIVES)
    if left:
        problems.append(f"{len(left)} processes outlive the job")
    return problems


def _matches(code: int, wanted: int | str | tuple[int, ...]) -> bool:
    if wanted in (ANY, NONZERO):
        return wanted == ANY or code != 0
    return code in (wanted if isinstance(wanted, tuple) else (wanted,))
