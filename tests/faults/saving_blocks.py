"""What cases of trainings that save are made of: their script, what loads a checkpoint afterwards, ways to end."""

from __future__ import annotations

from faults.blocks import NONZERO, RUN, TEXT, TRAIN, Fault, on
from faults.fault import Send

KIND = "checkpoint"
BREAKS_AT = 3  # steps that are made before anything goes wrong
WHOLE = BREAKS_AT - 2  # of which step there is a whole checkpoint then: two are under way at most
OPENING = """
import os, resource, signal, sys, threading, time
import numpy as np
from mpipipe import nn, optim
from mpipipe.job import runtime
from mpipipe.language.models import GPT, weights
from mpipipe.train import TrainConfig, train
from mpipipe.train.trainer import Trainer

comm = runtime.world()
rank, size, last = comm.rank, comm.size, comm.size - 1
keys = dict(data=("text.txt",), out="run", dim=16, layers=4, heads=2, hidden=32, seq_len=16, batch=8, microbatches=4,
            steps=3000, log_every=1, eval_every=5000, eval_batches=1, sample_bytes=0, device="cpu", save_every=1,
            resume="auto", watchdog=3.0)
at = 0  # the step that is being made


def count(self, number, original=Trainer.step):
    global at
    at = number
    return original(self, number)


def during(owner, name, act):
    # from step 3 on this rank calls act() before it calls owner.name
    original = getattr(owner, name)

    def call(*arguments, **options):
        if at >= 3:
            act()
        return original(*arguments, **options)

    setattr(owner, name, call)


def fail():
    raise ValueError("wet paint")


def no_room(size):
    # files of this rank stay below `size` bytes from here on, as on a disk that is full
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


Trainer.step = count
"""
GO = "\ntrain(TrainConfig(**keys), GPT)\nprint('finished', flush=True)\n"
# the newest checkpoint is read whole, with all checksums, into a model that is built from what it says itself
LOADS = """
import sys
from mpipipe import Mesh, checkpoint, nn, optim
from mpipipe.attention import Local
from mpipipe.job import inprocess
from mpipipe.language.models import GPT

def load(comm):
    found = checkpoint.read("run")
    stages = [nn.Stage(GPT(**found.state["model"]).build(Local()))]
    with Mesh(comm) as mesh:
        return checkpoint.load(found.path, mesh, stages, optim.AdamW(stages, 0.1)).step

(step,) = inprocess.run(1, load)
assert step >= int(sys.argv[1]), f"the newest whole checkpoint is of step {step}"
"""
BEFORE = (*TRAIN, "--out", "run", "--save-every", "1")  # a training that has ended, and saved


def loads(least: int = WHOLE) -> tuple[tuple[str, ...], ...]:
    return (("-c", LOADS, str(least)),)


def saving(name, body, *says, **options) -> Fault:
    """A training of a script that saves; one report that holds `says`, and a whole checkpoint that is not too old."""
    options = {"code": 1, "never": ("finished",), "limit": 60, "modes": (RUN,), "before": (TEXT,), **options}
    return Fault(f"{name} while it saves", KIND, OPENING + body + GO, says=says, after=loads(), **options)


def raises(where, owner, name, *says, ranks=(2, 4), **options) -> Fault:
    body = on("last", f"during({owner}, {name!r}, fail)")
    return saving(f"an exception in {where}", body, "ValueError: wet paint", *says, ranks=ranks, **options)


def _dies(name, body, number, **options) -> tuple[Fault, Fault]:
    """A rank ends by a signal: the launcher of MPICH tells process and host on stdout, that of Open MPI the rank."""
    text, who = f"signal {number:d}", options.pop("who", "{last}")
    options = {"code": NONZERO, "reports": None, **options}
    return (
        saving(f"{name}, MPICH", body, mpi="mpich", prints=("RUNNING AT", text), **options),
        saving(f"{name}, Open MPI", body, f"rank {who} ", text, mpi="openmpi", **options),
    )


def dies_in_forward(number) -> tuple[Fault, Fault]:
    body = on("last", f"during(nn.Stage, 'forward', lambda: os.kill(os.getpid(), {number:d}))")
    return _dies(f"{number.name} in a forward", body, number)


def dies_outside(number, suffix="", **options) -> tuple[Fault, Fault]:
    sends = (Send(number, 1, at="step    9/", after=0.05),)
    return _dies(f"{number.name} of rank 1 from outside{suffix}", "", number, who="1", sends=sends, **options)


def signalled(number, to, name, **options) -> Fault:
    sends = (Send(number, to, at="step    9/", after=0.05),)
    return saving(name, "", sends=sends, **{"code": NONZERO, "reports": None, **options})


def refused(name, odd, *says, **options) -> Fault:
    """Ranks that disagree when a training is to go on: refused on all, and what the earlier training saved stays."""
    body = "keys.update(steps=5)\n" + on("last", odd)
    options = {"before": (TEXT, BEFORE), "code": 2, "limit": 40, **options}
    return saving(name, body, *says, **options)
