"""The quick choice of faults: each job ends within seconds, with the exit code and the one report of the table."""

from __future__ import annotations

import pytest
from mpi4py import MPI

from faults.cases import FAULTS, all_cases, quick_cases
from faults.play import PASSED, play

VENDOR = {"MPICH": "mpich", "Open MPI": "openmpi"}.get(MPI.get_vendor()[0], "another")


LONG = (  # whose sentence a quicker test proves as well, of this table or of tests/job, tests/pipeline and tests/cli
    "good program: a training",
    "never joins: the last rank exits with 0",
    "exit: all ranks exit with 75",
    "mismatch: schedule of rank 3",
    "misuse: wrong dtype of the inputs",
    "misuse: a loss that is not a number",
    "hang:",
    "settings: MPIPIPE_TAG_UB=-1",
    "launcher: a lone process where OMPI",
    "launcher: a lone process where SLURM",
    "usage: an unknown flag [",
    "checkpoint: an exception in an optimizer",
    "checkpoint: a parameter of one replica",
)


def _marks(case):
    if str(case).startswith(LONG):
        return [pytest.mark.long]
    return [pytest.mark.slow] if str(case).startswith("loop:") else []  # the others must hear nothing for some seconds


CASES = [pytest.param(case, id=str(case), marks=_marks(case)) for case in quick_cases(VENDOR)]


@pytest.mark.parametrize("case", CASES)
def test_fault(allow_seconds, case):
    allow_seconds(case.fault.limit + 60)
    verdict = play(case)
    assert verdict.status == PASSED, f"{verdict}\n{verdict.output}"


def test_names_of_faults_are_unique():
    names = [fault.name for fault in FAULTS]
    assert len(set(names)) == len(names)


def test_every_quick_choice_is_a_case():
    chosen = [fault.name for fault in FAULTS if fault.quick is not None]
    assert [case.fault.name for case in quick_cases()] == chosen


def test_scripts_compile():
    for case in all_cases():
        if case.fault.script is not None:
            compile(case.fault.script, case.fault.name, "exec")
