"""A training step of a GPT of GPT-2 small's size on one GPU, beside the same model in PyTorch.

A step is forward, loss and backward of all micro-batches, the norm of the gradients, clipping and AdamW; parameters
are kept in float32 and computed with in bfloat16. PyTorch's peers are the eager model under autocast, and eager and
compiled with bfloat16 weights beside float32 masters, all with its own attention kernel and fused AdamW.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from statistics import median
from time import perf_counter

import numpy as np

from mpipipe import Pipeline, arrays, nn, optim, schedules
from mpipipe.attention import Local
from mpipipe.cli.bench.gpu.attention import torch_with_gpu
from mpipipe.cli.bench.gpu.rows import Row
from mpipipe.comm import runtime
from mpipipe.comm.types import Communicator
from mpipipe.models import GPT

SMALL = GPT(vocab=50304, dim=768, layers=12, heads=12, seq=1024, tied=True)  # sizes of GPT-2 small, this architecture
GOALS = {"eager": "at least 1.0", "compiled": "aim at 1.0"}
WARMUP = 3
LR = 1e-4
QUICK = dict(repeats=3, rows=4, microbatches=2)


def measure(
    repeats: int = 10,
    model: GPT = SMALL,
    rows: int = 16,
    microbatches: int = 4,
    dtype: str = "bfloat16",
    peers: bool = True,
    comm: Communicator | None = None,
) -> Iterator[Row]:
    """Yield tokens per second, alone, beside the same with the other choice of `tied`, and beside each peer.

    Parameters
    ----------
    peers : import PyTorch where it is installed and can use the GPU
    comm : of one rank; None is COMM_SELF
    """
    tokens = np.random.default_rng(0).integers(0, model.vocab, size=(2, rows * microbatches, model.seq))
    per_step = rows * microbatches * model.seq
    ours = per_step / _ours(repeats, model, tokens, microbatches, dtype, comm)
    what = (f"training step, {dtype}, {model.parameters / 1e6:.0f} M parameters, {microbatches} x {rows} x {model.seq} "
            "tokens")  # fmt: skip
    yield Row(what, ours, "tokens/s")
    other = replace(model, tied=not model.tied)
    apart = per_step / _ours(repeats, other, tokens, microbatches, dtype, comm)
    names = [f"embedding and head {'tied' if each.tied else 'apart'}" for each in (model, other)]
    yield Row(f"{what}, {names[0]}", ours, "tokens/s", names[1], apart, "0.97 to 1.03")
    torch = torch_with_gpu() if peers else None
    if torch is None:
        return
    from mpipipe.cli.bench.torch_gpt import PEERS, training_step

    for name, (masters, compiled) in PEERS.items():
        step = training_step(model, tokens, microbatches, getattr(torch, dtype), masters, compiled)
        theirs = per_step / _wall(step, torch.cuda.synchronize, repeats)
        yield Row(what, ours, "tokens/s", f"PyTorch {name}", theirs, GOALS["compiled" if compiled else "eager"])
        del step
        torch.cuda.empty_cache()


def _ours(
    repeats: int, model: GPT, tokens: np.ndarray, microbatches: int, dtype: str, comm: Communicator | None
) -> float:
    """Return the median seconds of a step."""
    stage = nn.Stage(model.build(Local(causal=True)), dtype=dtype, device="cuda")
    optimizer = optim.AdamW([stage], LR)
    comm = runtime.mpi().COMM_SELF if comm is None else comm
    with Pipeline([stage], schedules.gpipe(1, microbatches), comm, loss=nn.softmax_cross_entropy) as pipeline:

        def step() -> None:
            pipeline.step(*tokens)
            optim.clip_by_global_norm([stage], 1.0)
            optimizer.step()

        return _wall(step, arrays.stream().synchronize, repeats)


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
