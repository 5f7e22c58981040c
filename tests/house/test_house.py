"""Rules that hold for the whole package, found by reading its source."""

from __future__ import annotations

import ast
from pathlib import Path

import mpipipe

PACKAGE = Path(mpipipe.__file__).parent
# what waits inside MPI until other ranks come, where no note of failure is heard
BLOCKING = set(
    """Allgather Allgatherv Allreduce Alltoall Alltoallv Alltoallw Barrier Bcast Create_group Create_cart Dup Exscan
    Gather Gatherv Intercomm_create Mprobe Probe Recv Reduce Reduce_scatter Scan Scatter Scatterv Send Sendrecv
    Sendrecv_replace Split Split_type Ssend Wait Waitall Waitany Waitsome
    allgather allreduce alltoall barrier bcast mprobe recv scatter sendrecv ssend waitall waitany""".split()
)
EXCEPTIONS = {
    "comm/communicators.py": {"Split", "Split_type"},  # behind an agreement, see there
    "comm/inprocess.py": {"Split", "allgather", "Barrier"},  # these are its own, between threads
    "cli/bench/pipeline.py": {"Recv", "Wait"},  # bare mpi4py, which the package is measured against
    "cli/bench/transport.py": {"Wait"},
}


def sources():
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path.relative_to(PACKAGE).as_posix(), ast.parse(path.read_text())


def blocking_calls(tree):
    """(line, name) of each use of a blocking call; also of one that is stored to be called later."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in BLOCKING:
            yield node.lineno, node.attr


def test_no_blocking_call_of_mpi_outside_the_one_module():
    found = {}
    for name, tree in sources():
        calls = [(line, call) for line, call in blocking_calls(tree) if call not in EXCEPTIONS.get(name, ())]
        if calls:
            found[name] = calls
    assert not found


def test_the_search_for_blocking_calls_finds_them():
    """The exceptions are used, so the search sees what it looks for."""
    trees = dict(sources())
    for name in ("comm/communicators.py", "cli/bench/pipeline.py"):
        assert {call for _, call in blocking_calls(trees[name])} == EXCEPTIONS[name]
    assert set(blocking_calls(ast.parse("comm.Isend; comm.bcast(x)\nrequest.Wait"))) == {(1, "bcast"), (2, "Wait")}


def test_mpi_is_imported_by_comm_alone():
    for name, tree in sources():
        modules = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        modules += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
        if any(module.split(".")[0] == "mpi4py" for module in modules):
            assert name.startswith("comm/"), name


def test_requests_of_mpi_have_an_owner():
    """Each non-blocking call stands inside own(...), or in the transports and notes, which own what they start."""
    starts = {"Isend", "Issend", "Irecv", "Iallgather", "Iallreduce", "Ibcast", "Ibarrier", "Idup"}
    for name, tree in sources():
        if name in ("comm/inprocess.py", "cli/bench/pipeline.py", "cli/bench/transport.py"):
            continue
        owned = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "own":
                owned |= {id(part) for part in ast.walk(node)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in starts and id(node) not in owned:
                assert (name, node.func.attr) == ("comm/communicators.py", "Idup"), f"{name}:{node.lineno}"
