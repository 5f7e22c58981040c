"""`bench threads`: a rank with several threads next to the same rank with one, and next to several ranks.

Candidates take turns in one run. A copy of an array by as many threads shows the memory's rate: what kernels can gain
that do little with each number.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.util import find_spec
from time import perf_counter, sleep
from typing import Annotated

import numpy as np

from mpipipe import Pipeline, attention, nn, optim, processor, schedules
from mpipipe.attention import Local
from mpipipe.bench.attention import both_ways, random_arrays
from mpipipe.bench.timing import Call, Repeats, compare, on_ranks, report
from mpipipe.bench.train import beside_torch
from mpipipe.comm import Mesh
from mpipipe.job import Communicator, group_of, runtime, share_of_cores
from mpipipe.language.models import GPT
from mpipipe.nn import kernels
from mpipipe.nn.kernels import AdamWNumbers
from mpipipe.options import Option

WARMUP = 1
NUMBERS = AdamWNumbers(0.9, 0.99, 1e-8, 1e-3, 0.1, 0.01, 0.999)


@on_ranks
def run(
    repeats: Repeats = 5,
    threads: Annotated[int | None, Option("of one rank; default: all cores of the ranks", least=1)] = None,
    dim: int = 512,
    layers: int = 4,
    heads: int = 8,
    seq_len: int = 256,
    rows: Annotated[int, Option("sequences in a micro-batch")] = 4,
    ring_seq_len: int = 8192,
    megabytes: Annotated[int, Option("of an array, for kernels alone", least=1)] = 100,
) -> None:
    """Threads in a rank, next to one thread; with mpiexec -n 2 next to ranks (python -m mpipipe bench threads)."""
    comm = runtime.world()
    most = share_of_cores() * comm.size if threads is None else threads
    model = GPT(dim=dim, layers=layers, heads=heads, seq=seq_len)
    if comm.size == 1:
        _kernels(comm, repeats, most, megabytes)
        _steps(comm, repeats, most, f"GPT of {model.parameters:,} parameters", model, rows, "at least 1.8")
        small = GPT(dim=64, layers=4, heads=4, seq=64)
        if find_spec("torch"):
            beside_torch(comm, model, rows, repeats, most)
        _steps(comm, repeats, most, "small GPT, whose arrays are not cut", small, rows, "at least 0.98")
    else:
        _replicas(comm, repeats, most, model, rows)
        _ring(comm, repeats, most, ring_seq_len)


def _with(threads: int, call: Call) -> Call:
    def work() -> None:
        with processor.threads_set_to(threads):
            call()

    return work


def _gain(comm: Communicator, repeats: int, threads: int, what: str, call: Call, goal: str) -> float:
    """Report how much faster `call` is with threads than with one; return the ratio."""
    one, many = compare(comm, [_with(1, call), _with(threads, call)], repeats, WARMUP)
    report(comm, f"{what}, {threads} threads", f"{1e3 * many:.1f} ms, one thread {1e3 * one:.1f} ms", one / many, goal)
    return one / many


def _kernels(comm: Communicator, repeats: int, threads: int, megabytes: int) -> None:
    host, size = kernels.of("cpu", np.dtype(np.float32)), megabytes * 1_000_000 // 4
    draw = np.random.default_rng(0).standard_normal
    p, g, m, v = (np.abs(draw(size, np.float32)) for _ in range(4))
    width = 1000
    x, y, gain, ids = p.reshape(-1, width), g.reshape(-1, width), m[:width], np.arange(size // width) % width
    limit = _gain(comm, repeats, threads, f"copy of {megabytes} MB", partial(host.copy, x, y), "the memory's rate")
    goal = f"at least 1.7, or {limit:.2f} of the copy"
    calls: dict[str, Call] = {
        "AdamW": partial(host.adamw, p, g, m, v, NUMBERS),
        "LayerNorm": partial(host.norm, x, gain, gain, 1e-5),
        "GELU": partial(host.gelu, x),
        "softmax and cross-entropy": partial(host.softmax_cross_entropy, x, ids, 1.0, y),
    }
    for what, call in calls.items():
        _gain(comm, repeats, threads, f"{what} of {megabytes} MB", call, goal)


@contextmanager
def _training(
    comm: Communicator, model: GPT, rows: int, microbatches: int, replicas: Communicator | None = None
) -> Iterator[Call]:
    """Yield a step of a GPT on one rank, with its optimizer."""
    stage = nn.Stage(model.build(Local(causal=True)))
    tokens, targets = np.random.default_rng(0).integers(0, model.vocab, size=(2, microbatches * rows, model.seq))
    optimizer = optim.AdamW([stage], lr=1e-3)
    schedule = schedules.one_f_one_b(1, microbatches)
    with Pipeline([stage], schedule, comm, loss=nn.softmax_cross_entropy, replicas=replicas) as pipeline:

        def step() -> None:
            pipeline.step(tokens, targets)
            optim.clip_by_global_norm([stage], 1.0)
            optimizer.step()

        yield step


def _steps(comm: Communicator, repeats: int, threads: int, what: str, model: GPT, rows: int, goal: str) -> None:
    with _training(comm, model, rows, 4) as step:
        _gain(comm, repeats, threads, f"step of a {what}", step, goal)


def _asleep(comm: Communicator, call: Call) -> Call:
    """Return what rank 0 calls while the others sleep for about as long: ranks that wait take time from it."""
    seconds = [0.0]
    if comm.rank == 0:
        for _ in range(2):
            start = perf_counter()
            call()
            seconds[0] = perf_counter() - start
    (expected,) = group_of(comm).broadcast("bench: the seconds of a call", seconds)
    return call if comm.rank == 0 else partial(sleep, 0.8 * expected)


def _replicas(comm: Communicator, repeats: int, threads: int, model: GPT, rows: int) -> None:
    """Report a step on one rank with threads, next to replicas that share its batch."""
    with ExitStack() as stack:
        alone = group_of(comm).split(comm.rank, 0, "bench")
        stack.callback(alone.Free)
        whole = stack.enter_context(_training(alone, model, rows, 4 * comm.size))
        mesh = stack.enter_context(Mesh(comm, data=comm.size))
        shared = stack.enter_context(_training(mesh.pipe, model, rows, 4, mesh.replicas))
        ours, theirs = compare(comm, [_asleep(comm, _with(threads, whole)), _with(1, shared)], repeats, WARMUP)
    what = f"step of a GPT of {model.parameters:,} parameters, one rank with {threads} threads"
    measured = f"{ours:.3f} s, {comm.size} replicas with one thread each {theirs:.3f} s"
    report(comm, what, measured, theirs / ours, "at least 0.97")


def _ring(comm: Communicator, repeats: int, threads: int, seq_len: int) -> None:
    """Report attention on one rank with threads, next to a ring with one thread on each rank."""
    whole, layout = random_arrays(seq_len, 8, 64), attention.Layout("zigzag", comm.size, seq_len)
    shards = [layout.shard(array, comm.rank) for array in whole]
    alone = _asleep(comm, _with(threads, partial(both_ways, Local(), whole)))
    ring = partial(both_ways, attention.Ring(comm, layout=layout), shards)
    ours, theirs = compare(comm, [alone, _with(1, ring)], repeats, WARMUP)
    what = f"attention, forward and backward, sequence {seq_len}, one rank with {threads} threads"
    report(comm, what, f"{ours:.3f} s, a ring of {comm.size} {theirs:.3f} s", theirs / ours, "at least 0.95")
