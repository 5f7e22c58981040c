"""The pieces that cases are made of: the opening of their scripts, and one function for each way a job may end."""

from typing import Any, TypeAlias

from faults.fault import Fault

Code: TypeAlias = "int | str | tuple[int, ...]"
OPENING = """
import os, signal, sys, threading, time
import numpy as np
import mpipipe
from mpipipe import attention, errors, nn, optim, schedules
from mpipipe.job import runtime

comm = runtime.world()
rank, size, last = comm.rank, comm.size, comm.size - 1
schedule = schedules.one_f_one_b(size, 4)
stages = [nn.Stage([nn.Linear(64, 64)], first=rank)]
loss = nn.mean_squared_error
inputs = np.ones((4 * 512, 64), np.float32) if rank == 0 else None  # 128 kB in a message
targets = np.ones((4 * 512, 64), np.float32) if rank == last else None


def build(**options):
    return mpipipe.Pipeline(stages, schedule, comm, loss=loss, **options)


def train(steps=3, between=lambda: None, **options):
    with build(**options) as pipeline:
        for step in range(steps):
            pipeline.step(inputs, targets)
            if step == 0:
                print("working", flush=True)
                between()
    print("finished", flush=True)


def ring(steps=1):
    q = np.ones((1, 512, 4, 32), np.float32)  # 256 kB
    for _ in range(steps):
        out, saved = attention.ring_attention(q, q, q, comm)
        attention.ring_attention_backward(out, saved)


def breaks(name, act):
    # this rank's stage calls act() before it does `name`
    original = getattr(stages[0], name)

    def method(*args):
        act()
        return original(*args)

    setattr(stages[0], name, method)


def fail(text="wet paint"):
    raise ValueError(text)


"""


def on(rank: int | str, code: str) -> str:
    """Script text: `code` on one rank, which may be an expression such as "last"."""
    lines = [line for line in code.strip().splitlines()]
    return "\n".join([f"if rank == {rank}:", *(f"    {line}" for line in lines), ""])


def failing(name: str, kind: str, body: str, *says: str, code: Code = 1, **options: Any) -> Fault:
    """One rank fails: exit code 1 and one report that holds the texts `says`; no rank gets to its end."""
    options.setdefault("never", ("finished",))
    return Fault(name, kind, OPENING + body, code=code, says=says, **options)


def refused(name: str, kind: str, body: str, *says: str, code: Code = 2, **options: Any) -> Fault:
    """All ranks raise the same error of mpipipe: exit code 2, one report."""
    return failing(name, kind, body, *says, code=code, **options)


def good(name: str, body: str, kind: str = "good program", **options: Any) -> Fault:
    """Nothing is wrong: exit code 0, nothing on stderr."""
    options.setdefault("limit", 60.0)  # a good program that is slow is no fault
    return Fault(name, kind, OPENING + body, code=0, reports=0, quiet=True, **options)
