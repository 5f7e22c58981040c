"""What every rank of a soak does: python -m mpipipe run soak_job.py SECONDS FOLDER. It writes samples of itself there.

Each round trains a step, with delays, and now and then makes and frees everything else that holds resources: meshes,
pipelines of random schedules, rings, checkpoints, and refusals that the caller catches. A sample tells what the rank
holds between two rounds.
"""

from __future__ import annotations

import gc
import json
import os
import random
import resource
import sys
import threading
import time
from pathlib import Path

import numpy as np

from mpipipe import Mesh, Pipeline, attention, checkpoint, nn, optim, schedules
from mpipipe.errors import MismatchError
from mpipipe.job import communicators, runtime
from mpipipe.job.group import group_of

WIDTH, ROWS = 64, 512
SAMPLES = 120  # in all
NAMES = ("gpipe", "one_f_one_b", "zero_bubble_h1")
dice = random.Random(7)  # the same on all ranks: what is done
own_dice = random.Random()  # of this rank alone: delays


class Slow(nn.Linear):
    """A layer that now and then takes long."""

    def forward(self, x):
        if own_dice.random() < 0.02:
            time.sleep(own_dice.expovariate(20))
        return super().forward(x)


def count_communicators():
    """A function that returns how many communicators live: MPI tells of each that is made like COMM_WORLD, or freed."""
    MPI, live = runtime.mpi(), [0]

    def made(comm, keyval, value):
        live[0] += 1
        return value

    def freed(comm, keyval, value):
        live[0] -= 1

    keyval = MPI.Comm.Create_keyval(copy_fn=made, delete_fn=freed)
    MPI.COMM_WORLD.Set_attr(keyval, "counted")
    split = communicators.split

    def counted(*arguments):  # the one other way to make one
        part = split(*arguments)
        part.Set_attr(keyval, "counted")
        live[0] += 1
        return part

    communicators.split = counted
    return lambda: live[0]


def sample(rounds, communicators_now):
    gc.collect()
    objects = gc.get_objects()
    return {
        "rounds": rounds,
        "memory": int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize(),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "python threads": threading.active_count(),
        "communicators": communicators_now,
        "requests": sum(type(each).__name__ == "Owned" for each in objects),
        "objects": len(objects),
    }


def stage_of(comm, first):
    return nn.Stage([Slow(WIDTH, WIDTH), nn.Gelu()], seed=1, first=first)


def batch(comm, rows=ROWS):
    x = np.ones((rows, WIDTH), np.float32)
    return x if comm.rank == 0 else None, x if comm.rank == comm.size - 1 else None


def short_lived(comm):
    """A pipeline of another schedule, on a mesh of its own, and a ring on a communicator of its own."""
    name, microbatches, rows = dice.choice(NAMES), dice.randint(1, 8), dice.randint(8, 700)
    with Mesh(comm, pipe=comm.size) as mesh:
        schedule = schedules.by_name(name, ranks=comm.size, chunks=1, microbatches=microbatches)
        with Pipeline([stage_of(comm, comm.rank)], schedule, mesh.pipe, nn.mean_squared_error) as pipeline:
            for _ in range(3):
                pipeline.step(*batch(comm, rows))
            pipeline.evaluate(*batch(comm, rows))
    with Mesh(comm, seq=comm.size) as mesh:
        q = np.ones((1, dice.randint(2, 200) * comm.size, 2, 16), np.float32)
        out, saved = attention.ring_attention(q, q, q, mesh.seq)
        attention.ring_attention_backward(out, saved)


def refused(comm):
    try:
        with Mesh(comm, pipe=1 + comm.rank % 2):
            pass
    except MismatchError:
        return
    raise AssertionError("ranks with other meshes were not refused")


def main(seconds, folder):
    live = count_communicators()
    comm = communicators.duplicate(runtime.world())
    group, stages = group_of(comm), [stage_of(comm, comm.rank)]
    optimizer, schedule = optim.AdamW(stages, 1e-3), schedules.one_f_one_b(comm.size, 4)
    start, samples, rounds = time.monotonic(), 0, 0
    with (
        open(folder / f"rank-{comm.rank}.jsonl", "w") as file,
        Mesh(comm, pipe=comm.size) as mesh,
        Pipeline(stages, schedule, mesh.pipe, nn.mean_squared_error, replicas=mesh.replicas) as pipeline,
    ):
        while group.broadcast("soak: go on", time.monotonic() - start < seconds):
            rounds += 1
            pipeline.step(*batch(comm))
            optim.clip_by_global_norm(stages, 1.0, mesh.pipe)
            optimizer.step()
            if own_dice.random() < 0.05:
                time.sleep(own_dice.expovariate(5))
            if rounds % 5 == 0:
                short_lived(comm)
            if rounds % 7 == 0:
                checkpoint.check_replicas(mesh, stages, optimizer)
                checkpoint.save(folder / "checkpoints", mesh, stages, optimizer, step=rounds, keep=2)
            if rounds % 11 == 0 and comm.size > 1:
                refused(comm)
            due = (time.monotonic() - start) * SAMPLES / seconds
            if group.broadcast("soak: a sample", due >= samples):
                samples += 1
                file.write(json.dumps(sample(rounds, live())) + "\n")
                file.flush()
                if comm.rank == 0 and samples == 1:
                    print("working", flush=True)
    print("finished", flush=True)


main(float(sys.argv[1]), Path(sys.argv[2]))
