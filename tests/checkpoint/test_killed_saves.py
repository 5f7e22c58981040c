"""A process is killed around each call that changes a file, and between pieces of arrays: what is left is whole."""

from __future__ import annotations

import re

import pytest

# a fork for each moment; it saves over a copy of a whole checkpoint, and ends at that moment without cleaning up
SCRIPT = """
import os, shutil, sys, threading
from pathlib import Path
import numpy as np
from mpipipe import Mesh, checkpoint, files, nn, optim
from mpipipe.checkpoint import contents, tensor_files as tensors
from mpipipe.job import inprocess

leave, left, lock = os._exit, [0], threading.Lock()

def on(work):
    def rank(comm):
        stages = [nn.Stage([nn.Linear(6, 5), nn.Linear(5, 3)], seed=1)]
        optimizer = optim.AdamW(stages, 0.1)
        with Mesh(comm) as mesh:
            return work(mesh, stages, optimizer, contents.contents_of(stages, optimizer))
    return inprocess.run(2, rank)[0]

def save(root, step):
    def work(mesh, stages, optimizer, arrays):
        for array in arrays.values():
            array[...] = step
        checkpoint.save(root, mesh, stages, optimizer, step=step, state={"step": step}, keep=1)
    on(work)

def load(root):
    def work(mesh, stages, optimizer, arrays):
        found = checkpoint.load(root, mesh, stages, optimizer)
        assert found.state == {"step": found.step}
        for name, array in arrays.items():
            assert (array == found.step).all(), name
        return found.step
    return on(work)

def deadly(function):
    def call(*arguments, **keys):
        die()
        result = function(*arguments, **keys)
        die()
        return result
    return call

def die():
    with lock:
        left[0] -= 1
        if left[0] == 0:
            leave(9)

def arm(moment):
    left[0] = moment
    for name in ("replace", "fsync", "mkdir", "unlink", "rmdir", "open"):
        setattr(os, name, deadly(getattr(os, name)))
    files.open = deadly(open)
    tensors.PIECE_BYTES = 32
    tensors.crc32 = deadly(tensors.crc32)

root, copy = Path("root"), Path("copy")
save(root, 1)
moment, seen = 0, []
while True:
    moment += 1
    shutil.copytree(root, copy)
    child = os.fork()
    if child == 0:
        arm(moment)
        save(copy, 2)
        leave(0)
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert ended in (0, 9), ended
    seen.append(load(copy))
    shutil.rmtree(copy)
    if ended == 0:
        break
print("moments", moment, "steps", *seen)
"""


@pytest.mark.long
def test_a_save_that_is_killed_at_any_moment_leaves_a_whole_checkpoint(launch):
    job = launch(0, SCRIPT)
    assert job.returncode == 0, job.stderr
    moments, steps = re.search(r"moments (\d+) steps (.*)", job.stdout).groups()
    assert int(moments) > 30 and steps.split()[0] == "1" and steps.split()[-1] == "2", job.stdout
