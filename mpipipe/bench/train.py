"""`bench train`: the step of a GPT against what the simulation makes of its measured stages, for two schedules.

Where PyTorch is installed, forward and backward of one micro-batch of the whole model on one rank stand beside it.
"""

from __future__ import annotations

from importlib.util import find_spec
from statistics import median

import numpy as np

from mpipipe import Pipeline, nn, schedules
from mpipipe.attention import Local
from mpipipe.bench.timing import compare, report
from mpipipe.job import runtime
from mpipipe.job.group import group_of
from mpipipe.job.types import Communicator
from mpipipe.language.models import GPT
from mpipipe.text import counted

WARMUP = 1


def run(repeats: int, dim: int, layers: int, heads: int, seq_len: int, microbatches: int, rows: int) -> None:
    """Print seconds a step, tokens/s, and the ratio to the simulated step, for 1F1B and interleaved 1F1B."""
    comm = runtime.world()
    model = GPT(dim=dim, layers=layers, heads=heads, seq=seq_len)
    for name, chunks in (("one_f_one_b", 1), ("interleaved_1f1b", 2)):
        schedule = schedules.by_name(name, ranks=comm.size, chunks=chunks, microbatches=microbatches)
        seconds, predicted = _measure(comm, model, schedule, microbatches * rows, repeats)
        tokens = microbatches * rows * seq_len
        report(
            comm,
            f"train {name} x {chunks}, {counted(comm.size, 'rank')}, {model.parameters:,} parameters",
            f"{seconds:.3f} s a step, {tokens / seconds:.0f} tokens/s, simulated {predicted:.3f} s",
            seconds / predicted,
            "at most 1.05",
        )
    if find_spec("torch"):
        _beside_torch(comm, model, rows, repeats)


def _beside_torch(comm: Communicator, model: GPT, rows: int, repeats: int) -> None:
    """Report forward and backward of one micro-batch on one rank, beside PyTorch's."""
    from mpipipe.bench.torch_gpt import micro_batch

    tokens, targets = np.random.default_rng(0).integers(0, model.vocab, size=(2, rows, model.seq))
    stage = nn.Stage(model.build(Local(causal=True)))

    def ours() -> None:
        output, saved = stage.forward(tokens)
        stage.backward(nn.softmax_cross_entropy(output, targets)[1], saved)

    group = group_of(comm)
    alone = group.split(comm.rank, 0, "bench")
    if comm.rank == 0:
        times = compare(alone, [ours, micro_batch(model, tokens, targets)], repeats, WARMUP)
        report(
            comm,
            "train, one micro-batch on one rank",
            f"{times[0]:.3f} s, PyTorch {times[1]:.3f} s",
            times[0] / times[1],
            "below 1",
        )
    group.agree("bench: the end of the comparison with PyTorch")
    alone.Free()


def _measure(
    comm: Communicator, model: GPT, schedule: schedules.Schedule, rows: int, repeats: int
) -> tuple[float, float]:
    """Return the median seconds of a step on the slowest rank, and of its simulation.

    The simulation takes the mean times of this run's stages.
    """
    layer_ranges = schedules.partition(model.costs(), schedule.stages)
    layers = model.build(Local(causal=True))
    own = [layer_ranges[number] for number in schedule.stages_of(comm.rank)]
    stages = [nn.Stage(layers[start:stop], first=start) for start, stop in own]
    tokens = np.random.default_rng(0).integers(0, model.vocab, size=(2, rows, model.seq))
    inputs = tokens[0] if schedule.placement[0] == comm.rank else None
    targets = tokens[1] if schedule.placement[-1] == comm.rank else None
    times: list[float] = []
    group = group_of(comm)
    with Pipeline(stages, schedule, comm, loss=nn.softmax_cross_entropy) as pipeline:
        for turn in range(WARMUP + repeats):
            if turn == WARMUP:
                pipeline.engine.executor.clock.settle()
                pipeline.engine.executor.clock.totals.clear()
            group.agree("bench: the start of a step")
            pipeline.step(inputs, targets)
            times.append(max(group.gather("bench: the seconds of a step", pipeline.elapsed)))
        costs = pipeline.durations()
    return median(times[WARMUP:]), schedules.simulate(schedule, costs).makespan
