"""mpipipe train: its flags are the fields of TrainConfig; of TaskFileConfig for a task."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from typing import Annotated

from mpipipe import processor, schedules
from mpipipe.cli.flags import Argument, Operand, parameters_of
from mpipipe.cli.output import on_ranks, refusing, show, show_lines
from mpipipe.errors import ConfigError
from mpipipe.job import Communicator, group_of, inprocess, runtime, stop_signals
from mpipipe.language import TextTask
from mpipipe.language.models import GPT
from mpipipe.options import Option
from mpipipe.planning import ORDERS, RankBytes, read_links, seconds_of_orders
from mpipipe.schedules import FORM, Links
from mpipipe.text import counted, shown_bytes, shown_seconds, text_table
from mpipipe.train import (
    MemoryEstimate,
    Task,
    TaskConfig,
    TaskFileConfig,
    TrainConfig,
    check_same_config,
    check_task,
    estimate_task,
    key_of,
    kinds_of,
    load_task,
    option_of,
    read_keys,
    run,
)

# On paper.
MOST_RANKS = 1 << 16
TaskFile = Annotated[
    str | None, Operand("file with a task of your own, and its class", metavar="FILE.py[:CLASS]")
]
Config = Annotated[str | None, Option("TOML file with any of the keys below", metavar="FILE")]
NicsPerNode = Annotated[
    int | None,
    Option("network cards that the ranks of a node share: count messages that wait", least=1),
]
Nic = Annotated[
    str | None,
    Option(f"one of these, in s and bytes/s: {FORM}; or the first of these", metavar="NUMBERS"),
]


def train(
    config: Config = None,
    task: TaskFile = None,
    dry_run: Annotated[
        bool, Option("train nothing: show the plan, and the memory of each rank")
    ] = False,
    ranks: Annotated[
        int | None,
        Option(
            "ranks of a dry run in one process; default: those of one replica",
            least=1,
            most=MOST_RANKS,
        ),
    ] = None,
    nics_per_node: NicsPerNode = None,
    nic: Nic = None,
    flops: Annotated[
        float, Option("for a dry run: operations per second of a rank", above=0)
    ] = 1e14,
    check: Annotated[
        bool,
        Option(
            "train nothing: compare each backward of the task with its forward, in float64 "
            "whatever --dtype is"
        ),
    ] = False,
    **flags: object,
) -> int:
    """Train a GPT on text or tokens, or the task in FILE.py.

    An example: mpiexec -n 4 python -m mpipipe train --out runs/first. The keys of the file given by
    --config are the flags without leading dashes, and with _ for -. Flags win over keys. The
    options of data and model are for text; a task in a file has its own.
    """
    check_task_file(task)
    load = partial(load_config, task, config, **flags)

    def work() -> None:
        group = group_of()
        with group.raise_together("train: its options"):
            for name, value in (("ranks", ranks), ("nics-per-node", nics_per_node), ("nic", nic)):
                if value is None:
                    continue
                raise ConfigError(
                    f"--{name} without --dry-run",
                    found=f"--{name} {value}",
                    remedy="a training runs on the ranks that mpiexec or srun starts; --dry-run "
                    "shows one on others",
                )
        chosen = group.from_one("train: the configuration", load)
        stop_signals.change(chosen.preempt_signals)
        chosen, trained = task_of(chosen, runtime.world())
        run(trained, chosen)

    if check:
        return print_check(load)
    if dry_run:
        return print_estimate(load, ranks, partial(described, nics_per_node, nic, flops))
    return on_ranks(work)()


def print_check(load: Callable[[], TaskConfig]) -> int:
    """Check the gradients of the layers and of the loss of a task, in one process."""
    with refusing("--check"):
        config = load()
        if not isinstance(config, TaskFileConfig):
            raise ConfigError(
                "--check is for a task of your own", remedy="name its file: train FILE.py --check"
            )

        def work(comm: Communicator) -> tuple[list[str], bool]:
            task = load_task(str(config.task), config.set, comm)
            return check_task(task, config.seed, comm, rows=min(2, config.batch))

        lines, right = inprocess.run(1, work)[0]
    result = "failed"
    if right:
        result = "ok"
    lines.append(f"mpipipe: check {result} in float64")
    show_lines(lines)
    return int(not right)


def check_task_file(task: str | None) -> None:
    """Raise Stop for what is no name of a file with a task."""
    if task is not None and not task.partition(":")[0].endswith(".py"):
        remedy = "train takes a Python file; --data names text"
        if task.endswith(".toml"):
            remedy = f"--config {task} names a file with a configuration"
        with refusing():
            raise ConfigError(
                f"there is no place for {task}",
                expected="nothing, or FILE.py or FILE.py:CLASS with a task of your own",
                remedy=remedy,
            )


def load_config(task: str | None, config: str | None, **flags: object) -> TaskConfig:
    """Return the configuration of the task that is named here or in a file, or of text."""
    keys = read_keys(config)
    if task is None and "task" not in keys:
        return TrainConfig.load(config, **flags)
    others = []
    for entry in fields(TrainConfig):
        if entry.name not in GENERAL:
            others.append(key_of(entry))
    for name in (*keys, *flags):
        option = name.rstrip("_")
        if option in others and flags.get(name, 0) is not None:
            raise ConfigError(
                f"{option} is an option of text, and a task in a file has its own",
                found=f"{option} and the task {task or keys['task']}",
                expected="options of any training: `mpipipe train --help` lists them first",
                remedy="let it be an attribute of the task, which --set NAME=VALUE changes",
            )
    return TaskFileConfig.load(config, task=task, **flags)


def task_of(config: TaskConfig, comm: Communicator) -> tuple[TaskConfig, Task]:
    """Return the configuration with what its task says, and the task; collective."""
    check_same_config(group_of(comm), config)
    if isinstance(config, TaskFileConfig):
        return config, load_task(str(config.task), config.set, comm)
    assert isinstance(config, TrainConfig)
    task = TextTask.of(config, GPT, comm)
    return task.config, task


def fields_of(config: type) -> list[Argument]:
    """Return the fields of a configuration as parameters, under the headings of its parts."""
    kinds = kinds_of(config)
    headings: dict[str, str] = {}
    for part in reversed(config.__mro__):
        if "heading" in vars(part):
            for entry in fields(part):
                headings.setdefault(entry.name, vars(part)["heading"])
    parameters = []
    for entry in fields(config):
        option = replace(option_of(entry), group=headings[entry.name])
        kind = kinds[entry.name]
        many = kind is tuple
        parameters.append(Argument(entry.name, str if many else kind, many, entry.default, option))
    return parameters


# The help lists these before those of text.
_OF_ANY = [entry for entry in fields_of(TaskFileConfig) if entry.name != "task"]
GENERAL = {entry.name for entry in _OF_ANY}
FIELDS = [*_OF_ANY, *(entry for entry in fields_of(TrainConfig) if entry.name not in GENERAL)]
train.parameters = [*parameters_of(train), *FIELDS]  # type: ignore[attr-defined]


# -- What `train --dry-run` shows: the plan of a training, and the memory of each rank -------------


NOTABLE = 0.02  # share of a time
COLUMNS = (
    "parameters",
    "gradients",
    "moments",
    "activations",
    "messages",
    "scratch",
    "later",
    "process",
    "total",
)


def check_nics(nics_per_node: int | None, nic: str | None) -> None:
    """Raise ConfigError for network cards without their number."""
    if nic is not None and nics_per_node is None:
        raise ConfigError(
            "--nic without --nics-per-node",
            found=f"--nic {nic}",
            remedy="say how many of them a node has",
        )


def print_estimate(
    load: Callable[[], TaskConfig], ranks: int | None, describe: Callable[[MemoryEstimate], str]
) -> int:
    """Show what a training would be, on `ranks` ranks or on those of one replica."""
    with refusing("--dry-run"):
        config = load()
        processor.prepare_process()
        ranks = ranks or (config.pipe or 1) * config.seq
        show(f"{describe(estimate_task(partial(task_of, config), ranks))}\n")
    return 0


def described(
    nics_per_node: int | None, nic: str | None, flops: float, estimate: MemoryEstimate
) -> str:
    """Return the plan of a training, and a table of the memory of each rank, as lines."""
    check_nics(nics_per_node, nic)
    config = estimate.config
    plan = estimate.plan
    problem = estimate.problem
    schedule = plan.schedule
    pipelines = problem.replicas * problem.seq
    count = problem.ranks * pipelines
    rows = plan.microbatch_rows
    units = estimate.task.units
    size = counted(rows, "row")
    if units > 1:
        size = f"{rows} x {-(-units // config.seq)}"
    times = [sum(problem.costs[start:stop]) for start, stop in plan.layer_ranges]
    bubble = schedules.simulate(schedule, schedules.Costs(times, times, times)).bubble_fraction
    lines = [
        f"mpipipe: nothing is trained. {counted(count, 'rank')} = "
        f"pipe {problem.ranks} x data {problem.replicas} x seq {problem.seq}; "
        f"{schedule.name}, {counted(schedule.stages, 'stage')}, {schedule.batch}",
        f"mpipipe: {estimate.task.parameters_in_words()}, {config.dtype}, {config.optimizer}; "
        f"a micro-batch is {size} on each rank",
        f"mpipipe: bubble {bubble:.1%}, estimated from operation counts",
    ]
    if nics_per_node is not None:
        links = read_links(nics_per_node, nic)
        lines += sharing_lines(estimate, links, flops)
    lines += ["", "MiB (2^20 bytes) of each rank of a pipeline at the peak of its resident memory"]
    cells = []
    for memory in estimate.ranks:
        cuts = [f"{start}-{stop - 1}" for start, stop in memory.layers]
        cells.append([str(memory.rank), " ".join(cuts), *_sizes(memory)])
    lines += text_table(["rank", "layers", *COLUMNS], cells, left=(1,))
    worst = max(estimate.ranks, key=lambda memory: memory.total)
    last = f"rank {worst.rank} takes most: {shown_bytes(worst.total)}"
    if count > 1:
        total = sum(memory.total for memory in estimate.ranks) * pipelines
        last += f"; all {count} ranks: {shown_bytes(total)}"
    return "\n".join([*lines, "", last])


def sharing_lines(estimate: MemoryEstimate, links: Links, flops: float) -> list[str]:
    """Say what a step takes with each order of the axes, where ranks share network cards."""
    if type(estimate.task).costs is Task.costs:
        raise ConfigError(
            "--nics-per-node for a task that does not say its operations",
            found=f"{type(estimate.task).__name__} without costs",
            remedy="let costs() return the operations of the forward of each layer, for one of "
            "its units",
        )
    problem = estimate.problem
    plan = estimate.plan
    schedule = plan.schedule
    if estimate.config.recompute:
        schedule = schedules.before_backwards(schedule)
    positions = plan.microbatch_rows * estimate.task.units / problem.seq
    speed = flops / positions
    times = []
    for start, stop in plan.layer_ranges:
        times.append(sum(problem.costs[start:stop]) / speed / schedule.slices)
    costs = schedules.Costs(
        times,
        times,
        times,
        message_bytes=[size / schedule.slices for size in estimate.ranks[0].inputs],
        gradient_bytes=problem.gradient_bytes(plan.layer_ranges),
    )
    alone = seconds_of_orders(schedule, costs, replace(links, nic_ranks=1), problem.shape)
    shared = seconds_of_orders(schedule, costs, links, problem.shape)
    lines = [
        f"mpipipe: {links.nic_ranks} of the {links.node_size} ranks of a node share a network card "
        f"of {links.bandwidth:g} bytes/s;",
        f"mpipipe: with {flops:g} operations a second on each rank, without the optimizer,",
        "mpipipe: and without rings of attention, a step takes (if no message waited):",
    ]
    for order, seconds in shared.items():
        line = f"mpipipe:   {shown_seconds(seconds)}"
        if seconds > (1 + NOTABLE) * alone[order]:
            line += f" ({shown_seconds(alone[order])})"
        lines.append(f"{line} with {ORDERS[order]} on a node")
    best = min(shared, key=shared.__getitem__)
    if max(shared.values()) > (1 + NOTABLE) * shared[best]:
        lines += launch_lines(best, links)
    return lines


def launch_lines(order: str, links: Links) -> list[str]:
    """Say how ranks are placed so that what this order keeps together is on one node."""
    return [
        f"mpipipe: place {ORDERS[order]} on a node: --mesh-order {order} and",
        f"mpipipe: srun --distribution=block, or mpiexec --map-by ppr:{links.node_size}:node "
        f"(MPICH: -ppn {links.node_size})",
    ]


def _sizes(memory: RankBytes) -> list[str]:
    sizes = vars(memory) | {
        "scratch": memory.scratch + memory.batch,
        "later": memory.later,
        "total": memory.total,
    }
    return [f"{sizes[name] / 2**20:.1f}" for name in COLUMNS]
