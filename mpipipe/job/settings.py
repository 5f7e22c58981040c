"""The environment variables of this package in one table, and functions that read some of them.

An empty variable counts as not set. `check_settings` refuses values without a meaning, where all
ranks learn of it. So a function that reads a variable in the middle of a wait need not check it
again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from mpipipe.errors import ArgumentError, LaunchError


@dataclass(frozen=True)
class Variable:
    """One environment variable, with its values in words, as in docs/environment.md."""

    name: str
    values: str
    # Whether a text is one of `values`; None: checked where it is read.
    accepts: Callable[[str], bool] | None = None
    default: str = ""  # the value of a switch or a limit that is not set

    def check(self, text: str | None) -> None:
        """Raise ArgumentError for a text without a meaning; an empty one means: not set."""
        if text and self.accepts is not None and not self.accepts(text):
            raise ArgumentError(
                f"environment variable {self.name}", found=repr(text), expected=self.values
            )

    @property
    def text(self) -> str:
        """Its value, "" where it is not set; raises ArgumentError for one without a meaning."""
        text = os.environ.get(self.name, "")
        self.check(text)
        return text

    @property
    def is_on(self) -> bool:
        """True for 1 and on; `check_settings` refuses values without a meaning."""
        return (os.environ.get(self.name) or self.default) in ("1", "on")

    @property
    def limit(self) -> float:
        """Its seconds; inf for none, and for what `check_settings` refuses."""
        return _seconds(os.environ.get(self.name) or self.default) or inf


def _seconds(text: str) -> float | None:
    """A finite number of seconds above 0, else None."""
    try:
        seconds = float(text)
    except ValueError:
        return None
    if 0 < seconds < inf:
        return seconds
    return None


_is_switch = ("0", "1").__contains__

TIMEOUT = Variable(
    "MPIPIPE_TIMEOUT",
    "a number of seconds; 0 for no limit",
    lambda text: text.strip("0.") == "" or bool(_seconds(text)),
)
WATCHDOG = Variable(
    "MPIPIPE_WATCHDOG",
    "a number of seconds, 1 or more; 0 for no watchdog",
    lambda text: text.strip("0.") == "" or (_seconds(text) or 0) >= 1,
    "600",
)
SYNC_SENDS = Variable("MPIPIPE_SYNC_SENDS", "0 or 1", _is_switch)
GPU_DIRECT = Variable("MPIPIPE_GPU_DIRECT", "0 or 1", _is_switch)
NCCL = Variable("MPIPIPE_NCCL", "auto, on or off", ("auto", "on", "off").__contains__)
ATTENTION = Variable("MPIPIPE_ATTENTION", "cudnn or cupy")
HALVES = Variable("MPIPIPE_HALVES", "numpy or torch", ("numpy", "torch").__contains__)
THREADS = Variable("MPIPIPE_THREADS", "a positive integer")
GRAPHS = Variable("MPIPIPE_GRAPHS", "0 or 1", _is_switch, "1")
CHECK = Variable("MPIPIPE_CHECK", "0 or 1", _is_switch)
VARIABLES = tuple(value for value in tuple(globals().values()) if isinstance(value, Variable))


def check_settings() -> None:
    """Raise ArgumentError for a variable of this package whose value has no meaning."""
    for variable in VARIABLES:
        variable.check(os.environ.get(variable.name))


# -- What the launcher of a job tells each of its processes, in environment variables --------------


# how many ranks the job has, which of them a process is, and how many are on its host
SIZE_VARIABLES = (
    "OMPI_COMM_WORLD_SIZE",
    "PMI_SIZE",
    "MV2_COMM_WORLD_SIZE",
    "FLUX_JOB_SIZE",
    "SLURM_STEP_NUM_TASKS",
)
RANK_VARIABLES = (
    "OMPI_COMM_WORLD_RANK",
    "PMI_RANK",
    "MV2_COMM_WORLD_RANK",
    "FLUX_TASK_RANK",
    "SLURM_PROCID",
)
LOCAL_SIZE_VARIABLES = (
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "MV2_COMM_WORLD_LOCAL_SIZE",
)


def _numbers(environment: Mapping[str, str], names: Sequence[str]) -> dict[str, int]:
    """Return the numbers of those variables, in their order, that hold one."""
    numbers = {}
    for name in names:
        value = environment.get(name, "")
        if value.isdigit():
            numbers[name] = int(value)
    return numbers


def launcher_size(environment: Mapping[str, str]) -> tuple[str, int] | None:
    """Return (variable, ranks) where a launcher promises several ranks, else None."""
    for name, ranks in _numbers(environment, SIZE_VARIABLES).items():
        if ranks > 1:
            return name, ranks
    return None


def launcher_rank(environment: Mapping[str, str]) -> int:
    """Return the rank that a launcher promises this process; 0 without a launcher."""
    return next(iter(_numbers(environment, RANK_VARIABLES).values()), 0)


def oversubscribed() -> bool:
    """Whether the launcher put more ranks on this host than it has cores."""
    sizes = _numbers(os.environ, LOCAL_SIZE_VARIABLES)
    return max(sizes.values(), default=1) > (os.cpu_count() or 1)


def refuse_singleton(environment: Mapping[str, str]) -> None:
    """Raise LaunchError if a launcher promised a process several ranks, and it is alone."""
    promise = launcher_size(environment)
    if promise is None:
        return
    name, ranks = promise
    raise LaunchError(
        "this process is alone in COMM_WORLD, so every process of the job would do the whole work "
        "by itself",
        found="1 rank",
        expected=f"{ranks} ranks ({name}={ranks})",
        remedy="start it with the mpiexec of the MPI library that mpi4py uses (`python -m mpipipe "
        "info` names it); under SLURM choose the matching plugin: `srun --mpi=pmi2` for MPICH, "
        "`srun --mpi=pmix` for Open MPI",
    )
