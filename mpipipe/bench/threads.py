"""`bench threads`: a rank with several threads next to the same rank with one.

Candidates take turns in one run. A copy of an array by as many threads shows the memory's rate:
what kernels can gain that do little with each number.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Annotated, TypeAlias

import numpy as np

from mpipipe import Pipeline, nn, optim, processor, schedules
from mpipipe.attention import Local
from mpipipe.bench.timing import Call, Repeats, compare, on_ranks, report
from mpipipe.bench.train import beside_torch
from mpipipe.cli import share_of_cores
from mpipipe.errors import ArgumentError
from mpipipe.job import Communicator, runtime
from mpipipe.language.models import GPT
from mpipipe.nn import kernels
from mpipipe.nn.kernels import AdamWNumbers
from mpipipe.options import Option
from mpipipe.text import counted

MICROBATCHES = 4
WARMUP = 1
# It reports what a call gains by threads, and returns the ratio: of its name, the call and a goal.
Gain: TypeAlias = "Callable[[str, Call, str], float]"
NUMBERS = AdamWNumbers(0.9, 0.99, 1e-8, 1e-3, 0.1, 0.01, 0.999)


@on_ranks
def run(
    repeats: Repeats = 5,
    dim: int = 512,
    layers: int = 4,
    heads: int = 8,
    seq_len: int = 256,
    rows: Annotated[int, Option("sequences in a micro-batch")] = 4,
    megabytes: Annotated[int, Option("of an array, for kernels alone", least=1)] = 100,
) -> None:
    """Threads in a rank, next to one thread (python -m mpipipe bench threads)."""
    comm = runtime.world()
    if comm.size > 1:
        raise ArgumentError("bench threads", found=counted(comm.size, "rank"), expected="1 rank")
    most = share_of_cores()
    model = GPT(dim=dim, layers=layers, heads=heads, seq_len=seq_len)
    gain = partial(_gain, comm, repeats, most)
    _kernels(gain, megabytes)
    _step(comm, gain, f"GPT of {model.parameters:,} parameters", model, rows, "at least 1.8")
    if find_spec("torch"):
        beside_torch(comm, model, rows, repeats, most)
    small = GPT(dim=64, layers=4, heads=4, seq_len=64)
    _step(comm, gain, "small GPT, whose arrays are not cut", small, rows, "at least 0.98")


def _with(threads: int, call: Call) -> Call:
    def work() -> None:
        with processor.threads_set_to(threads):
            call()

    return work


def _gain(
    comm: Communicator, repeats: int, threads: int, what: str, call: Call, goal: str
) -> float:
    """Report how much faster `call` is with threads than with one; return the ratio."""
    one, many = compare(comm, [_with(1, call), _with(threads, call)], repeats, WARMUP)
    report(
        comm,
        f"{what}, {threads} threads",
        f"{1e3 * many:.1f} ms, one thread {1e3 * one:.1f} ms",
        one / many,
        goal,
    )
    return one / many


def _kernels(gain: Gain, megabytes: int) -> None:
    host = kernels.of("cpu", np.dtype(np.float32))
    size = megabytes * 1_000_000 // 4
    draw = np.random.default_rng(0).standard_normal
    p, g, m, v = np.abs(draw((4, size), np.float32))
    width = 1000
    x = p.reshape(-1, width)
    y = g.reshape(-1, width)
    scale = m[:width]
    ids = np.arange(size // width) % width
    limit = gain(f"copy of {megabytes} MB", partial(host.copy, x, y), "the memory's rate")
    goal = f"at least 1.7, or {limit:.2f} of the copy"
    calls: dict[str, Call] = {
        "AdamW": partial(host.adamw, p, g, m, v, NUMBERS, kernels.Update()),
        "LayerNorm": partial(host.norm, x, scale, scale, 1e-5),
        "GELU": partial(host.gelu, x),
        "softmax and cross-entropy": partial(host.softmax_cross_entropy, x, ids, 1.0, y),
    }
    for what, call in calls.items():
        gain(f"{what} of {megabytes} MB", call, goal)


def _step(comm: Communicator, gain: Gain, what: str, model: GPT, rows: int, goal: str) -> None:
    """Report a step of a GPT with its optimizer."""
    stage = nn.Stage(model.build(Local(causal=True)))
    tokens, targets = np.random.default_rng(0).integers(
        0, model.vocab, size=(2, MICROBATCHES * rows, model.seq_len)
    )
    optimizer = optim.AdamW([stage], lr=1e-3)
    schedule = schedules.one_f_one_b(1, MICROBATCHES)
    with Pipeline([stage], schedule, comm, loss=nn.softmax_cross_entropy) as pipeline:

        def step() -> None:
            pipeline.step(tokens, targets)
            optim.clip_by_global_norm([stage], 1.0)
            optimizer.step()

        gain(f"step of a {what}", step, goal)
