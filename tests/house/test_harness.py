"""The harness itself: each test starts a pytest job of three ranks on a small test file, and reads its one report."""

import re
from pathlib import Path

import pytest

RANKS = 3
HEADER = """
import time
import pytest
from mpi4py import MPI

RANK = MPI.COMM_WORLD.rank
"""


@pytest.fixture
def session(launch, tmp_path):
    """session(text of a test file, *options): its job, run with this folder's conftest."""

    def start(text, *options, limit=60):
        path = tmp_path / "test_sample.py"
        path.write_text(HEADER + text)
        harness = ["-p", "conftest", "-p", "no:cacheprovider", "-o", "addopts=", "--with-mpi", "-rA", "--color=no"]
        here = str(Path(__file__).parents[1])
        return launch(RANKS, ["-m", "pytest", *harness, *options, path], env={"PYTHONPATH": here} | limited(limit))

    return start


def limited(seconds):
    return {"MPIPIPE_TEST_TIMEOUT": str(seconds)}


def outcomes(job):
    """{test name: outcomes in the summary}; every test may appear only once per outcome."""
    lines = re.findall(r"^(PASSED|FAILED|ERROR|XFAIL|XPASS) \S*?::(\w+)", job.stdout, re.MULTILINE)
    return {name: [outcome for outcome, other in lines if other == name] for _, name in lines}


def test_verdicts_are_those_of_all_ranks_and_the_session_goes_on(session):
    """One report: what fails on one rank fails, with its text; messages that are left fail the test that sent them."""
    job = session("""
def test_call(comm):
    print("printed by", RANK)
    assert RANK != 2, "wrong on the last rank"

def test_two_reasons(comm):
    assert RANK == 0, f"reason of {RANK}"

@pytest.fixture
def broken():
    if RANK == 2:
        raise RuntimeError("broken set-up")

def test_set_up(broken, comm):
    comm.Barrier()

@pytest.fixture
def late():
    yield
    if RANK == 1:
        raise RuntimeError("broken tear-down")

def test_tear_down(late, comm):
    comm.Barrier()

def test_leak(comm):
    if RANK == 0:
        comm.send("lost", dest=1, tag=7)

def test_skipped_by_one(comm):
    if RANK == 1:
        pytest.skip("not here")

def test_too_many(subcomm):
    subcomm(99)

@pytest.mark.xfail
def test_expected_on_one(comm):
    assert RANK != 1

def test_part(subcomm):
    part = subcomm(2)
    assert (part is None) == (RANK >= 2)
    assert part is None or part.allreduce(1) == 2

def test_next(comm):
    assert not comm.iprobe()
    assert comm.allreduce(1) == comm.size
""")
    assert job.returncode == 1, job
    assert job.stdout.count("test session starts") == 1
    assert outcomes(job) == {
        "test_call": ["FAILED"],
        "test_two_reasons": ["FAILED"],
        "test_set_up": ["ERROR"],
        "test_tear_down": ["PASSED", "ERROR"],
        "test_leak": ["PASSED", "ERROR"],
        "test_skipped_by_one": ["FAILED"],
        "test_expected_on_one": ["XFAIL"],
        "test_part": ["PASSED"],
        "test_next": ["PASSED"],
    }
    for text in (
        "E       AssertionError: wrong on the last rank",
        "printed by 2",
        "RuntimeError: broken set-up",
        "RuntimeError: broken tear-down",
        "reason of 1",
        "reason of 2",
        "failed on rank(s) 1, 2 of 3; above: rank 1",
        "rank 1: unreceived message from rank 0 with tag 7",
        "rank(s) 1 skipped (Skipped: not here), rank(s) 0, 2 did not",
        "needs 99 ranks, here are 3",
        "1 skipped",
    ):
        assert text in job.stdout, text
    assert job.stdout.count("failed on rank(s) 2 of 3; above: rank 2") == 2


@pytest.mark.long
def test_pure_tests_run_once_and_count_on_all(session):
    job = session("""
@pytest.mark.parametrize("n", range(90))
def test_pure(n):
    if RANK == 0:
        time.sleep(0.2)  # the others take more of them, and wait longer than the limit of one test
    print(f"test {n} ran on {RANK}")

def test_wrong():
    assert False, f"seen by {RANK}"
""", limit=2.5)  # fmt: skip
    assert job.returncode == 1, job
    ran = re.findall(r"test (\d+) ran on (\d)", job.stdout)
    assert sorted(int(n) for n, _ in ran) == list(range(90)) and len({rank for _, rank in ran}) > 1
    assert "90 passed" in job.stdout and "1 failed" in job.stdout
    assert job.stdout.count("AssertionError: seen by ") >= 1


@pytest.mark.long
@pytest.mark.parametrize(
    ("fails", "limit", "says", "stacks"),
    [  # a failed rank speaks after half of the limit, long before the others reach theirs
        ("RANK == 1", 8, ["never seen by the others", "[rank 1]", "peers did not end this test"], RANKS - 1),
        ("False", 3, ["no end of", "test_sample.py::test_hang"], RANKS),
    ],
)
def test_a_job_that_hangs_ends_with_the_text_of_a_rank_that_failed_and_the_stacks_of_the_others(
    session, fails, limit, says, stacks
):
    job = session(f"""
def wait_for_ever(comm):
    comm.recv(source=(RANK + 1) % comm.size)

def test_hang(comm):
    assert not {fails}, "never seen by the others"
    wait_for_ever(comm)
""", limit=limit)  # fmt: skip
    assert job.returncode != 0 and all(text in job.stderr for text in says), job
    assert job.stderr.count("in wait_for_ever") == stacks


def test_launched_job_knows_nothing_of_the_job_around_it(launch, monkeypatch):
    for name in ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_NTASKS"):
        monkeypatch.setenv(name, "5")
    script = "import os; print([name for name in os.environ if name.startswith(('PMI', 'OMPI_COMM', 'SLURM'))])"
    assert launch(0, script).stdout.split() == ["[]"]
    assert launch(2, "from mpi4py import MPI; print(MPI.COMM_WORLD.size)").stdout.split() == ["2", "2"]
