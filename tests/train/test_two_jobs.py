"""Two jobs with one output folder: one at a time trains there, and no record or checkpoint is doubled or lost."""

from __future__ import annotations

import signal
import sys
import time
from types import SimpleNamespace

import pytest
from support.launch import Job, mpiexec
from support.small_training import records, training_job

from mpipipe import checkpoint
from mpipipe.checkpoint import folders

# a training that waits as long as a test can for a folder to become free
TRAINING = """
waits, pause = map(float, words)
owner.LIVING_SECONDS = waits
before("step", lambda *_: time.sleep(pause))
options = dict(steps=12, eval_every=4, save_every=1, keep=2, resume="auto", pipe=2)
"""


@pytest.fixture
def start(tmp_path):
    """start(name, waits, pause): a job in the folder `name`."""
    script, jobs = training_job(tmp_path, TRAINING), []

    def begin(name, waits=0.5, pause=0.0):
        jobs.append(Job([mpiexec(), "-n", "2", sys.executable, *script, tmp_path / name, waits, pause], tmp_path))
        return jobs[-1]

    yield begin
    for job in jobs:
        job.end()


def ended(job):
    assert job.wait(120), job.stdout + job.stderr
    return job.returncode


def outcome(run):
    """All that a training leaves, but for what was measured by the clock."""
    lines = records(SimpleNamespace(out=run))
    whole = folders.find(run / "checkpoints")
    contents = [checkpoint.read(path).step for path in whole]
    files = [*sorted(whole[-1].glob("part-*")), *sorted((run / "weights").iterdir())]
    return lines, contents, {path.name: path.read_bytes() for path in files}


def rank_of(env):
    return env.get("PMI_RANK") or env.get("OMPI_COMM_WORLD_RANK")


@pytest.mark.jobs
@pytest.mark.long
def test_a_job_that_was_stopped_for_long_ends_when_it_wakes_up(start, tmp_path, allow_seconds):
    """Another job has taken over: nothing of the first one's is written any more."""
    allow_seconds(300)
    first = start("run", pause=0.2)
    stop = time.monotonic() + 60
    while first.stdout.count("step ") < 3:
        assert time.monotonic() < stop and first.returncode is None, first.stderr
        time.sleep(0.02)
    ranks = [pid for pid, env in first.processes().items() if rank_of(env)]
    for pid in ranks:
        first.send(signal.SIGSTOP, pid)
    (tmp_path / "run" / "owner.json").unlink()  # as somebody does who takes that job for dead
    second = start("run")
    assert ended(second) == 0, second.stderr
    expected = outcome(tmp_path / "run")
    for pid in ranks:
        first.send(signal.SIGCONT, pid)
    assert ended(first) == 2, first.stderr
    assert first.stderr.count("another job has taken the folder from this one") == 1, first.stderr
    assert outcome(tmp_path / "run") == expected and not (tmp_path / "run" / "owner.json").exists()
