"""Rules that hold for the whole package, found by reading its source."""

import ast
import re

import pytest
from support.launch import ROOT
from support.source import nodes, sources

pytestmark = pytest.mark.together  # all of them walk through one set of syntax trees

# what waits inside MPI until other ranks come, where no note of failure is heard
BLOCKING = set(
    """Allgather Allgatherv Allreduce Alltoall Alltoallv Alltoallw Barrier Bcast Create_group Create_cart Dup Exscan
    Gather Gatherv Intercomm_create Mprobe Probe Recv Reduce Reduce_scatter Scan Scatter Scatterv Send Sendrecv
    Sendrecv_replace Split Split_type Ssend Wait Waitall Waitany Waitsome
    allgather allreduce alltoall barrier bcast mprobe recv scatter sendrecv ssend waitall waitany""".split()
)
EXCEPTIONS = {
    "job/communicators.py": {"Split", "Split_type"},  # behind an agreement, see there
    "job/threads.py": {"allgather", "Barrier"},  # these are its own, between threads
    "bench/pipeline.py": {"Recv", "Wait"},  # bare mpi4py, which the package is measured against
}


def blocking_calls(tree):
    """(line, name) of each use of a blocking call; also of one that is stored to be called later."""
    for node in nodes(tree):
        if isinstance(node, ast.Attribute) and node.attr in BLOCKING:
            yield node.lineno, node.attr


def test_no_blocking_call_of_mpi_outside_the_one_module():
    found, excepted = {}, {}
    for name, tree in sources():
        for line, call in blocking_calls(tree):
            if call in EXCEPTIONS.get(name, ()):
                excepted.setdefault(name, set()).add(call)
            else:
                found.setdefault(name, []).append((line, call))
    assert (found, excepted) == ({}, EXCEPTIONS)  # which are used, so the search sees what it looks for


def test_requests_of_mpi_have_an_owner():
    """Each non-blocking call stands inside own(...), or in the transports and notes, which own what they start."""
    starts = {"Isend", "Issend", "Irecv", "Iallgather", "Iallgatherv", "Iallreduce", "Ibcast", "Ibarrier", "Idup"}
    for name, tree in sources():
        if name in ("job/threads.py", "bench/pipeline.py"):
            continue
        owned = set()
        for node in nodes(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "own":
                owned |= {id(part) for part in ast.walk(node)}
        for node in nodes(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in starts and id(node) not in owned:
                assert (name, node.func.attr) == ("job/communicators.py", "Idup"), f"{name}:{node.lineno}"


def test_the_hooks_run_the_commands_of_the_gate():
    commands = re.findall(r"^check (.+)$", (ROOT / "jobs" / "check.sh").read_text(), re.MULTILINE)
    assert commands == re.findall(r"entry: ([^,]+)", (ROOT / ".pre-commit-config.yaml").read_text())
    assert len(commands) == 4
