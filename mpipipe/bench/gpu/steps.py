"""Steps on a GPU: the executor, and a training step of a GPT."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from math import gcd
from statistics import median
from time import perf_counter
from unittest.mock import patch

import numpy as np

from mpipipe import Pipeline, arrays, nn, optim, schedules
from mpipipe.attention import Local
from mpipipe.bench.timing import Row, normal, seconds
from mpipipe.job import Communicator, settings
from mpipipe.language.models import GPT
from mpipipe.pipeline import StageGraphs

# -- How well the executor keeps a GPU busy, with about a millisecond of work in each action -------
#
# A bare loop launches the kernels of a step's actions too, as fast as the host can.


def measure_executor(
    repeats: int = 10,
    rows: int = 4096,
    width: int = 8192,
    microbatches: int = 16,
    dtype: str = "bfloat16",
    *,
    comm: Communicator,
) -> Iterator[Row]:
    """Yield the rate of steps, next to the bare loop. `comm` has one rank."""
    stage = nn.Stage([nn.Linear(width, width)], dtype=dtype, device="cuda")
    schedule = schedules.one_f_one_b(1, microbatches)
    inputs = [normal((rows, width), dtype, seed) for seed in range(microbatches)]
    targets = [normal((rows, width), dtype, seed + 1) for seed in range(microbatches)]

    def bare() -> None:
        for x, target in zip(inputs, targets):
            y, saved = stage.forward(x)
            stage.backward(nn.mean_squared_error(y, target, 1 / microbatches)[1], saved)

    spans: list[float] = []
    with (
        patch.dict(os.environ, {settings.GRAPHS.name: "0"}),
        Pipeline([stage], schedule, comm, loss=nn.mean_squared_error) as pipeline,
    ):
        for _ in range(2):
            pipeline.step(inputs, targets)
        alone = seconds(bare, repeats)
        for _ in range(repeats):
            pipeline.step(inputs, targets)
            clock = pipeline.executor.clock
            clock.settle()
            spans.append(clock.span)
    span = median(spans)
    what = f"{2 * microbatches} actions of {alone / (2 * microbatches) * 1e3:.2f} ms"
    peer = "the same kernels in a bare loop", 1 / alone, "at least 0.95"
    yield Row(f"executor, {what}: rate of the GPU", 1 / span, "steps/s", *peer)


# -- A training step of a GPT of GPT-2 small's size on one GPU, next to the same model in PyTorch --
#
# A step is that of `python -m mpipipe train`: forward, loss and backward of all micro-batches, then
# the norm of the gradients, clipping and AdamW, whose factor stays on the device and which writes
# the bfloat16 copy of the float32 parameters. The embedding has its own matrix, or shares that of
# the output. Both that and the same tokens in small micro-batches are measured without CUDA graphs,
# too, where the host may not launch kernels as fast as the GPU computes them. PyTorch's peers are
# the eager model under autocast, and eager and compiled with bfloat16 weights with float32 masters,
# all with its own attention kernel and fused AdamW.


# Sizes of GPT-2 small, this architecture.
SMALL = GPT(vocab=50304, dim=768, layers=12, heads=12, seq_len=1024, tied=True)
WARMUP = 3
LR = 1e-4
SMALL_TOKENS = 512  # tokens of a micro-batch
TIES = ("untied", "tied")


class NoGraphsError(Exception):
    """A step that was asked to run by CUDA graphs has run without them; the text says why."""


def measure_step(
    repeats: int = 10,
    model: GPT = SMALL,
    rows: int = 8,
    microbatches: int = 1,
    dtype: str = "bfloat16",
    peers: bool = True,
    *,
    comm: Communicator,
) -> Iterator[Row | str]:
    """Yield tokens per second of several kinds of steps, next to each peer.

    Where no graphs are recorded, the reason comes first, and nothing is measured twice. `model` is
    measured with ties and without; `peers` have their own.
    """
    tokens = np.random.default_rng(0).integers(
        0, model.vocab, size=(2, rows * microbatches, model.seq_len)
    )
    per_step = rows * microbatches * model.seq_len
    sizes = f"{microbatches} x {rows} x {model.seq_len} tokens"

    def rate(model: GPT, tokens: np.ndarray, microbatches: int, graphs: bool) -> float:
        return per_step / _step_seconds(repeats, model, tokens, microbatches, dtype, comm, graphs)

    rates: dict[bool, float] = {}
    graphs = True
    for tied in (False, True):
        variant = replace(model, tied=tied)
        try:
            rates[tied] = rate(variant, tokens, microbatches, graphs)
        except NoGraphsError as error:
            yield f"CUDA graphs are not measured: {error}"
            graphs = False
            rates[tied] = rate(variant, tokens, microbatches, graphs)
        size = f"{dtype}, {variant.parameters / 1e6:.0f} M parameters, {sizes}"
        row = Row(f"training step, {TIES[tied]}, {size}", rates[tied], "tokens/s")
        if tied:
            row = replace(row, peer="untied", peer_value=rates[False], goal="at least 0.97")
        yield row
    ours = rates[model.tied]
    short = gcd(model.seq_len, SMALL_TOKENS)
    pieces = tokens.reshape(2, -1, short)
    small = f"{pieces.shape[1]} x 1 x {short} tokens"
    in_pieces = rate(model, pieces, pieces.shape[1], graphs)
    yield Row(f"training step, {small}", in_pieces, "tokens/s", sizes, ours)
    if graphs:
        for name, whole, batch, count in (
            (sizes, ours, tokens, microbatches),
            (small, in_pieces, pieces, len(pieces[0])),
        ):
            without = rate(model, batch, count, False)
            yield Row(
                f"training step, {name}, without CUDA graphs",
                without,
                "tokens/s",
                "with them",
                whole,
            )
    what = f"training step, {TIES[model.tied]}, {sizes}"
    if not peers or not find_spec("torch"):
        return
    import torch

    from mpipipe.bench.torch_gpt import PEERS, training_step

    if not torch.cuda.is_available():
        return
    for name, (masters, compiled, goal) in PEERS.items():
        step = training_step(model, tokens, microbatches, getattr(torch, dtype), masters, compiled)
        theirs = per_step / _wall(step, torch.cuda.synchronize, repeats)
        yield Row(what, ours, "tokens/s", f"PyTorch {name}", theirs, goal)
        del step
        torch.cuda.empty_cache()


def _step_seconds(
    repeats: int,
    model: GPT,
    tokens: np.ndarray,
    microbatches: int,
    dtype: str,
    comm: Communicator,
    graphs: bool,
) -> float:
    """Return the median seconds of a step; NoGraphsError if `graphs` were not recorded."""
    stage = nn.Stage(model.build(Local(causal=True)), dtype=dtype, device="cuda")
    inputs, targets = tokens
    schedule = schedules.gpipe(1, microbatches)
    with (
        patch.dict(os.environ, {settings.GRAPHS.name: str(int(graphs))}),
        Pipeline([stage], schedule, comm, loss=nn.softmax_cross_entropy) as pipeline,
    ):
        stage.optimizer_writes_compute()
        optimizer = optim.AdamW([stage], LR)
        scaler = optim.LossScaler(1.0, dynamic=False)

        def step() -> None:
            pipeline.step(inputs, targets, scale=scaler.scale)
            optim.scaled_step(optimizer, scaler, max_norm=1.0, comm=comm)

        seconds = _wall(step, arrays.stream().synchronize, repeats)
        (attached,) = pipeline.executor.stages
        if graphs:
            runner = attached.runner
            assert isinstance(runner, StageGraphs)
            if runner.reason or not runner.recorded:
                raise NoGraphsError(runner.reason or "nothing was recorded")
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
