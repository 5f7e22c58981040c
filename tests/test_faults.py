"""Whole jobs that go wrong: each ends within seconds, with a non-zero exit code and one report that says where."""

from __future__ import annotations

import time

import pytest

JOB = """
import sys, os, time, signal
import numpy as np
import mpipipe
from mpipipe import nn, schedules
from mpipipe.comm import runtime

comm = runtime.world()
rank, size = comm.rank, comm.size
schedule = schedules.one_f_one_b(size, 4)
stages = [nn.Stage([nn.Linear(64, 64)], first=rank)]
loss = nn.mean_squared_error
inputs = np.ones((4 * 512, 64), np.float32) if rank == 0 else None
targets = np.ones((4 * 512, 64), np.float32) if rank == size - 1 else None


def train(steps=3, **options):
    with mpipipe.Pipeline(stages, schedule, comm, loss=loss, **options) as pipeline:
        for _ in range(steps):
            pipeline.step(inputs, targets)
    print("finished", flush=True)

"""


@pytest.fixture
def run(launch, mpi_tmp_path):
    """run(body, ranks): the script JOB + body under `python -m mpipipe run`."""

    def start(body, ranks=4):
        script = mpi_tmp_path / "job.py"
        script.write_text(JOB + body)
        return launch(ranks, ["-m", "mpipipe", "run", str(script)], timeout=40)

    return start


@pytest.fixture
def fails(run):
    """fails(body, match): the job ends non-zero, long before its peers would give up, and reports `match` once."""

    def check(body, match, report="job ended by rank"):
        start = time.monotonic()
        job = run(body)
        assert job.returncode != 0, job.stdout + job.stderr
        assert match in job.stderr, job.stderr
        assert job.stderr.count(report) == 1, job.stderr
        assert "finished" not in job.stdout
        assert time.monotonic() - start < 20  # against hanging; a measurement it is not
        return job

    return check


def test_a_good_job_passes(run):
    job = run("train()")
    assert job.returncode == 0, job.stderr
    assert job.stdout.count("finished") == 4 and job.stderr == ""


def test_exception_in_a_backward_on_rank_2(fails):
    job = fails(
        """
def broken(dy, saved):
    raise ValueError("wet paint")
if rank == 2:
    stages[0].backward = broken
train()
""",
        "StageError: rank 2, stage 2, micro-batch 0: backward raised ValueError: wet paint",
    )
    assert "in broken" in job.stderr


def test_mismatched_micro_batches(fails):
    fails("if rank == 1: schedule = schedules.one_f_one_b(size, 5)\ntrain()", "MismatchError: rank 1")


def test_mismatched_schedules(fails):
    fails("if rank == 3: schedule = schedules.gpipe(size, 4)\ntrain()", "MismatchError: rank 3")


def test_missing_targets(fails):
    fails("targets = None\ntrain()", "ArgumentError: rank 3: targets are missing")


def test_wrong_dtype(fails):
    fails("if rank == 0: inputs = inputs.astype(float)\ntrain()", "rank 0, stage 0, micro-batch 0: the input of a stage")


def test_loss_that_is_not_a_number(fails):
    fails("if rank == 3: targets[700] = np.nan\ntrain()", "NonFiniteError: rank 3, stage 3, micro-batch 1")


def test_exception_between_steps(fails):
    fails("if rank == 1: raise RuntimeError('out of paint')\ntrain()", "RuntimeError: out of paint")


def test_keyboard_interrupt_on_one_rank(fails):
    fails("if rank == 1: os.kill(os.getpid(), signal.SIGINT); time.sleep(1)\ntrain()", "KeyboardInterrupt")


def test_one_rank_that_exits_with_an_error_code(fails):
    job = fails("if rank == 2: sys.exit(3)\ntrain()", "rank 2", report="mpipipe: job ended by")
    assert job.returncode == 3


def test_one_rank_that_leaves_early_without_an_error(fails):
    fails(
        """
pipeline = mpipipe.Pipeline(stages, schedule, comm, loss=loss)
pipeline.step(inputs, targets)
if rank == 2:
    sys.exit(0)
pipeline.step(inputs, targets)
print("finished")
""",
        "rank 2", report="left the job after call 1",
    )


def test_killed_rank(launch):
    start = time.monotonic()
    job = launch(4, JOB + "if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ntrain(100000)", timeout=40)
    assert job.returncode != 0 and time.monotonic() - start < 15


def test_exit_code_that_all_ranks_agree_on_passes_through(run):
    job = run("train()\nsys.exit(75)")
    assert job.returncode == 75, job.stderr
    assert job.stdout.count("finished") == 4 and "ended by" not in job.stderr


def test_failure_without_the_runner_still_reaches_every_rank(launch):
    """Under plain `python script.py` the peers raise PeerError instead of waiting."""
    body = """
def broken(dy, saved):
    raise ValueError("wet paint")
if rank == 2:
    stages[0].backward = broken
train()
"""
    job = launch(4, JOB + body, timeout=40)
    assert job.returncode != 0
    assert "PeerError" in job.stderr and "wet paint" in job.stderr


def test_lone_processes_of_a_job_of_several_are_refused(launch):
    for variable in ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"):
        job = launch(0, JOB + "train()", env={variable: "4"})
        assert job.returncode != 0
        assert "LaunchError" in job.stderr and "found: 1 rank" in job.stderr and variable in job.stderr
