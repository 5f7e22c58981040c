"""What a job script is asked to do, and what is refused before anything is printed."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import MISSING, dataclass
from typing import ClassVar

from mpipipe.errors import ArgumentError
from mpipipe.job import parse_duration
from mpipipe.options import document, option

SCHEDULERS = ("slurm", "pbs", "lsf", "flux")
ARRAYS = ("slurm", "pbs", "lsf")  # the schedulers that have job arrays
MPIS = ("mpich", "openmpi", "cray")
LAUNCHERS = ("mpiexec", "jsrun")  # of LSF
INDICES = re.compile(r"([0-9]+)-([0-9]+)")
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.+-]*")
WORD = re.compile(r"(?!-)[A-Za-z0-9_.,:/@%+=~^-]+")  # in a directive, which the scheduler reads and no shell
MODULE = re.compile(r"(?!-)[^\s'\"\\$`#]+")


@dataclass(frozen=True)
class Job:
    """What a job script asks its scheduler for, and what it trains or runs.

    Raises
    ------
    ArgumentError
        Where the scheduler cannot do what is asked for, or a value is no such value.

    Examples
    --------
    >>> from mpipipe.cli.jobscripts import Job
    >>> Job("pbs", nodes=2, ranks_per_node=4, time="2:00:00").seconds
    7200
    >>> Job("flux", nodes=1, ranks_per_node=4, array="0-3")
    Traceback (most recent call last):
    mpipipe.errors.ArgumentError: Flux has no job arrays
      found: array='0-3'
      remedy: submit a script without an array once for each seed: `flux batch FILE --seed 1`
    """

    heading: ClassVar[str] = "options"

    scheduler: str = option(MISSING, "one of SCHEDULERS")
    nodes: int = option(1, "nodes of the job")
    ranks_per_node: int = option(1, "ranks on each node")
    threads: int = option(1, "cores of each rank, and its threads")
    gpus: bool = option(False, "a GPU for each rank", key=False)
    time: str = option("00:30:00", "limit of the job: seconds, MM:SS, HH:MM:SS or D-HH:MM:SS")
    preemptable: bool = option(False, "save and leave before the end, and start again until it is done", key=False)
    notice: int = option(120, "seconds before the end at which a preemptable job is told")
    array: str | None = option(None, "numbers of a job array as in 0-3, each a seed")
    long_context: bool = option(False, "the ranks of a node share each sequence of 65 536", key=False)
    account: str | None = option(None, "account, project or bank")
    queue: str | None = option(None, "queue, which SLURM calls a partition")
    name: str | None = option(None, "name of the job")
    mpi: str = option("mpich", "one of MPIS, on which the words for the launcher depend")
    launcher: str = option("mpiexec", "under LSF: mpiexec | jsrun")
    python: str = option("python3", "the interpreter that has mpipipe")
    modules: tuple[str, ...] = option((), "environment modules to load")
    options: tuple[str, ...] = option((), "further options of `mpipipe train`")
    script: tuple[str, ...] = option((), "the words after `mpipipe run`: a script with its arguments")

    def __post_init__(self) -> None:
        _one_of("scheduler", self.scheduler, SCHEDULERS)
        _one_of("mpi", self.mpi, MPIS)
        _one_of("launcher", self.launcher, LAUNCHERS)
        for what in ("nodes", "ranks_per_node", "threads", "notice"):
            value = getattr(self, what)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ArgumentError(f"{what} is no count", found=f"{what}={value!r}", expected="1 or more")
        _fits("name", self.job_name, NAME, "a letter, then letters, digits and any of _.+-")
        for what, word in (("account", self.account), ("queue", self.queue)):
            if word is not None:
                _fits(what, word, WORD, "one word of letters, digits and any of _.,:/@%+=~^-")
        for module in self.modules:
            _fits("module", module, MODULE, "one word without quotes, backslashes, $ and #")
        if self.seconds < 60:
            raise ArgumentError(
                "the limit of time is too short", found=f"time={self.time!r}", expected="a minute or more"
            )
        if self.preemptable and self.notice >= self.seconds:
            raise ArgumentError(
                "the notice is longer than the job", found=f"notice={self.notice}", expected=f"below {self.seconds} s"
            )
        if self.array is not None:
            self._check_array(self.array)
        if self.launcher == "jsrun" and self.scheduler != "lsf":
            raise ArgumentError("jsrun is a launcher of LSF", found=f"scheduler={self.scheduler!r}", expected="lsf")
        for text in (self.python, *self.modules, *self.options, *self.script):  # no quotes would help
            if len(text.splitlines()) > 1 or any(unicodedata.category(each) in ("Cc", "Cs") for each in text):
                raise ArgumentError(
                    "a word for the script has more than one line, or a character that no text has",
                    found=ascii(text),
                    expected="one line of text in UTF-8",
                )
        if self.script and (self.options or self.long_context):
            raise ArgumentError(
                "a script of your own has no options of `mpipipe train`",
                found="long_context" if self.long_context else repr(self.options),
                expected="its own arguments alone",
            )

    @property
    def ranks(self) -> int:
        """How many ranks the job has."""
        return self.nodes * self.ranks_per_node

    @property
    def seconds(self) -> int:
        """Return the limit in whole seconds."""
        return int(parse_duration(self.time))

    @property
    def clock(self) -> str:
        """Return the limit as HH:MM:SS."""
        return f"{self.seconds // 3600:02}:{self.seconds // 60 % 60:02}:{self.seconds % 60:02}"

    @property
    def job_name(self) -> str:
        """Return the name that was given, or one that says what the job is."""
        kinds = {"gpu": self.gpus, "long-context": self.long_context, "preemptable": self.preemptable}
        words = [kind for kind, wanted in kinds.items() if wanted] + (["array"] if self.array else [])
        return self.name or "-".join(["mpipipe", *(words or ["run" if self.script else "train"])])

    def _check_array(self, array: str) -> None:
        if self.scheduler not in ARRAYS:
            raise ArgumentError(
                "Flux has no job arrays",
                found=f"array={array!r}",
                remedy="submit a script without an array once for each seed: `flux batch FILE --seed 1`",
            )
        indices = INDICES.fullmatch(array)
        if indices is None or int(indices[1]) > int(indices[2]):
            raise ArgumentError("no numbers of a job array", found=repr(array), expected="first-last, as in 0-3")
        if self.scheduler == "lsf" and int(indices[1]) == 0:
            raise ArgumentError("LSF counts the jobs of an array from 1", found=repr(array), expected="as in 1-4")


document(Job)


def _one_of(what: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ArgumentError(f"{what} is not known", found=repr(value), expected=", ".join(known))


def _fits(what: str, value: str, form: re.Pattern[str], expected: str) -> None:
    if form.fullmatch(value) is None:
        raise ArgumentError(f"{what} cannot stand in a directive", found=repr(value), expected=expected)
