"""Hundreds of steps: memory stays flat, and the loss curve is that of one process."""

from __future__ import annotations

import os

import numpy as np
import pytest
from support import dense, harness
from support.tolerance import close
from support.training_tolerance import curve, path

from mpipipe import Mesh, Pipeline, nn, optim
from mpipipe.attention import Local
from mpipipe.language.models import GPT
from mpipipe.schedules import gpipe, interleaved_1f1b, partition

STEPS = 1000 if harness.AT_LENGTH else 400
MODEL = GPT(vocab=32, dim=16, layers=3, heads=2, hidden=32, seq=16)


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def tokens(step, rows):
    """(inputs, targets) of a step: each next token is the one before plus the row's stride."""
    rng = np.random.default_rng(step)
    start, stride = rng.integers(0, 32, (rows, 1)), rng.integers(1, 4, (rows, 1))
    text = (start + stride * np.arange(17)) % 32
    return np.ascontiguousarray(text[:, :-1]), np.ascontiguousarray(text[:, 1:])


def train(pipe, replicas, schedule, steps, dtype):
    """(loss of each step, memory after each step) of a model trained by AdamW; batches of 8 rows over the replicas."""
    parts, layers = partition(MODEL.costs(), schedule.stages), MODEL.build(Local(causal=True))
    cuts = [parts[number] for number in schedule.stages_of(pipe.rank)]
    stages = [nn.Stage(layers[start:stop], dtype=dtype, seed=5, first=start) for start, stop in cuts]
    optimizer = optim.AdamW(stages, lr=3e-3)
    losses, memory = [], []
    with Pipeline(stages, schedule, pipe, loss=nn.softmax_cross_entropy, replicas=replicas) as pipeline:
        rows = 8 // replicas.size
        mine = slice(replicas.rank * rows, (replicas.rank + 1) * rows)
        for step in range(steps):
            batch = dense.placed(schedule, pipe.rank, *(array[mine] for array in tokens(step, 8)))
            losses.append(pipeline.step(*batch).loss)
            optim.clip_by_global_norm(stages, 1.0, pipe)
            optimizer.step()
            memory.append(resident_bytes())
    return losses, memory


@pytest.mark.long
def test_memory_is_flat_after_step_20(comm):
    with Mesh(comm, pipe=min(2, comm.size)) as mesh:
        losses, memory = train(mesh.pipe, mesh.replicas, interleaved_1f1b(mesh.pipe.size, 2, 2), STEPS, "float32")
    assert losses[-1] < 0.5 * losses[0]
    assert memory[-1] - memory[19] < 1 << 20, f"grew by {memory[-1] - memory[19]} bytes"


@pytest.mark.long
@pytest.mark.mpi(min_size=4)
def test_loss_curve_of_pipe_2_x_data_2_is_that_of_one_process(comm):
    with Mesh(comm, pipe=1, data=comm.size) as alone:
        single = comm.Split(comm.rank, 0)
        expected, _ = train(alone.pipe, single, gpipe(1, 2), 100, "float64")
        single.Free()
    with Mesh(comm, pipe=2) as mesh:
        found, _ = train(mesh.pipe, mesh.replicas, interleaved_1f1b(2, 2, 2), 100, "float64")
    close(found, expected, path(MODEL, 8 * MODEL.seq), curve(MODEL, 100, 3e-3) * np.abs(expected))
