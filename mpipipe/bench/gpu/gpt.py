"""A training step of a GPT of GPT-2 small's size on one GPU, beside the same model in PyTorch.

A step is that of `python -m mpipipe train`: forward, loss and backward of all micro-batches, then the norm of the
gradients, clipping and AdamW, whose factor stays on the device and which writes the bfloat16 copy of the float32
parameters. The embedding has its own matrix, or shares that of the output; and
the same tokens come in micro-batches so small that the host may not launch kernels as fast as the GPU computes them.
PyTorch's peers are the eager model under autocast, and eager and compiled with bfloat16 weights beside float32 masters,
all with its own attention kernel and fused AdamW.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from statistics import median
from time import perf_counter

import numpy as np

from mpipipe import Pipeline, arrays, nn, optim, schedules
from mpipipe.attention import Local
from mpipipe.bench.gpu.attention import torch_with_gpu
from mpipipe.bench.gpu.rows import Row
from mpipipe.job import runtime, settings
from mpipipe.job.types import Communicator
from mpipipe.language.models import GPT

SMALL = GPT(vocab=50304, dim=768, layers=12, heads=12, seq=1024, tied=True)  # sizes of GPT-2 small, this architecture
GOALS = {"eager": "at least 1.3", "compiled": "at least 1.0"}
WARMUP = 3
LR = 1e-4
SMALL_TOKENS = 512  # of a micro-batch
QUICK = dict(repeats=3)


class NoGraphsError(Exception):
    """A step that was asked to run by CUDA graphs has run without them; the text says why."""


def measure(
    repeats: int = 10,
    model: GPT = SMALL,
    rows: int = 8,
    microbatches: int = 1,
    dtype: str = "bfloat16",
    peers: bool = True,
    comm: Communicator | None = None,
) -> Iterator[Row | str]:
    """Yield tokens per second: untied, tied, in small micro-batches without and with CUDA graphs, and beside each peer.

    Where no graphs were recorded, the reason stands in the place of their row.

    Parameters
    ----------
    model : of any ties; it is measured with and without
    peers : import PyTorch where it is installed and can use the GPU; they have the ties of `model`
    comm : of one rank; None is COMM_SELF
    """
    tokens = np.random.default_rng(0).integers(0, model.vocab, size=(2, rows * microbatches, model.seq))
    per_step = rows * microbatches * model.seq
    sizes = f"{microbatches} x {rows} x {model.seq} tokens"
    rates: dict[bool, float] = {}
    for tied in (False, True):
        each = replace(model, tied=tied)
        rates[tied] = per_step / _ours(repeats, each, tokens, microbatches, dtype, comm)
        kind = f"{'tied' if tied else 'untied'}, {dtype}, {each.parameters / 1e6:.0f} M parameters"
        what = f"training step, {kind}, {sizes}"
        if tied:
            yield Row(what, rates[True], "tokens/s", "untied", rates[False], "at least 0.97")
        else:
            yield Row(what, rates[False], "tokens/s")
    ours = rates[model.tied]
    short = SMALL_TOKENS if model.seq % SMALL_TOKENS == 0 else model.seq
    pieces = tokens.reshape(2, -1, short)
    for graphs, how, goal in ((False, "", ""), (True, ", CUDA graphs", "at least 0.8")):
        what = f"training step, {pieces.shape[1]} x 1 x {short} tokens{how}"
        try:
            rate = per_step / _ours(repeats, model, pieces, pieces.shape[1], dtype, comm, graphs)
        except NoGraphsError as error:
            yield f"{what} is not measured: {error}"
        else:
            yield Row(what, rate, "tokens/s", sizes, ours, goal)
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


def _ours(
    repeats: int,
    model: GPT,
    tokens: np.ndarray,
    microbatches: int,
    dtype: str,
    comm: Communicator | None,
    graphs: bool = False,
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
