"""Rules that hold for the whole package, found by reading its source."""

from __future__ import annotations

import ast
import re
from itertools import pairwise
from pathlib import Path

import pytest
from support.launch import ROOT

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
    "job/communicators.py": {"Split", "Split_type"},  # behind an agreement, see there
    "comm/transport/nccl.py": {"recv"},  # NCCL's: it puts a kernel on a stream
    "job/inprocess.py": {"Split", "allgather", "Barrier"},  # these are its own, between threads
    "bench/pipeline.py": {"Recv", "Wait"},  # bare mpi4py, which the package is measured against
}
# functions of cuBLAS and cublasLt, whose many arguments stand in the order of the C libraries
BY_POSITION = {"gemmEx", "gemmStridedBatchedEx", "matmul", "matmul_algo_get_heuristic"}


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
    for name in ("job/communicators.py", "bench/pipeline.py"):
        assert {call for _, call in blocking_calls(trees[name])} == EXCEPTIONS[name]
    assert set(blocking_calls(ast.parse("comm.Isend; comm.bcast(x)\nrequest.Wait"))) == {(1, "bcast"), (2, "Wait")}


def test_mpi_is_imported_by_job_and_comm_alone():
    for name, tree in sources():
        modules = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        modules += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
        if any(module.split(".")[0] == "mpi4py" for module in modules):
            assert name.startswith(("comm/", "job/")), name


def test_requests_of_mpi_have_an_owner():
    """Each non-blocking call stands inside own(...), or in the transports and notes, which own what they start."""
    starts = {"Isend", "Issend", "Irecv", "Iallgather", "Iallreduce", "Ibcast", "Ibarrier", "Idup"}
    for name, tree in sources():
        if name in ("job/inprocess.py", "bench/pipeline.py"):
            continue
        owned = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "own":
                owned |= {id(part) for part in ast.walk(node)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in starts and id(node) not in owned:
                assert (name, node.func.attr) == ("job/communicators.py", "Idup"), f"{name}:{node.lineno}"


def positional_calls(tree, most=7):
    """(line, count) of each call with more than so many positional arguments; a starred one counts once."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and len(node.args) > most and getattr(node.func, "attr", "") not in BY_POSITION:
            yield node.lineno, len(node.args)


def asks(tree, function, word):
    """Lines of calls like function(x, ...) where the name or attribute x is `word` or ends in _`word`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == function and node.args:
            name = getattr(node.args[0], "id", getattr(node.args[0], "attr", ""))
            if name == word or name.endswith("_" + word):
                yield node.lineno


def assignments(tree, attribute):
    """Lines where an attribute of this name is set, but for the `self.attribute` that a constructor declares."""
    declared = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef) and function.name == "__init__"
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "self"
    }
    for node in ast.walk(tree):
        stored = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and id(node) not in declared
        if stored and node.attr == attribute:
            yield node.lineno
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "setattr":
            if attribute in [getattr(part, "value", None) for part in node.args]:
                yield node.lineno


def undocumented(tree):
    """The module, and functions and classes of a module, that are public and have no docstring."""
    if ast.get_docstring(tree) is None:
        yield "the module"
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            if ast.get_docstring(node) is None:
                yield node.name


def is_type_checking(node):
    return isinstance(node, ast.If) and "TYPE_CHECKING" in {
        getattr(node.test, "id", ""),
        getattr(node.test, "attr", ""),
    }


def imported(tree, module, is_package, modules):
    """(line, module) of each import of one of the modules, in functions too, but not below `if TYPE_CHECKING`."""
    package = module.split(".") if is_package else module.split(".")[:-1]
    left = [tree]
    while left:
        node = left.pop()
        left += node.orelse if is_type_checking(node) else ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join([*package[: len(package) + 1 - node.level], *filter(None, [node.module])])
            base = base if node.level else node.module
            for alias in node.names:
                found = f"{base}.{alias.name}" if f"{base}.{alias.name}" in modules else base
                if found in modules:
                    yield node.lineno, found


def import_graph(trees):
    """{module: {imported module: line}} of {path in the package: syntax tree}."""
    names = {path: ".".join(["mpipipe", *Path(path).with_suffix("").parts]) for path in trees}
    modules = {path: name.removesuffix(".__init__") for path, name in names.items()}
    graph = {}
    for path, tree in trees.items():
        lines = imported(tree, modules[path], path.endswith("__init__.py"), set(modules.values()))
        graph[modules[path]] = {module: line for line, module in lines if module != modules[path]}
    return graph


