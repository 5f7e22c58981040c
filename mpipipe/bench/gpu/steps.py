"""Steps on a GPU: the executor, a training step of a GPT, messages between two ranks."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from mpipipe import Pipeline, arrays, nn, optim, schedules
from mpipipe.attention import Local
from mpipipe.bench.gpu.kernels import torch_with_gpu
from mpipipe.bench.pipeline import PingPong
from mpipipe.bench.timing import Row, compare, normal, seconds, seconds_behind
from mpipipe.comm import GpuAwareness, make_transport
from mpipipe.comm.transport import gpu_aware
from mpipipe.job import Communicator, group_of, runtime, settings
from mpipipe.language.models import GPT

# -- How well the executor keeps a GPU busy, with about a millisecond of work in each action ---------------------------
#
# A bare loop launches the kernels of a step's actions too. It does so as fast as the host can, to compare rates, and
# once more queued after other work, to measure the device time of nothing but the kernels.
#
# Idle share = 1 - (device time of the step's kernels run back to back) / (device time of the step).


def measure_executor(
    repeats: int = 10,
    rows: int = 4096,
    width: int = 8192,
    microbatches: int = 16,
    dtype: str = "bfloat16",
    comm: Communicator | None = None,
) -> Iterator[Row]:
    """Yield the rate of steps, and the share of their device time in which the GPU idles. `comm` has one rank."""
    stage = nn.Stage([nn.Linear(width, width)], dtype=dtype, device="cuda")
    schedule = schedules.one_f_one_b(1, microbatches)
    inputs, targets = ([normal((rows, width), dtype, seed + way) for seed in range(microbatches)] for way in (0, 1))
    kernels = nn.kernels.of("cuda")

    def bare() -> None:
        for x, target in zip(inputs, targets):
            y, saved = stage.forward(x)
            stage.backward(nn.mean_squared_error(y, target, 1 / microbatches)[1], saved)

    spans: list[float] = []
    filled: list[float] = []
    ahead: list[bool] = []
    comm = runtime.mpi().COMM_SELF if comm is None else comm
    with settings.using_graphs(False), Pipeline([stage], schedule, comm, loss=nn.mean_squared_error) as pipeline:
        for _ in range(2):
            pipeline.step(inputs, targets)
        alone = seconds(bare, repeats)
        for _ in range(repeats):  # in turns: the GPU's clock rate changes with what it did before
            pipeline.step(inputs, targets)
            clock = pipeline.engine.executor.clock
            clock.settle()
            spans.append(clock.span)
            busy, always = seconds_behind(lambda: kernels.linear(inputs[0], inputs[-1]), bare, 1)
            filled.append(busy)
            ahead.append(always)
    span, busy = median(spans), median(filled)
    what = f"{2 * microbatches} actions of {busy / (2 * microbatches) * 1e3:.2f} ms"
    peer = "the same kernels in a bare loop", 1 / alone, "at least 0.95"
    yield Row(f"executor, {what}: rate of the GPU", 1 / span, "steps/s", *peer)
    doubt = "" if all(ahead) else " (at least: the host was not ahead of the kernels alone)"
    yield Row(f"executor, {what}: GPU idle in a step{doubt}", 100 * (1 - busy / span), "%", goal="below 5")


# -- A training step of a GPT of GPT-2 small's size on one GPU, next to the same model in PyTorch ----------------------
#
# A step is that of `python -m mpipipe train`: forward, loss and backward of all micro-batches, then the norm of the
# gradients, clipping and AdamW, whose factor stays on the device and which writes the bfloat16 copy of the float32
# parameters. The embedding has its own matrix, or shares that of the output. Both that and the same tokens in small
# micro-batches are measured without CUDA graphs, too, where the host may not launch kernels as fast as the GPU computes
# them. PyTorch's peers are the eager model under autocast, and eager and compiled with bfloat16 weights with float32
# masters, all with its own attention kernel and fused AdamW.


SMALL = GPT(vocab=50304, dim=768, layers=12, heads=12, seq=1024, tied=True)  # sizes of GPT-2 small, this architecture
GOALS = {"eager": "at least 1.3", "compiled": "at least 1.0"}
WARMUP = 3
LR = 1e-4
SMALL_TOKENS = 512  # of a micro-batch


class NoGraphsError(Exception):
    """A step that was asked to run by CUDA graphs has run without them; the text says why."""


def measure_step(
    repeats: int = 10,
    model: GPT = SMALL,
    rows: int = 8,
    microbatches: int = 1,
    dtype: str = "bfloat16",
    peers: bool = True,
    comm: Communicator | None = None,
) -> Iterator[Row | str]:
    """Yield tokens per second: untied, tied, in small micro-batches; without CUDA graphs; next to each peer.

    Where no graphs are recorded, the reason comes first, and nothing is measured twice. `model` is measured with ties
    and without; `peers` have their own.
    """
    tokens = np.random.default_rng(0).integers(0, model.vocab, size=(2, rows * microbatches, model.seq))
    per_step = rows * microbatches * model.seq
    sizes = f"{microbatches} x {rows} x {model.seq} tokens"

    def rate(model: GPT, tokens: np.ndarray, microbatches: int, graphs: bool) -> float:
        return per_step / _step_seconds(repeats, model, tokens, microbatches, dtype, comm, graphs)

    rates: dict[bool, float] = {}
    graphs = True
    for tied in (False, True):
        each = replace(model, tied=tied)
        try:
            rates[tied] = rate(each, tokens, microbatches, graphs)
        except NoGraphsError as error:
            yield f"CUDA graphs are not measured: {error}"
            graphs = False
            rates[tied] = rate(each, tokens, microbatches, graphs)
        kind = f"{'tied' if tied else 'untied'}, {dtype}, {each.parameters / 1e6:.0f} M parameters"
        beside = ("untied", rates[False], "at least 0.97") if tied else ()
        yield Row(f"training step, {kind}, {sizes}", rates[tied], "tokens/s", *beside)
    ours = rates[model.tied]
    short = SMALL_TOKENS if model.seq % SMALL_TOKENS == 0 else model.seq
    pieces = tokens.reshape(2, -1, short)
    small, in_pieces = f"{pieces.shape[1]} x 1 x {short} tokens", rate(model, pieces, pieces.shape[1], graphs)
    yield Row(f"training step, {small}", in_pieces, "tokens/s", sizes, ours)
    if graphs:
        for name, whole, given, count in (
            (sizes, ours, tokens, microbatches),
            (small, in_pieces, pieces, len(pieces[0])),
        ):
            without = rate(model, given, count, False)
            yield Row(f"training step, {name}, without CUDA graphs", without, "tokens/s", "with them", whole)
    what = f"training step, {'tied' if model.tied else 'untied'}, {sizes}"
    torch = torch_with_gpu() if peers else None
    if torch is None:
        return
    from mpipipe.bench.torch_gpt import PEERS, training_step

    for name, (masters, compiled) in PEERS.items():
        step = training_step(model, tokens, microbatches, getattr(torch, dtype), masters, compiled)
        theirs = per_step / _wall(step, torch.cuda.synchronize, repeats)
        yield Row(what, ours, "tokens/s", f"PyTorch {name}", theirs, GOALS["compiled" if compiled else "eager"])
        del step
        torch.cuda.empty_cache()


def _step_seconds(
    repeats: int, model: GPT, tokens: np.ndarray, microbatches: int, dtype: str, comm: Communicator | None, graphs: bool
) -> float:
    """Return the median seconds of a step. With `graphs` raise NoGraphsError unless CUDA graphs were recorded."""
    stage = nn.Stage(model.build(Local(causal=True)), dtype=dtype, device="cuda")
    comm = runtime.mpi().COMM_SELF if comm is None else comm
    inputs, targets = tokens
    schedule = schedules.gpipe(1, microbatches)
    with settings.using_graphs(graphs), Pipeline([stage], schedule, comm, loss=nn.softmax_cross_entropy) as pipeline:
        stage.optimizer_writes_compute()
        optimizer = optim.AdamW([stage], LR)
        scaler = optim.LossScaler() if dtype == "float16" else optim.LossScaler(1.0, dynamic=False)

        def step() -> None:
            pipeline.step(inputs, targets, scale=scaler.scale)
            optim.scaled_step(optimizer, scaler, max_norm=1.0, comm=comm)

        seconds = _wall(step, arrays.stream().synchronize, repeats)
        (computes,) = (adapter.computes for adapter in pipeline.engine.partners.stages)
        if graphs and (computes.reason or not computes.recorded):
            raise NoGraphsError(computes.reason or "nothing was recorded")
        return seconds


def _wall(step: Callable[[], object], synchronize: Callable[[], object], repeats: int) -> float:
    """Return the median seconds by the host's clock: what a user waits for."""
    times = []
    for turn in range(WARMUP + repeats):
        synchronize()
        start = perf_counter()
        step()
        synchronize()
        if turn >= WARMUP:
            times.append(perf_counter() - start)
    return median(times)


