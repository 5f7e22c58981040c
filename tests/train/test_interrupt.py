"""Ctrl-C: few lines, and they say how far the training had come."""

from __future__ import annotations

import re
import signal
import sys
import time

import pytest
from mpi4py import MPI
from support.launch import ROOT, Job, mpiexec

from mpipipe.train import setup

TRAIN = """-m mpipipe train --steps 100000 --log-every 5 --dim 8 --layers 1 --heads 1 --seq-len 8 --batch 8
--sample-bytes 0 --eval-batches 1 --save-every 7 --out run --data""".split()


def test_an_interrupt_says_where_and_other_exceptions_stay_what_they_are():
    with pytest.raises(KeyboardInterrupt, match=r"^after step 3$"), setup.told(lambda: "after step 3"):
        raise KeyboardInterrupt
    with pytest.raises(ValueError, match=r"^wet$"), setup.told(lambda: "after step 3"):
        raise ValueError("wet")


@pytest.mark.long
@pytest.mark.jobs
@pytest.mark.parametrize("to", ["launcher", "group"])
def test_ctrl_c_leaves_at_most_six_lines_below_the_last_loss(tmp_path, to):
    job = Job([mpiexec(), "-n", "2", sys.executable, *TRAIN, ROOT / "README.md"], tmp_path)
    try:
        stop = time.monotonic() + 60
        while job.stdout.count("step ") < 4:
            assert time.monotonic() < stop and job.returncode is None, job.stderr
            time.sleep(0.02)
        job.send(signal.SIGINT, to)
        assert job.wait(30)
    finally:
        job.end()
    assert job.returncode not in (0, None)
    below = job.stdout.splitlines()[::-1]
    below = below[: next(number for number, line in enumerate(below) if line.startswith("step "))]
    said = [*below, *job.stderr.splitlines()]
    assert len(said) <= 6 and "Traceback" not in job.stderr
    word = "SIGTERM" if MPI.get_vendor()[0] == "Open MPI" else "KeyboardInterrupt:"  # what the launcher sends
    place = rf"{word} after step \d+ of 100000\n(mpipipe:)? +--resume auto --out \S+/run goes on from step-0"
    assert re.search(place, job.stderr)
