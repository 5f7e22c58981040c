"""Run one case and judge it: exit code, texts, number of reports, seconds, orphans, and what is left in /dev/shm."""

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from support.launch import Job, job_environment, mpiexec

from faults.fault import ALONE, ANY, COMMAND, HEADING, NONZERO, RUN, Case
from mpipipe.job.settings import RANK_VARIABLES

PASSED, HUNG, SILENT, WRONG = "passed", "hung", "silent", "wrong"
PAUSE = 0.02  # seconds between two looks at a job
LOOK_FOR_MEMORY = 0.2  # seconds between two looks at the shared memory of its processes
OUTLIVES = 3.0  # seconds after its launcher in which the processes of a job must be gone
SHARED_MEMORY = "/dev/shm/"


@dataclass(frozen=True)
class Verdict:
    """What came of one case."""

    case: Case
    status: str
    problems: tuple[str, ...]
    seconds: float
    output: str

    def __str__(self) -> str:
        return f"{self.case} {self.status} after {self.seconds:.1f} s: {'; '.join(self.problems)}"


def command_line(case: Case, folder: str) -> list[str]:
    """The command that starts the job: one part for all ranks, or one for each where the ranks differ."""
    fault = case.fault
    common = {RUN: ("-m", "mpipipe", "run", f"{folder}/job.py"), COMMAND: fault.arguments}.get(
        case.mode, (f"{folder}/job.py",)
    )

    def program(rank: int) -> list[str]:
        pairs = [f"{name}={value}" for name, value in fault.env_of.get(rank, {}).items()]
        return [*(["env", *pairs] if pairs else []), sys.executable, *fault.arguments_of.get(rank, common)]

    if case.ranks == 0:
        return program(0)
    if not (fault.arguments_of or fault.env_of or fault.folders):
        return [mpiexec(), "-n", str(case.ranks), *program(0)]
    parts = [mpiexec()]
    for rank in range(case.ranks):
        place = ["-wdir", f"{folder}/{fault.folders[rank % len(fault.folders)]}"] if fault.folders else []
        parts += [*([":"] if rank else []), *place, "-n", "1", *program(rank)]
    return parts


def play(case: Case) -> Verdict:
    """Run a case and judge it."""
    fault = case.fault
    with tempfile.TemporaryDirectory(prefix="mpipipe-fault-") as folder:
        if fault.script is not None:
            Path(folder, "job.py").write_text(fault.script)
        for name in fault.folders:
            Path(folder, name).mkdir()
        problems = _helpers(fault.before, folder)
        if problems:
            return Verdict(case, WRONG, tuple(problems), 0.0, "")
        job = Job(command_line(case, folder), folder, fault.env)
        start = time.monotonic()
        memory = _watch(job, case, start + fault.limit)
        seconds = time.monotonic() - start
        hung = job.returncode is None
        if hung:
            job.end()
        else:
            problems = [*_judge(job, case, memory), *_helpers(fault.after, folder)]
    output = f"{' '.join(job.command)}\nexit code {job.returncode}\n--- stdout\n{job.stdout}\n--- stderr\n{job.stderr}"
    if hung:
        return Verdict(case, HUNG, (f"still running, {_said(job)}",), seconds, output)
    return Verdict(case, _status(problems, job, case), tuple(problems), seconds, output)


def _watch(job: Job, case: Case, deadline: float) -> set[Path]:
    """Send the fault's signals until the job ends or the deadline passes; returns the job's shared memory."""
    memory, due = set(), list(case.fault.sends)
    appeared, look = None, 0.0
    while job.returncode is None and time.monotonic() < deadline:
        said = job.stdout
        if due:
            if appeared is None and due[0].at in said:
                appeared = time.monotonic()
            if appeared is not None and time.monotonic() >= appeared + due[0].after:
                send, appeared = due.pop(0), None
                _send(job, send)
        if time.monotonic() >= look and case.clean:
            memory |= _shared_memory(job)
            look = time.monotonic() + LOOK_FOR_MEMORY
        time.sleep(PAUSE)
    return memory


def _send(job, send):
    """Nothing where the job is over. A rank is the youngest process with its number: wrappers come before it."""
    to = send.to
    if not isinstance(to, str):
        environments = job.processes().items()
        to = max((pid for pid, env in environments if str(to) in map(env.get, RANK_VARIABLES)), default=None)
    if to is not None and job.returncode is None:
        job.send(send.number, to)


def _shared_memory(job: Job) -> set[Path]:
    """Files in /dev/shm that processes of the job have mapped."""
    found = set()
    for pid in job.processes():
        try:
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        except OSError:
            continue
        found |= {Path(line[line.index(SHARED_MEMORY) :]) for line in lines if SHARED_MEMORY in line}
    return found


def _judge(job: Job, case: Case, memory: set[Path]) -> list[str]:
    """What differs from the table."""
    fault, stdout, stderr = case.fault, job.stdout, job.stderr
    problems = []
    if not _matches(job.returncode, case.code):
        problems.append(f"exit code {job.returncode} instead of {case.code}")
    problems += [f"stderr lacks {text!r}" for text in case.says if text not in stderr]
    problems += [f"stdout lacks {text!r}" for text in fault.prints if text not in stdout]
    problems += [f"{text!r} must not be printed" for text in fault.never if text in stdout + stderr]
    counts = [(text, stdout.count(text), max(1, case.ranks)) for text in fault.by_all]
    problems += [f"{count} times {text!r} for {ranks} ranks" for text, count, ranks in counts if count != ranks]
    if case.mode in (RUN, COMMAND):
        reports = stderr.count(HEADING) + stderr.count(ALONE)
        if fault.reports is not None and reports != fault.reports:
            problems.append(f"{reports} reports instead of {fault.reports}")
        problems += [f"{stderr.count(text)} times {text!r}" for text in fault.once if stderr.count(text) != 1]
    if fault.quiet and stderr:
        problems.append(f"stderr is not empty: {stderr[:80]!r}")
    left = job.outlived_by(OUTLIVES)
    if left:
        problems.append(f"{len(left)} processes outlive the job")
        job.kill_processes()
    kept = [path.name for path in memory if path.exists()]
    if kept:
        problems.append(f"left in /dev/shm: {', '.join(kept)}")
        for path in memory:
            path.unlink(missing_ok=True)
    return problems


def _matches(code: int, wanted: int | str | tuple[int, ...]) -> bool:
    if wanted in (ANY, NONZERO):
        return wanted == ANY or code != 0
    return code in (wanted if isinstance(wanted, tuple) else (wanted,))


def _status(problems: list[str], job: Job, case: Case) -> str:
    if not problems:
        return PASSED
    wanted = [*case.says, *(case.fault.once if case.mode != "plain" else ())]
    told = HEADING in job.stderr or ALONE in job.stderr or any(text in job.stderr for text in wanted)
    return WRONG if told or not wanted else SILENT


def _said(job: Job) -> str:
    lines = [line.strip() for line in job.stderr.splitlines() if line.strip()]
    return f"last line of stderr: {lines[-1][:100]!r}" if lines else "nothing on stderr"


def _helpers(lists: Iterable[tuple[str, ...]], folder: str) -> list[str]:
    """Run what a case needs before or after its job; returns what went wrong."""
    problems = []
    for arguments in lists:
        done = subprocess.run(
            [sys.executable, *arguments], cwd=folder, env=job_environment(), capture_output=True, text=True, timeout=60
        )
        if done.returncode:
            problems.append(f"python {' '.join(arguments)[:60]}: {done.stderr.strip().splitlines()[-1:]}")
    return problems
