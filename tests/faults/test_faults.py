"""Faults, a quick choice or all: each job ends within seconds, with the exit code and the one report of the table."""

import pytest
from mpi4py import MPI
from support.harness import AT_LENGTH

from faults.cases import FAULTS, all_cases, quick_cases
from faults.play import play

VENDOR = {"MPICH": "mpich", "Open MPI": "openmpi"}.get(MPI.get_vendor()[0], "another")


QUICK = (  # one of each kind that others do not show in less; the rest is long
    "exception: traceback of a backward",
    "never joins: rank last exits with 0",
    "exit: rank 2 exits with 3",
    "vanishes:",
    "signal:",
    "mismatch: micro-batches of rank 1",
    "settings: MPIPIPE_TIMEOUT=abc",
    "launcher: a lone process where PMI_SIZE",
    "thread:",
)


def _marks(case):
    return [] if str(case).startswith(QUICK) else [pytest.mark.long]


CHOICE = all_cases if AT_LENGTH else quick_cases
CASES = [pytest.param(case, id=str(case), marks=_marks(case)) for case in CHOICE(VENDOR)]


@pytest.mark.parametrize("case", CASES)
def test_fault(allow_seconds, case):
    allow_seconds(case.fault.limit + 60)
    problems = play(case)
    assert not problems, "\n".join(problems)


def test_the_table_has_unique_names_quick_choices_that_are_cases_and_scripts_that_compile():
    names = [fault.name for fault in FAULTS]
    assert len(set(names)) == len(names)
    chosen = [fault.name for fault in FAULTS if fault.quick is not None]
    assert [case.fault.name for case in quick_cases()] == chosen
    for fault in FAULTS:
        compile(fault.script, fault.name, "exec")
