"""Rules that hold for the whole package, found by reading its source."""

import ast
import re

import pytest
from support.launch import ROOT
from support.source import findings, nodes, refuse, sources

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
    "job/threads.py": {"Split", "allgather", "Barrier"},  # these are its own, between threads
    "bench/pipeline.py": {"Recv", "Wait"},  # bare mpi4py, which the package is measured against
}


def blocking_calls(tree):
    """(line, name) of each use of a blocking call; also of one that is stored to be called later."""
    for node in nodes(tree):
        if isinstance(node, ast.Attribute) and node.attr in BLOCKING:
            yield node.lineno, node.attr


def test_no_blocking_call_of_mpi_outside_the_one_module():
    found = {}
    for name, tree in sources():
        calls = [(line, call) for line, call in blocking_calls(tree) if call not in EXCEPTIONS.get(name, ())]
        if calls:
            found[name] = calls
    assert not found


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


def asks(tree, function, word):
    """Lines of calls like function(x, ...) where the name or attribute x is `word` or ends in _`word`."""
    for node in nodes(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == function and node.args:
            name = getattr(node.args[0], "id", getattr(node.args[0], "attr", ""))
            if name == word or name.endswith("_" + word):
                yield node.lineno


def class_checks(tree, name):
    """Lines of isinstance(x, ...) with a class of this name."""
    for node in nodes(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance" and len(node.args) == 2:
            if any(name in (getattr(part, "id", ""), getattr(part, "attr", "")) for part in ast.walk(node.args[1])):
                yield node.lineno


def assignments(tree, attribute):
    """Lines where an attribute of this name is set, but for the `self.attribute` that a constructor declares."""
    declared = {
        id(node)
        for function in nodes(tree)
        if isinstance(function, ast.FunctionDef) and function.name == "__init__"
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "self"
    }
    for node in nodes(tree):
        stored = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and id(node) not in declared
        if stored and node.attr == attribute:
            yield node.lineno
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "setattr":
            if attribute in [getattr(part, "value", None) for part in node.args]:
                yield node.lineno


@pytest.mark.parametrize("word", ["comm", "kernel"])
def test_interfaces_are_not_sniffed(word):
    """What a communicator or a kernel can do, its interface says."""
    refuse(findings(lambda tree: asks(tree, "hasattr", word)))


def test_the_one_adapter_asks_what_a_stage_is():
    refuse(
        [place for place in findings(lambda tree: class_checks(tree, "Stage")) if not place.startswith("stages.py:")]
    )


def test_only_agreements_and_known_failures_say_that_an_error_is_reported_elsewhere():
    found = findings(lambda tree: assignments(tree, "reported_elsewhere"))
    refuse([place for place in found if not place.startswith(("job/consensus.py:", "job/context.py:"))])


def test_the_hooks_run_the_commands_of_the_gate():
    commands = re.findall(r"^check (.+)$", (ROOT / "jobs" / "check.sh").read_text(), re.MULTILINE)
    assert commands == re.findall(r"entry: ([^,]+)", (ROOT / ".pre-commit-config.yaml").read_text())
    assert len(commands) == 4
