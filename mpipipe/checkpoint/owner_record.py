"""What a job says of itself in the file by which it owns a folder, and whether its processes live; see owner.py."""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path

# the id of a job, and the variable that counts its starts where there is one
JOBS = {"SLURM_JOB_ID": "SLURM_RESTART_COUNT", "PBS_JOBID": "", "LSB_JOBID": "", "FLUX_JOB_ID": ""}
TOKEN = re.compile(r"[0-9a-f]{16}")
HIDDEN = "hidden"  # in place of the start time of a process that another user has, where the system hides it


@dataclass(frozen=True)
class Record:
    """The content of owner.json.

    Attributes
    ----------
    token : names the owner
    host : its name, for people
    machine : names the boot of the host and the space of process ids, in which `processes` are
    processes : (id, start time) of the owner's processes on that machine
    job : number of the scheduler's job with the variable that has it, "" without one
    starts : how often the scheduler has started the job again
    since, renewed : times, for people
    renewals : number that grows while the owner lives, in digits of one length
    """

    token: str
    host: str
    machine: str
    processes: tuple[tuple[int, str], ...]
    job: str
    starts: str
    since: str
    renewed: str
    renewals: str = "0" * 12

    @classmethod
    def of_this_job(cls, token: str, processes: Iterable[tuple[str, int, str]]) -> Record:
        """Describe this job, of whose (machine, id, start time) those on this machine count."""
        machine, now, (job, starts) = this_machine(), _now(), _job(os.environ)
        own = tuple(dict.fromkeys((number, start) for where, number, start in processes if where == machine))
        host = socket.gethostname()
        return cls(token, host, machine, own, job=job, starts=starts, since=now, renewed=now)

    @classmethod
    def parse(cls, content: bytes) -> Record | None:
        """Return what a file says; None for one that is none, such as one that is being written."""
        try:
            facts = json.loads(content)
            pairs = tuple((int(number), str(start)) for number, start in facts.pop("processes"))
            texts = {name: str(value) for name, value in facts.items()}
            return cls(**texts, processes=pairs) if TOKEN.fullmatch(texts["token"]) else None
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None

    def content(self) -> bytes:
        """Return the bytes of the file, as many after each renewal."""
        return (json.dumps(asdict(self)) + "\n").encode()

    def renewed_now(self) -> Record:
        """Return the record after one more renewal."""
        return replace(self, renewals=f"{int(self.renewals) + 1:012d}", renewed=_now())

    def living(self) -> list[int] | None:
        """Return which of its processes live, if they are of this machine; None where the system hides one of them."""
        starts = [_start_of(number) for number, _ in self.processes]
        if HIDDEN in starts:
            return None
        return [number for (number, start), now in zip(self.processes, starts) if now == start]

    def precedes(self, other: Record) -> bool:
        """Whether this is an earlier start of the same job."""
        earlier = not other.starts or (self.starts.isdigit() and int(self.starts) < int(other.starts))
        return bool(other.job) and self.job == other.job and earlier

    def __str__(self) -> str:
        numbers = ", ".join(str(number) for number, _ in self.processes[:3])
        job = f"{self.job}, " if self.job else ""
        several = "es" if len(self.processes) > 1 else ""
        return f"{job}process{several} {numbers} on {self.host}, since {self.since}, last seen alive {self.renewed}"


def this_process() -> tuple[str, int, str]:
    """Return machine, id and start time of this process."""
    return this_machine(), os.getpid(), _start_of(os.getpid()) or ""


def _start_of(number: int) -> str | None:
    """Return when a process of this machine began, in ticks since the boot; None if it has ended."""
    try:
        fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return HIDDEN if _exists(number) else None
    return None if fields[0] in "ZX" else fields[19]


def _exists(number: int) -> bool:
    """Whether there is such a process, also one of another user in a /proc that is mounted with hidepid."""
    try:
        os.kill(number, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        pass
    return True


def this_machine() -> str:
    """Name this boot of this host, and the space of process ids; "" unless all of that is known."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"unknown {secrets.token_hex(8)}"  # like no other: nothing is known of its processes


def _job(environment: Mapping[str, str]) -> tuple[str, str]:
    for name, count in JOBS.items():
        if environment.get(name):
            index = environment.get("LSB_JOBINDEX", "0") if name == "LSB_JOBID" else "0"
            tail = "" if index == "0" else f"[{index}]"
            return f"{name} {environment[name]}{tail}", environment.get(count, "0" if count else "")
    return "", ""


def _now() -> str:
    return f"{datetime.now():%Y-%m-%d %H:%M:%S}"