# -- Messages ----------------------------------------------------------------------------------------------------------
#
# Messages between the GPUs of two ranks: by pinned host memory, and directly where MPI takes device memory.
#
# Two ranks play ping-pong through the mailbox, as in `bench transport`. Two processes on one GPU take turns on it by
# time slices, unless NVIDIA's MPS runs. Most of what is measured then is waiting for the turn, and no rate of the
# transports.


SIZES = (1 << 10, 1 << 16, 1 << 20, 1 << 24, 1 << 26)


def measure_transport(
    repeats: int = 10, sizes: Sequence[int] = SIZES, comm: Communicator | None = None
) -> Iterator[Row]:
    """Yield a row for each size and transport; collective over the two ranks of `comm` (COMM_WORLD by default)."""
    comm = runtime.resolve(comm)
    group = group_of(comm)
    verdict = gpu_aware.detect(comm)
    ways = {"staged": GpuAwareness(False, "measured")}
    if verdict.direct:
        ways["direct"] = verdict
    place = socket.gethostname(), arrays.bus_id()
    shared = len(set(group.gather("bench: the GPUs", place))) < comm.size
    note = ", by processes that take turns on one GPU: no rate of the transport" if shared else ""
    for size in sizes:
        rates = {}
        for name, way in ways.items():
            rates[name] = _rate(comm, make_transport(comm, 1, False, "cuda", way), size, repeats)
        staged = rates.pop("staged")
        yield Row(f"staged, {size} B{note}", staged, "GB/s")
        for name, rate in rates.items():
            goal = "none" if shared else "above 1 for large messages"
            yield Row(f"{name}, {size} B{note}", rate, "GB/s", "staged", staged, goal)


def _rate(comm: Communicator, transport: Any, size: int, repeats: int) -> float:
    """Return GB/s of messages of `size` bytes, and close the transport."""
    count = _turns(size)
    game = PingPong(comm, transport, normal((size // 4,), "float32"), count)
    (seconds,) = compare(comm, [game], repeats)
    transport.close()
    return 2 * count * size / seconds / 1e9


def _turns(size: int) -> int:
    return max(2, min(50, (1 << 26) // size))
