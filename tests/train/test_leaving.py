"""A training that has to leave saves at once, ends with 75, and goes on as if it had not; Ctrl-C says how far it is."""

import re
import signal
import sys
import time

import pytest
from mpi4py import MPI
from support.launch import ROOT, Job, mpiexec
from train.test_kills import outcome

from mpipipe import checkpoint

TRAIN = """-m mpipipe train --steps 60 --log-every 5 --dim 16 --layers 2 --heads 2 --hidden 32 --seq-len 16 --batch 8
--microbatches 2 --dropout 0.1 --sample-bytes 0 --eval-batches 1 --eval-every 20 --device cpu --data""".split()
TRAIN += [str(ROOT / "README.md")]


def started(folder, *options):
    return Job([mpiexec(), "-n", "2", sys.executable, *TRAIN, *options], folder)


def interrupted(folder, options, send, step=5):
    """A job that ends after `send(job)`, once it has shown this step."""
    job = started(folder, *options)
    try:
        stop = time.monotonic() + 60
        while not re.search(rf"^step +{step}/", job.stdout, re.MULTILINE):
            assert time.monotonic() < stop and job.returncode is None, job.stderr
            time.sleep(0.005)
        send(job)
        assert job.wait(30)
    finally:
        job.end()
    return job


def rank_of(job, rank):
    """The process of this rank."""
    for pid, env in job.processes().items():
        if str(rank) == env.get("PMI_RANK", env.get("OMPI_COMM_WORLD_RANK")):
            return pid
    raise AssertionError(job.stderr)


@pytest.mark.long
@pytest.mark.jobs
def test_a_signal_to_one_rank_saves_and_the_end_is_bit_by_bit_that_of_a_training_without(tmp_path, launch):
    """No checkpoint is configured, and each of two replicas writes a share."""
    whole = launch(2, [*TRAIN, "--pipe", "1", "--save-every", "60", "--out", str(tmp_path / "whole")])
    assert whole.returncode == 0, whole.stderr
    options = ["--pipe", "1", "--out", "parts"]
    job = interrupted(tmp_path, options, lambda job: job.send(signal.SIGUSR2, rank_of(job, 1)))
    assert job.returncode == 75, job.stderr
    left = re.search(r"^mpipipe: SIGUSR2 on rank 1: left after step (\d+) of 60\n"
                     r"mpipipe: --resume auto --out \S+/parts goes on from step-000000(\d+)$",
                     job.stdout, re.MULTILINE)  # fmt: skip
    assert left and left[1].zfill(2) == left[2] and 5 <= int(left[1]) < 60
    assert checkpoint.newest(tmp_path / "parts").name == f"step-000000{left[2]}"
    assert not (tmp_path / "parts" / "weights").exists() and "Traceback" not in job.stderr
    again = launch(
        2, [*TRAIN, "--pipe", "1", "--save-every", "60", "--resume", "auto", "--out", str(tmp_path / "parts")]
    )
    assert again.returncode == 0 and f"goes on after step {left[1]}" in again.stdout, again.stderr
    assert outcome(tmp_path / "parts") == outcome(tmp_path / "whole")


@pytest.mark.long
def test_a_training_whose_time_is_over_makes_a_step_and_leaves(launch, tmp_path):
    again = [*TRAIN, "--time-limit", "0.5", "--resume", "auto", "--out", str(tmp_path / "run")]
    for step in (1, 2):
        job = launch(2, again)
        assert job.returncode == 75, job.stderr
        assert f"mpipipe: the time limit, 0 s ahead: left after step {step} of 60\nmpipipe: --resume auto" in job.stdout


def test_without_signals_a_training_dies_of_them(launch, tmp_path):
    """And time has no end, even where SLURM names one."""
    script = f"""
import os, signal, sys, threading
sys.argv = {["mpipipe", *TRAIN[2:], "--preempt-signals", "none", "--time-limit", "0", "--out", str(tmp_path / "run")]!r}
from mpipipe.train.trainer import Trainer
step = Trainer.step
def killed(self, number):
    if number == 4: os.kill(os.getpid(), signal.SIGUSR2)
    return step(self, number)
Trainer.step = killed
from mpipipe.cli import main
main()
"""
    job = launch(1, script, env={"SLURM_JOB_END_TIME": "1"})
    assert job.returncode not in (0, 75)
    assert "step  1/60" in job.stdout and checkpoint.newest(tmp_path / "run") is None


@pytest.mark.long
@pytest.mark.jobs
def test_ctrl_c_leaves_at_most_six_lines_below_the_last_loss(tmp_path):
    options = ["--steps", "100000", "--save-every", "4", "--out", "run"]
    job = interrupted(tmp_path, options, lambda job: job.send(signal.SIGINT, "group"), step=20)
    assert job.returncode not in (0, None)
    below = job.stdout.splitlines()[::-1]
    below = below[: next(number for number, line in enumerate(below) if line.startswith("step "))]
    said = [*below, *job.stderr.splitlines()]
    assert len(said) <= 6 and "Traceback" not in job.stderr
    word = "SIGTERM" if MPI.get_vendor()[0] == "Open MPI" else "KeyboardInterrupt:"  # what the launcher sends
    place = rf"{word} after step \d+ of 100000\n(mpipipe:)? +--resume auto --out \S+/run goes on from step-0"
    assert re.search(place, job.stderr)
