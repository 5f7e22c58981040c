"""Jobs that end while a checkpoint is being written: soon, without a half checkpoint, and with the disk named."""

import os
import re
import time

import pytest

SCRIPT = """
import os, sys, threading, time
import numpy as np
from mpipipe import Mesh, checkpoint, nn, optim
from mpipipe.checkpoint import tensor_files as tensors
from mpipipe.job import runtime
from mpipipe.job.exit import run_or_abort

comm, root = runtime.world(), "ROOT"
entered = threading.Event()

def stuck(*arguments):
    if threading.current_thread() is threading.main_thread():
        return
    entered.set()
    time.sleep(1000)

def hang():
    tensors.crc32 = stuck

def main():
    stage = nn.Stage([nn.Linear(64, 64)], first=comm.rank)
    optimizer = optim.AdamW([stage], 0.1)
    mesh = Mesh(comm, pipe=comm.size)
    checkpoint.save(root, mesh, [stage], optimizer, step=1)
    saver = checkpoint.Saver(root, mesh, [stage], optimizer)
BODY

sys.exit(run_or_abort(main))
"""
WITHIN = """
    with saver:
        hang()
        saver.save(2)
        entered.wait()
"""
WITHOUT = """
    hang()
    saver.save(2)
    entered.wait()
"""
ENDS = {
    "no close": ("    comm.Barrier()", 0),
    "exit": ("        sys.exit(3)", 3),
    "interrupt": ("        raise KeyboardInterrupt", 130),
    "error of one rank": (
        "        if comm.rank == 1: raise ZeroDivisionError\n        optimizer.step(); saver.wait()",
        1,
    ),
}


def play(launch, root, body, env=None):
    return launch(2, SCRIPT.replace("ROOT", str(root)).replace("BODY", body), env=env)


@pytest.mark.long
@pytest.mark.parametrize("how", ENDS)
def test_a_job_that_ends_while_a_thread_hangs_leaves_nothing_behind(launch, tmp_path, how):
    text, code = ENDS[how]
    body = WITHOUT if how == "no close" else WITHIN
    job = play(launch, tmp_path / "run", body + text)
    assert job.returncode == code, job.stderr
    assert os.listdir(tmp_path / "run") == ["step-00000001"]
    assert sorted(os.listdir(tmp_path / "run" / "step-00000001")) == [
        "manifest.json", "part-0.safetensors", "part-1.safetensors"
    ]  # fmt: skip


@pytest.mark.long
def test_the_watchdog_names_the_rank_whose_disk_hangs_and_what_it_waits_for(launch, tmp_path):
    body = "    hang() if comm.rank == 1 else None\n    saver.save(2)\n    optimizer.step()\n    saver.wait()"
    job = play(launch, tmp_path / "run", body, env={"MPIPIPE_WATCHDOG": "2"})
    assert job.returncode == 124, job.stderr
    folder = re.escape(str(tmp_path / "run" / "step-00000002"))
    assert re.search(
        rf"rank 1 on \S+ has waited \d+ s for the checkpoint to be written: {folder} "
        r"\(a thread writes its arrays, 0 of 0 MiB begun\), and for no other rank",
        job.stderr,
    ), job.stderr


@pytest.mark.long
def test_a_disk_that_is_slow_and_goes_on_is_no_hang(launch, tmp_path):
    """Each piece takes half of what the watchdog allows, and all of them far more."""
    body = """
    tensors.PIECE_BYTES = 8192
    original = tensors.crc32
    def crc32(*arguments):
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.7)
        return original(*arguments)
    tensors.crc32 = crc32
    saver.save(2)
    optimizer.step()
    saver.close()
"""
    start = time.monotonic()
    job = play(launch, tmp_path / "run", body, env={"MPIPIPE_WATCHDOG": "1.5"})
    assert job.returncode == 0, job.stderr
    assert time.monotonic() - start > 4 and "step-00000002" in os.listdir(tmp_path / "run")
