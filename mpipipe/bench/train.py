"""Trainings next to their predictions: a GPT's step, the plans of the planner, the memory of a dry run."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import mean, median
from typing import Annotated, Any

import numpy as np

from mpipipe import Pipeline, arrays, cut, nn, optim, processor, schedules
from mpipipe.attention import Local, Sliced, slice_lengths
from mpipipe.bench.timing import Repeats, compare, on_ranks, report
from mpipipe.cli import Operand, show
from mpipipe.comm import Mesh
from mpipipe.job import Communicator, group_of, runtime
from mpipipe.language import TextTask, estimate
from mpipipe.language.models import GPT, balanced_slices
from mpipipe.options import Option
from mpipipe.planning import (
    Choice,
    MeasuredRanks,
    PlanReport,
    Profile,
    Space,
    cuts_by_time,
    find_plan,
    in_words,
    peak,
    predict,
    shown_seconds,
    trial_steps,
)
from mpipipe.text import counted
from mpipipe.train import TrainConfig, measured_ranks, train

# -- `bench train`: the step of a GPT against what the simulation makes of its measured stages, for two schedules ------
#
# Where PyTorch is installed, forward and backward of one micro-batch of the whole model on one rank are measured too.


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
    """A GPT's step against its simulation, and in slices (mpiexec -n 2 python -m mpipipe bench train)."""
    comm, tokens = runtime.world(), microbatches * rows * seq_len
    model = GPT(dim=dim, layers=layers, heads=heads, seq=seq_len)
    for name, chunks in (("one_f_one_b", 1), ("interleaved_1f1b", 2)):
        schedule = schedules.by_name(name, ranks=comm.size, chunks=chunks, microbatches=microbatches)
        ((seconds, predicted),) = _measure(comm, [(model, schedule)], microbatches * rows, repeats)
        report(
            comm,
            f"train {name} x {chunks}, {counted(comm.size, 'rank')}, {model.parameters:,} parameters",
            f"{seconds:.3f} s a step, {tokens / seconds:.0f} tokens/s, simulated {predicted:.3f} s",
            seconds / predicted,
            "at most 1.05",
        )
    long = replace(model, seq=2 * tokens // rows, layers=-(-layers // 2))
    in_slices = [schedules.by_name(name, ranks=comm.size, microbatches=1, slices=slices) for name in SLICED]
    plans = [schedules.one_f_one_b(comm.size, 1), *in_slices]
    whole, *sliced = _measure(comm, [(long, schedule) for schedule in plans], 1, repeats)
    for schedule, (seconds, predicted) in zip(in_slices, sliced):
        even = schedules.simulate(plans[0]).makespan * slices / schedules.simulate(schedule).makespan
        report(
            comm,
            f"train one sequence of {long.seq} positions in {counted(slices, 'slice')}, {schedule.name}, "
            f"{counted(comm.size, 'rank')}",
            f"{seconds:.3f} s a step, simulated {predicted:.3f} s, whole by 1F1B {whole[0]:.3f} s",
            whole[0] / seconds,
            f"at least 1.7 on 2 ranks: {even:.2f} without any cost of slices",
        )
    vocabulary = GPT(vocab=128_000, dim=256, layers=4, heads=8, seq=128)
    over_all = replace(vocabulary, head_slices=balanced_slices(vocabulary, comm.size))
    schedule = schedules.one_f_one_b(comm.size, microbatches)
    whole, over = _measure(comm, [(each, schedule) for each in (vocabulary, over_all)], 2 * microbatches, repeats)
    report(
        comm,
        f"train with {vocabulary.vocab:,} tokens, the head in {counted(over_all.head_slices, 'slice')}",
        f"{over[0]:.3f} s a step, simulated {over[1]:.3f} s, the best cut of whole layers {whole[0]:.3f} s",
        whole[0] / over[0],
        "at least 1.25",
    )
    _sharded(comm, replace(model, layers=2), rows, repeats)
    if find_spec("torch"):
        beside_torch(comm, model, rows, repeats)


def beside_torch(comm: Communicator, model: GPT, rows: int, repeats: int, threads: int = 1) -> None:
    """Report forward and backward of one micro-batch on one rank, next to PyTorch's."""
    from mpipipe.bench.torch_gpt import micro_batch

    tokens, targets = np.random.default_rng(0).integers(0, model.vocab, size=(2, rows, model.seq))
    stage = nn.Stage(model.build(Local(causal=True)))

    def ours() -> None:
        with processor.threads_set_to(threads):
            output, saved = stage.forward(tokens)
            stage.backward(nn.softmax_cross_entropy(output, targets)[1], saved)

    group = group_of(comm)
    alone = group.split(comm.rank, 0, "bench")
    if comm.rank == 0:
        times = compare(alone, [ours, micro_batch(model, tokens, targets, threads)], repeats, WARMUP)
        measured = f"{times[0]:.3f} s, PyTorch {times[1]:.3f} s"
        what = f"train, one micro-batch on one rank, {counted(threads, 'thread')}"
        report(comm, what, measured, times[0] / times[1], "below 1")
    group.agree("bench: the end of the comparison with PyTorch")
    alone.Free()


def _sharded(comm: Communicator, model: GPT, rows: int, repeats: int) -> None:
    """Report a step of replicas that have a share of the optimizer's state each, next to one with all of it on each."""
    group, schedule = group_of(comm), schedules.one_f_one_b(1, 1)
    alone = group.split(comm.rank, 0, "bench")
    inputs, targets = np.random.default_rng(comm.rank).integers(0, model.vocab, size=(2, rows, model.seq))
    with ExitStack() as pipelines:

        def one(replicas: Communicator | None) -> Callable[[], None]:
            stage = nn.Stage(model.build(Local(causal=True)))
            loss = nn.softmax_cross_entropy
            pipeline = pipelines.enter_context(Pipeline([stage], schedule, alone, loss=loss, replicas=comm))
            optimizer = optim.AdamW([stage], lr=1e-4, replicas=replicas)

            def step() -> None:
                pipeline.step(inputs, targets)
                optim.scaled_step(optimizer, optim.LossScaler(1.0, dynamic=False), max_norm=1.0)

            return step

        whole, shares = compare(comm, [one(None), one(comm)], repeats, WARMUP)
    report(
        comm,
        f"train {counted(comm.size, 'replica')} of {model.parameters:,} parameters, each with a share of the state",
        f"{shares:.3f} s a step, all of it on each {whole:.3f} s",
        shares / whole,
        "at most 1.03",
    )
    alone.Free()


def _measure(
    comm: Communicator, plans: Sequence[tuple[GPT, schedules.Schedule]], rows: int, repeats: int
) -> list[tuple[float, float]]:
    """Return the median seconds of a step on the slowest rank, and of its simulation, for each plan, in turns."""
    group = group_of(comm)
    with ExitStack() as pipelines:
        made = [_pipeline(comm, model, schedule, rows, pipelines) for model, schedule in plans]
        times: list[list[float]] = [[] for _ in made]
        for turn in range(WARMUP + repeats):
            for (pipeline, batch, _), own in zip(made, times):
                if turn == WARMUP:
                    pipeline.engine.executor.clock.settle()
                    pipeline.engine.executor.clock.totals.clear()
                group.agree("bench: the start of a step")
                pipeline.step(*batch)
                own.append(max(group.gather("bench: the seconds of a step", pipeline.elapsed)))
        simulated = [schedules.simulate(cut_to, pipeline.durations()).makespan for pipeline, _, cut_to in made]
    return [(median(own[WARMUP:]), span) for own, span in zip(times, simulated)]


def _pipeline(
    comm: Communicator, model: GPT, schedule: schedules.Schedule, rows: int, pipelines: ExitStack
) -> tuple[Pipeline, tuple[Any, Any], schedules.Schedule]:
    """Return a pipeline, its batch on this rank, and its schedule."""
    lengths = slice_lengths(model.seq, schedule.slices, model.dim, unit=32) if schedule.slices > 1 else None
    attend = Local(causal=True) if lengths is None else Sliced(Local(causal=True), lengths)
    of_labels = model.head_slices > 1
    stages = cut(model.build(attend, labels=of_labels), schedule, comm.rank, costs=model.costs())
    tokens = np.random.default_rng(0).integers(0, model.vocab, size=(2, rows, model.seq))
    inputs = None
    if stages.is_first:
        inputs = arrays.Branches(tokens[0], labels=tokens[1]) if of_labels else tokens[0]
    loss = nn.mean_of_losses if of_labels else nn.softmax_cross_entropy
    pipeline = Pipeline(stages, stages.schedule, comm, loss=loss, slice_lengths=lengths)
    return pipelines.enter_context(pipeline), (inputs, tokens[1] if stages.is_last else None), stages.schedule


# -- `bench plan`: predicted steps against real ones, for plans drawn at random ----------------------------------------
#
# The speed of a shared machine changes from second to second. So the steps of each plan alternate with those of the
# chosen plan, and their ratio is measured. The time of a plan is its median ratio, times the median step of the chosen
# plan in the whole run. Noise is how far the turns of one plan are apart: half of the plans have a smaller spread.


PLAN_PAIRS = 3  # in each turn of a plan: its steps, between those of the chosen plan
PLAN_STEPS = 2  # in a row
MOVED = 2  # layers that may lie elsewhere than in the cut by time


@on_ranks
def plan(
    configurations: Annotated[int, Option("plans drawn at random", least=1)] = 40,
    repeats: Repeats = 5,
    seed: Annotated[int, Option("of the drawing")] = 0,
    dim: int = 128,
    layers: int = 6,
    heads: int = 8,
    seq_len: int = 128,
    batch: Annotated[int, Option("sequences in a step")] = 16,
) -> None:
    """Predicted steps of plans against real ones (mpiexec -n 2 python -m mpipipe bench plan)."""
    with group_of().raise_together("bench: the configuration"):
        sizes: Any = dict(dim=dim, layers=layers, heads=heads, seq_len=seq_len, batch=batch)
        config = TrainConfig(**sizes, plan="auto", device="cpu")
    run_plan(configurations, repeats, seed, config)


def run_plan(configurations: int, repeats: int, seed: int, config: TrainConfig) -> None:
    """Print each plan, the errors of predictions, and whether the chosen plan is the fastest of all."""
    comm = runtime.world()
    with Mesh(comm, pipe=comm.size) as mesh:
        measured = measured_ranks(config, TextTask(config, GPT), mesh)
        problem = measured.problem
        plans = find_plan(measured, "cpu")
        drawn = [] if comm.rank else draw(plans, problem.space, configurations, Random(seed))
        choices = group_of(comm).broadcast("bench: the plans", drawn)
        turns = measure_plans(measured, choices, repeats, Random(seed))
        if comm.rank == 0:
            predicted = [predict(plans.profile, each, problem.rows, problem.trained_layers).seconds for each in choices]
            _report_plans(comm, plans, choices, predicted, turns)


def measure_plans(
    measured: MeasuredRanks, choices: Sequence[Choice], repeats: int, random: Random
) -> list[list[float]]:
    """Return seconds of a step for each plan and turn; the first plan is the one that all others alternate with."""
    ratios: dict[Choice, list[float]] = {choice: [] for choice in choices[1:]}
    seconds: list[float] = []
    with trial_steps(measured, choices[0]) as first:
        for _ in range(repeats):
            for choice in random.sample(choices[1:], len(choices) - 1):
                before, between = [mean(first.steps(PLAN_STEPS))], []
                with trial_steps(measured, choice) as other:
                    for _ in range(PLAN_PAIRS):
                        between.append(mean(other.steps(PLAN_STEPS)))
                        before.append(mean(first.steps(PLAN_STEPS)))
                ratios[choice].append(median(2 * b / (a + c) for b, (a, c) in zip(between, pairwise(before))))
                seconds += before
    typical = median(seconds)
    return [[typical], *([ratio * typical for ratio in ratios[choice]] for choice in choices[1:])]


def draw(found: PlanReport, space: Space, count: int, random: Random) -> list[Choice]:
    """Return the chosen plan, and others drawn at random, no two alike."""
    drawn = [found.choice]
    for _ in range(100 * count):
        if len(drawn) > count:
            break
        choice = _drawn(found.profile, space, random)
        if choice not in drawn:
            drawn.append(choice)
    return drawn


def _drawn(profile: Profile, space: Space, random: Random) -> Choice:
    name, chunks = random.choice(space.forms)
    microbatches = random.choice(space.microbatches)
    size, placement = -(-space.rows // microbatches), Choice(name, chunks, microbatches, ()).placement(space.ranks)
    partition = list(random.choice(cuts_by_time(profile, size, placement)))
    for _ in range(random.randint(0, MOVED)):
        giver, taker = random.choice(range(len(partition))), random.choice(range(len(partition)))
        if abs(giver - taker) == 1 and partition[giver] > 1:
            partition[giver] -= 1
            partition[taker] += 1
    choice = Choice(name, chunks, microbatches, tuple(partition))
    return replace(choice, recompute=True) if random.random() < 0.2 else choice


def _report_plans(
    comm: Communicator,
    found: PlanReport,
    choices: Sequence[Choice],
    predicted: Sequence[float],
    turns: list[list[float]],
) -> None:
    measured, spreads = [median(each) for each in turns], [(max(each) - min(each)) / median(each) for each in turns]
    errors, noise = [abs(guess / real - 1) for guess, real in zip(predicted, measured)], median(spreads)
    lines = [
        f"plan {choice.schedule} x {choice.chunks}, {choice.microbatches} micro-batches, layers "
        f"{','.join(map(str, choice.partition))}, run again {choice.recomputation}: {shown_seconds(real)} a step, "
        f"predicted {shown_seconds(guess)}, error {guess / real - 1:+.1%}, spread {spread:.1%}"
        for real, guess, spread, choice in sorted(zip(measured, predicted, spreads, choices), key=lambda each: each[0])
    ]
    behind = measured[0] / min(measured) - 1
    verdict = "the fastest" if behind == 0 else "within noise of the fastest" if behind <= noise else "not the fastest"
    lines += [
        f"plan: {len(choices)} configurations on {comm.size} ranks: error {median(errors):.1%} median, "
        f"{max(errors):.1%} worst (2 % and 4 % with a core for each rank); noise {noise:.1%}",
        f"plan: chosen {in_words(found.plans[0])}",
        f"plan: measured {shown_seconds(measured[0])}, {behind:.1%} behind the fastest: {verdict}",
        *([f"plan: {found.oversubscribed}"] if found.oversubscribed else []),
    ]
    show("\n".join(lines) + "\n")


# -- `bench dry-run`: the memory that `train --dry-run` foresees against what a training takes, rank by rank -----------
#
# Both are the peak of resident memory. Such a training must be the first one of a process: what an earlier one has left
# behind is taken again.


MIB = 2**20


@on_ranks
def dry_run(config: Annotated[Path, Operand("TOML file with keys of train")]) -> None:
    """Memory foreseen by train --dry-run against a training (mpiexec -n 4 python -m mpipipe bench dry-run job.toml)."""
    comm = runtime.world()
    group = group_of(comm)
    with group.raise_together("bench: reading the configuration"):
        chosen = TrainConfig.load(str(config))
        memory = estimate(chosen, GPT, comm.size) if comm.rank == 0 else None
    folder = group.broadcast("bench: a folder", tempfile.mkdtemp() if comm.rank == 0 else None)
    try:
        train(replace(chosen, steps=2, out=str(Path(folder, "run"))), GPT, comm)
        peaks = group.gather("bench: the peaks", peak())
    finally:
        if comm.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
    if memory is not None:
        for rank, measured in enumerate(peaks):
            pipe_rank = rank // (memory.problem.replicas * memory.problem.seq)
            foreseen = memory.ranks[pipe_rank].total
            show(
                f"dry run, rank {rank}: foreseen {foreseen / MIB:.1f} MiB, measured {measured / MIB:.1f} MiB, "
                f"ratio {foreseen / measured:.3f} (within 0.9 ... 1.1)\n"
            )
    group.agree("bench: the end")
