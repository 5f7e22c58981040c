"""A GPT's step next to its simulation, in slices, and next to PyTorch's."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Annotated

import numpy as np

from mpipipe import Pipeline, cut, nn, processor, schedules
from mpipipe.attention import Local, Sliced, slice_lengths
from mpipipe.attention.kernels import no_poll
from mpipipe.bench.timing import Call, Repeats, compare, on_ranks, report
from mpipipe.job import Communicator, runtime
from mpipipe.language.models import GPT
from mpipipe.options import Option
from mpipipe.text import counted

# -- `bench train`: the step of a GPT against the simulation of its measured stages ----------------
#
# Where PyTorch is installed, forward and backward of one micro-batch of the whole model on one rank
# are measured too.


WARMUP = 1
SLICED = ("one_f_one_b", "zero_bubble_h1")  # schedules of a long sequence


@on_ranks
def step(
    repeats: Repeats = 3,
    dim: int = 512,
    layers: int = 8,
    heads: int = 8,
    seq_len: int = 256,
    microbatches: int = 8,
    rows: Annotated[int, Option("sequences in a micro-batch")] = 4,
    slices: Annotated[int, Option("of one sequence, as long as those of all micro-batches")] = 8,
) -> None:
    """Compare a GPT's step with its simulation, also in slices."""
    comm = runtime.world()
    tokens = microbatches * rows * seq_len
    model = GPT(dim=dim, layers=layers, heads=heads, seq_len=seq_len)
    for name, chunks in (("one_f_one_b", 1), ("interleaved_1f1b", 2)):
        schedule = schedules.by_name(
            name, ranks=comm.size, chunks=chunks, microbatches=microbatches
        )
        ((seconds, predicted),) = _measure(comm, [(model, schedule)], microbatches * rows, repeats)
        report(
            comm,
            f"train {name} x {chunks}, {counted(comm.size, 'rank')}, {model.parameters:,} "
            "parameters",
            f"{seconds:.3f} s a step, {tokens / seconds:.0f} tokens/s, simulated {predicted:.3f} s",
            seconds / predicted,
            "at most 1.05",
        )
    long = replace(model, seq_len=2 * tokens // rows, layers=-(-layers // 2))
    plans = [(long, schedules.one_f_one_b(comm.size, 1))]
    for name in SLICED:
        schedule = schedules.by_name(name, ranks=comm.size, microbatches=1, slices=slices)
        plans.append((long, schedule))
    whole, *sliced = _measure(comm, plans, 1, repeats)
    for (_, schedule), (seconds, predicted) in zip(plans[1:], sliced):
        report(
            comm,
            f"train one sequence of {long.seq_len} positions in {counted(slices, 'slice')}, "
            f"{schedule.name}, {counted(comm.size, 'rank')}",
            f"{seconds:.3f} s a step, simulated {predicted:.3f} s, whole by 1F1B {whole[0]:.3f} s",
            whole[0] / seconds,
            "at least 1.7 on 2 ranks",
        )
    if find_spec("torch"):
        beside_torch(comm, model, rows, repeats)


def beside_torch(comm: Communicator, model: GPT, rows: int, repeats: int, threads: int = 1) -> None:
    """Report forward and backward of one micro-batch on one rank, next to PyTorch's."""
    from mpipipe.bench.torch_gpt import micro_batch

    tokens, targets = np.random.default_rng(0).integers(
        0, model.vocab, size=(2, rows, model.seq_len)
    )
    stage = nn.Stage(model.build(Local(causal=True)))

    def ours() -> None:
        with processor.threads_set_to(threads):
            output, saved = stage.forward(tokens)
            stage.backward(nn.softmax_cross_entropy(output, targets)[1], saved)

    calls: list[Call] = [no_poll, no_poll]
    if comm.rank == 0:
        calls = [ours, micro_batch(model, tokens, targets, threads)]
    took, theirs = compare(comm, calls, repeats, WARMUP)
    what = f"train, one micro-batch on one rank, {counted(threads, 'thread')}"
    report(comm, what, f"{took:.3f} s, PyTorch {theirs:.3f} s", took / theirs, "below 1")


def _measure(
    comm: Communicator, plans: Sequence[tuple[GPT, schedules.Schedule]], rows: int, repeats: int
) -> list[tuple[float, float]]:
    """Return the median seconds of a step of each plan on the slowest rank, and simulated."""
    pipelines = []
    steps = []
    with ExitStack() as stack:
        for model, schedule in plans:
            lengths = None
            attend: Local | Sliced = Local(causal=True)
            if schedule.slices > 1:
                lengths = slice_lengths(model.seq_len, schedule.slices, model.dim, unit=32)
                attend = Sliced(Local(causal=True), lengths)
            stages = cut(model.build(attend), schedule, comm.rank, costs=model.costs())
            pipeline = Pipeline(
                stages, schedule, comm, loss=nn.softmax_cross_entropy, slice_lengths=lengths
            )
            pipelines.append(stack.enter_context(pipeline))
            tokens, next_tokens = np.random.default_rng(0).integers(
                0, model.vocab, size=(2, rows, model.seq_len)
            )
            inputs = targets = None
            if stages.is_first:
                inputs = tokens
            if stages.is_last:
                targets = next_tokens
            steps.append(partial(pipeline.step, inputs, targets))
        compare(comm, steps, WARMUP, warmup=0)
        for pipeline in pipelines:
            pipeline.executor.clock.forget()
        times = compare(comm, steps, repeats, warmup=0)
        results = []
        for seconds, pipeline in zip(times, pipelines):
            simulated = schedules.simulate(pipeline.schedule, pipeline.durations())
            results.append((seconds, simulated.makespan))
    return results
