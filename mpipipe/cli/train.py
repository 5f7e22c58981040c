"""mpipipe train: its flags are the fields of TrainConfig."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Timer
from typing import Annotated, Any

from mpipipe import processor, schedules
from mpipipe.cli.flags import fields_of, parameters_of
from mpipipe.cli.output import refusing, show
from mpipipe.errors import ConfigError
from mpipipe.job import group_of, launcher_size, run_or_abort, share_of_cores, stop_signals
from mpipipe.language import estimate
from mpipipe.language.models import GPT
from mpipipe.options import Option
from mpipipe.planning import RankBytes, SavedProfile, shown_seconds
from mpipipe.text import counted, shown_bytes, text_table
from mpipipe.train import INSTEAD, MemoryEstimate, TrainConfig, predicted, warn
from mpipipe.train import train as run_training

Config = Annotated[str | None, Option("TOML file with any of the keys below", metavar="FILE")]


def train(
    config: Config = None,
    dry_run: Annotated[bool, Option("train nothing: show the plan, and the memory of each rank")] = False,
    ranks: Annotated[int | None, Option("of a dry run in one process; default: those of one replica")] = None,
    profile: Annotated[
        str | None, Option("of `plan --save-profile`: a dry run says how long a step takes", metavar="FILE")
    ] = None,
    **flags: Any,
) -> int:
    """Train a GPT on text or tokens (mpiexec -n 4 python -m mpipipe train --out runs/first).

    The keys of the file given by --config are the flags without leading dashes, and with _ for -. Flags win over keys.
    """

    def work() -> None:
        processor.prepare_process(share_of_cores())
        group, chosen = group_of(), None
        with group.raise_together("train: reading the configuration"):
            check_alone(ranks, profile)
            if group.rank == 0:
                chosen = TrainConfig.load(config, **flags)
        chosen = group.broadcast("train: the configuration", chosen)
        stop_signals.change(chosen.preempt_signals)
        run_training(chosen, GPT)

    if dry_run:
        return print_estimate(lambda: TrainConfig.load(config, **flags), ranks, profile)
    return run_or_abort(work)


FIELDS = fields_of(TrainConfig)
train.parameters = [*parameters_of(train), *FIELDS]  # type: ignore[attr-defined]
train.other_names, train.instead = TrainConfig.other_names, INSTEAD  # type: ignore[attr-defined]


# -- What `train --dry-run` shows: the plan of a training, and the memory of each rank --------------------------------


MOST_RANKS = 1 << 16
ANNOUNCED = 2.0  # seconds of silence
COLUMNS = ("parameters", "gradients", "moments", "activations", "messages", "scratch", "later", "process", "total")


def print_estimate(load: Callable[[], TrainConfig], ranks: int | None, profile: str | None = None) -> int:
    """Show what a training would be: on `ranks` ranks in one process without MPI, or on the ranks of this job.

    With a profile, which `mpipipe plan --save-profile` has written, also how long a step would take.
    """
    if launcher_size(os.environ) is not None:
        return run_or_abort(lambda: _in_job(load, ranks, profile))
    with refusing():
        if ranks is not None and not 1 <= ranks <= MOST_RANKS:
            raise ConfigError("--ranks is out of range", found=ranks, expected=f"at least 1, at most {MOST_RANKS:,}")
        config = load()
        _show(config, ranks or (config.pipe or 1) * config.seq, profile)
    return 0


def _in_job(load: Callable[[], TrainConfig], ranks: int | None, profile: str | None) -> None:
    group = group_of()
    with group.raise_together("train: the dry run"):
        if ranks not in (None, group.size):
            raise ConfigError(
                "--ranks is for a dry run in one process",
                found=f"--ranks {ranks}, {counted(group.size, 'rank')} in this job",
                expected=f"none, or {group.size}",
                remedy="start it without mpiexec or srun",
            )
        config = load()
        if group.rank == 0:
            _show(config, group.size, profile)


def _show(config: TrainConfig, ranks: int, profile: str | None) -> None:
    processor.prepare_process()
    saved = None if profile is None else SavedProfile.read(Path(profile))
    with _announced(ranks):
        found = estimate(config, GPT, ranks)
    lines = [described(found)]
    if saved is not None:
        seconds = predicted(found, saved).seconds
        lines.append(
            f"a step takes {shown_seconds(seconds)}, {config.batch * config.seq_len / seconds:,.0f} tokens/s, "
            f"by {profile} (measured on a pipeline of {counted(saved.ranks, 'rank')})"
        )
        problem = found.problem
        lines += saved.doubts(problem.ranks, problem.replicas * problem.seq, found.plan.microbatch_rows, linked=False)
    show("".join(f"{line}\n" for line in lines))


@contextmanager
def _announced(ranks: int) -> Iterator[None]:
    """Say what is going on, where the work inside takes long: many ranks have long orders."""
    line = f"mpipipe: a step of {counted(ranks, 'rank')} is being rehearsed on paper; with thousands it takes minutes"
    timer = Timer(ANNOUNCED, warn, [line])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def check_alone(ranks: int | None, profile: str | None) -> None:
    """Raise ConfigError if --ranks or --profile is given to a training that really runs."""
    if profile is not None:
        raise ConfigError("--profile without --dry-run", found=f"--profile {profile}", remedy="add --dry-run")
    if ranks is not None:
        raise ConfigError(
            "--ranks without --dry-run",
            found=f"--ranks {ranks}",
            remedy="a training runs on the ranks that mpiexec or srun starts; --dry-run shows one on so many ranks",
        )


def described(found: MemoryEstimate) -> str:
    """Return all lines."""
    config, plan, problem = found.config, found.plan, found.problem
    schedule = plan.schedule
    count, total = found.count, sum(rank.total for rank in found.ranks)
    rows, length = plan.microbatch_rows, -(-found.task.units // config.seq)
    times = [sum(problem.costs[start:stop]) for start, stop in plan.layer_ranges]
    bubble = schedules.simulate(schedule, schedules.Costs(times, times, times)).bubble_fraction
    lines = [
        f"mpipipe: nothing is trained. {counted(count, 'rank')} = "
        f"pipe {problem.ranks} x data {problem.replicas} x seq {problem.seq}; "
        f"{schedule.name}, {counted(schedule.stages, 'stage')}, {counted(schedule.microbatches, 'micro-batch')}",
        f"mpipipe: {found.parameters:,} parameters, {config.dtype}, {config.optimizer}; "
        f"a micro-batch is {rows} x {length} on each rank",
        f"mpipipe: bubble {bubble:.3f} if a layer takes as long as its operations are many",
        "",
        "MiB (2^20 bytes) of each rank of a pipeline at its peak",
    ]
    cuts = [" ".join(f"{start}-{stop - 1}" for start, stop in each.stages.values()) for each in found.ranks]
    cells = [[str(each.rank), cut, *_sizes(each)] for each, cut in zip(found.ranks, cuts)]
    lines += text_table(["rank", "layers", *COLUMNS], cells, left=(1,))
    worst = max(found.ranks, key=lambda each: each.total)
    whole = f"; all {count} ranks: {shown_bytes(total * problem.replicas * problem.seq)}" if count > 1 else ""
    return "\n".join([*lines, "", f"rank {worst.rank} takes most: {shown_bytes(worst.total)}{whole}"])


def _sizes(each: RankBytes) -> list[str]:
    sizes = vars(each) | {
        "scratch": each.scratch + each.tables + each.batch,
        "later": max(0, each.sample - each.step, each.sums - each.step),
        "total": each.total,
    }
    return [f"{sizes[name] / 2**20:.1f}" for name in COLUMNS]
