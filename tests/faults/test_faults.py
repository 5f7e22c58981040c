"""The quick choice of faults: each job ends within seconds, with the exit code and the one report of the table."""

from __future__ import annotations

import pytest
from mpi4py import MPI

from faults.cases import FAULTS, all_cases, quick_cases
from faults.play import PASSED, play

VENDOR = {"MPICH": "mpich", "Open MPI": "openmpi"}.get(MPI.get_vendor()[0], "another")


CASES = [  # of an endless loop the others must hear nothing for some seconds
    pytest.param(case, id=str(case), marks=[pytest.mark.slow] if str(case).startswith("loop:") else [])
    for case in quick_cases(VENDOR)
]


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