def shortest_cycle(graph):
    """The modules of a shortest circle of imports, or None."""
    best = None
    for start in sorted(graph):
        came_from, queue = {}, [start]
        for module in queue:  # breadth first; the queue grows meanwhile
            for target in sorted(graph.get(module, ())):
                if target not in came_from:
                    came_from[target] = module
                    queue.append(target)
        if start in came_from:
            path = [start, came_from[start]]
            while path[-1] != start:
                path.append(came_from[path[-1]])
            best = path[::-1] if best is None or len(path) < len(best) else best
    return best


def cycles(graph):
    """Circles of imports as text, the shortest first, until leaving out one import of each leaves no circle."""
    graph = {module: dict(targets) for module, targets in graph.items()}
    while cycle := shortest_cycle(graph):
        yield " -> ".join(f"{a}:{graph[a][b]}" for a, b in pairwise(cycle)) + f" -> {cycle[-1]}"
        del graph[cycle[-2]][cycle[-1]]


def findings(search):
    """["path:line", ...] of what a search of a syntax tree finds in the package."""
    return [f"{name}:{found}" for name, tree in sources() for found in search(tree)]


def refuse(found):
    assert not found, f"{len(found)} found\n" + "\n".join(found)


@pytest.mark.parametrize("function, word", [("hasattr", "comm"), ("hasattr", "kernel"), ("isinstance", "stage")])
def test_interfaces_are_not_sniffed(function, word):
    """What a communicator, a kernel or a stage can do, its interface says."""
    refuse(findings(lambda tree: asks(tree, function, word)))


def test_only_agreements_and_known_failures_say_that_an_error_is_reported_elsewhere():
    found = findings(lambda tree: assignments(tree, "reported_elsewhere"))
    refuse([place for place in found if not place.startswith(("job/consensus.py:", "job/context.py:"))])


def test_no_call_has_more_than_seven_positional_arguments():
    refuse(findings(lambda tree: (f"{line} ({count} arguments)" for line, count in positional_calls(tree))))


def test_no_file_of_the_package_is_longer_than_500_lines():
    files = [path for pattern in ("*.py", "*.cu", "*.cuh") for path in sorted(PACKAGE.rglob(pattern))]
    lengths = {path.relative_to(PACKAGE).as_posix(): len(path.read_text().splitlines()) for path in files}
    refuse([f"{name} ({length} lines)" for name, length in lengths.items() if length > 500])


@pytest.mark.slow
def test_imports_form_no_circle():
    """Not even one hidden in functions; imports for types alone, below `if TYPE_CHECKING`, do not count."""
    refuse(list(cycles(import_graph(dict(sources())))))  # each as importer:line -> imported:line -> ...


def test_every_public_name_of_a_module_has_a_docstring():
    refuse(findings(undocumented))


def test_the_searches_find_what_they_look_for():
    tree = ast.parse(
        "hasattr(comm, 'x'); hasattr(self.pipe_comm, 'x')\n"
        "isinstance(stages, list)\n"
        "error.reported_elsewhere, error.other = True, 1\n"
        "setattr(error, 'reported_elsewhere', True)\n"
        "class Error:\n    def __init__(self): self.reported_elsewhere = False\n"
        "f(1, 2, 3, 4, 5, 6, 7); f(1, 2, 3, 4, 5, 6, 7, 8)\n"
    )
    assert list(asks(tree, "hasattr", "comm")) == [1, 1] and not list(asks(tree, "isinstance", "stage"))
    assert sorted(assignments(tree, "reported_elsewhere")) == [3, 4]
    assert list(positional_calls(tree)) == [(7, 8)]
    assert list(undocumented(tree)) == ["the module", "Error"]


def test_the_search_for_circles_finds_them_also_in_functions():
    texts = {
        "__init__.py": "from mpipipe.a import f",
        "a.py": "from mpipipe import b\nif TYPE_CHECKING:\n    from mpipipe.c import x",
        "b/__init__.py": "from .d import y",
        "b/d.py": "def y():\n    import mpipipe.a",
        "c.py": "import mpipipe.a",
    }
    graph = import_graph({path: ast.parse(text) for path, text in texts.items()})
    assert list(cycles(graph)) == ["mpipipe.a:1 -> mpipipe.b:1 -> mpipipe.b.d:2 -> mpipipe.a"]
    assert not list(cycles({**graph, "mpipipe.b.d": {}}))


def test_the_hooks_run_the_commands_of_the_gate():
    commands = re.findall(r"^check (.+)$", (ROOT / "jobs" / "check.sh").read_text(), re.MULTILINE)
    assert commands == re.findall(r"entry: ([^,]+)", (ROOT / ".pre-commit-config.yaml").read_text())
    assert len(commands) == 4
