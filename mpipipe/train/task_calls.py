"""How a training calls its task, and its loss: an error names file, method, step and rows.

One thread runs the code of a user: the main thread reads the batch of a step when the step begins.
Where a task sets `read_ahead`, a thread reads one step ahead, and it has the task to itself
meanwhile:

    rank, main thread    | step 7: forwards, backwards, optimizer | validation ... | step 8 ...
    thread               | read 8 ......... |                                      | read 9 ......

The thread makes no call of MPI. A rank that comes to a step before its batch is there waits, and
the wait is counted.
"""

from __future__ import annotations

import math
import re
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from mpipipe import arrays, nn, optim
from mpipipe.adapters import ForeignLayer, as_layer, let_draw_in_turn, seeded, with_loss
from mpipipe.arrays import Tree
from mpipipe.comm import Mesh
from mpipipe.errors import ConfigError, DataError, MpipipeError, PeerError
from mpipipe.even_split import even_split
from mpipipe.job import RankGroup, ThreadTask, group_of, users_frame, wait_locally
from mpipipe.pipeline import Loss
from mpipipe.planning import LayerPlan, name_ends
from mpipipe.train.config import TaskConfig
from mpipipe.train.report import FIELDS
from mpipipe.train.shard import Shard
from mpipipe.train.task import Pair, Task

# Inputs, targets, and what `Task.begin` takes.
Reading: TypeAlias = "tuple[Any, Any, Any]"


def place_of(task: Task, method: str) -> str:
    """Return a method of a task in words: with the file, if the task was loaded from one."""
    name = f"{type(task).__name__}.{method}"
    if task.file is None:
        return name
    return f"{name} in {task.file.path.name}"


def turn_of(task: Task) -> AbstractContextManager[object]:
    """Return the lock of a task: the thread that runs code of the user holds it."""
    turn: AbstractContextManager[object] = vars(task).setdefault("_turn", threading.RLock())
    return turn


def turn(task: Task, method: str) -> AbstractContextManager[object]:
    """Return the lock of a task for a method that is code of the user: one thread runs that."""
    module: str = getattr(getattr(task, method, None), "__module__", "") or ""
    if module.startswith("mpipipe."):
        return nullcontext()
    return turn_of(task)


def call(
    task: Task,
    method: str,
    *arguments: object,
    when: str = "",
    by: Callable[..., object] | None = None,
) -> Any:
    """Call a method of a task, or `by` in its place. An error says where it was, and `when`."""
    try:
        with turn(task, method):
            return (by or getattr(task, method))(*arguments)
    except MpipipeError as error:
        # One that names a method of the task already stays as it is.
        is_named = f"{type(task).__name__}." in error.message
        of_package = type(task).__module__.startswith("mpipipe.")
        if not (is_named or of_package or isinstance(error, PeerError)):
            error.message = f"{place_of(task, method)}{when}: {error.message}"
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{place_of(task, method)}{when} raised {type(error).__name__}: {error}",
            found=line_of(error),
        ) from error


def line_of(error: BaseException) -> str | None:
    """Return the innermost line of code of the user in a traceback, in words, or the last one."""
    frames = traceback.extract_tb(error.__traceback__)
    # The first one is that of the caller here.
    if len(frames) < 2:
        return None
    frame = users_frame(frames) or frames[-1]
    return f"line {frame.lineno} of {frame.filename}: {frame.line}"


def costs_of(task: Task) -> list[float]:
    """Return the operations of each layer; ConfigError for what are no such numbers."""
    costs = call(task, "costs", by=lambda: list(map(float, task.costs())))
    count = len(task.outline)
    if len(costs) != count or not all(0 <= cost < math.inf for cost in costs):
        raise ConfigError(
            f"{place_of(task, 'costs')} returns no cost of each layer",
            found=f"{len(costs)} numbers: {costs}"[:80],
            expected=f"{count} finite numbers from 0 on, one for each layer",
        )
    return costs


def checked_rate(task: Task, step: int, config: TaskConfig) -> float:
    """Return the learning rate of a step; ConfigError for one that cannot be meant."""
    when = f"(step={step})"
    rate = call(task, "rate_at", when=when, by=lambda: float(task.rate_at(step, config)))
    if not 0 <= rate < math.inf:
        raise ConfigError(
            f"{place_of(task, 'rate_at')}{when} returns no learning rate",
            found=rate,
            expected="a finite number from 0 on",
        )
    return rate


# Attributes that an optimizer has.
OPTIMIZER = "stages", "steps", "lr", "step", "named_state"


def make_optimizer(task: Task, config: TaskConfig, stages: Sequence[nn.Stage], mesh: Mesh) -> Any:
    """Return the optimizer of the task, or the one that options name; collective."""
    replicas = None
    if config.shard_optimizer:
        replicas = mesh.replicas
    with group_of(mesh.comm).raise_together("train: the optimizer of the task"):
        optimizer = call(task, "optimizer", stages, config)
        if optimizer is not None:
            lacking = [name for name in OPTIMIZER if not hasattr(optimizer, name)]
            if lacking:
                raise ConfigError(
                    f"{place_of(task, 'optimizer')} returns no optimizer",
                    found=f"{type(optimizer).__name__} without {', '.join(lacking)}",
                    expected="one with " + ", ".join(OPTIMIZER),
                )
            if config.shard_optimizer:
                raise ConfigError(
                    "shard_optimizer, and a task with an optimizer of its own",
                    found=f"{type(task).__name__}.optimizer returns {type(optimizer).__name__}",
                    expected="None there: the optimizer that the options name is sharded",
                    remedy="leave out shard_optimizer, or let the task return None",
                )
            return optimizer
    kind: Callable[..., Any] = optim.AdamW
    if config.optimizer == "sgd":
        kind = partial(optim.SGD, momentum=config.momentum)
    return kind(
        stages, config.lr, weight_decay=config.weight_decay, groups=task.groups, replicas=replicas
    )


def make_scaler(config: TaskConfig) -> optim.LossScaler:
    """Return the scaler of the loss; a dynamic one changes it as the gradients allow."""
    scale = config.loss_scale
    if scale is None:
        scale = float(config.dtype != "float16")
    if scale == 0:
        return optim.LossScaler()
    return optim.LossScaler(scale, dynamic=False)


# -- The layers, on paper and in fact --------------------------------------------------------------


# Attributes that would be wrong without a word, or only once steps are done.
ATTRIBUTES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "unit": (lambda unit: isinstance(unit, str) and unit.isprintable(), "a word"),
    "units": (lambda units: isinstance(units, (int, float)) and units > 0, "a number above 0"),
    "per_second": (
        ("samples_per_second", "tokens_per_second").__contains__,
        "samples_per_second or tokens_per_second",
    ),
    "folders": (lambda folders: not isinstance(folders, str), "names in a tuple"),
}


def entries_of(task: Task, shard: Shard) -> list[Any]:
    """Return the list of layers of a task; collective over the ranks of the shard."""
    for name, (fits, expected) in ATTRIBUTES.items():
        value = getattr(task, name)
        if not fits(value):
            raise ConfigError(
                f"{place_of(task, name)} cannot be used", found=f"{value!r:.80}", expected=expected
            )
    with seeded(shard.seed, -1, waits=shard.comm.size > 1):
        entries = call(task, "layers", shard)
    if not isinstance(entries, (list, tuple)) or not entries:
        raise ConfigError(
            f"{place_of(task, 'layers')} returns no list of layers",
            found=f"{type(entries).__name__}, {entries!r:.80}",
            expected="a list with a layer at least",
        )
    entries = with_loss(entries, task.loss, shard.seed)
    name_ends(entries)
    return entries


def layers_of(task: Task, shard: Shard) -> list[nn.Layer]:
    """Return all layers of a task, unbound."""
    entries = entries_of(task, shard)
    return [as_layer(entry, place, shard.seed) for place, entry in enumerate(entries)]


def outline(task: Task, shard: Shard) -> list[Any]:
    """Set what the layers of a task are on paper; return the entries that stages are made of."""
    entries = entries_of(task, shard)
    task.outline = layers = []
    for place, entry in enumerate(entries):
        layer = as_layer(entry, place, shard.seed)
        layers.append(layer.forget() if isinstance(layer, ForeignLayer) else layer)
    return entries


def chain(task: Task, shard: Shard, rows: int = 1) -> Iterator[tuple[nn.Stage, Tree, Tree]]:
    """Yield each layer, bound, an input of it and its output; collective.

    ConfigError where they misfit.
    """
    x = example(task, rows, 1, shard)[0]
    values: dict[str, Tree] = {}
    for place, layer in enumerate(layers_of(task, shard)):
        stage = nn.Stage([layer], shard.dtype, shard.seed, first=place, frozen=tuple(task.freeze))
        # Also what a layer further on in the same entry takes.
        stage.names.hand_on(stage.gives)
        x = nn.handed(x, values, stage.takes)
        try:
            y = stage.forward(x, nn.Position(training=False))[0]
        except Exception as error:
            raise ConfigError(
                f"layers[{place}] from {place_of(task, 'layers')} does not take what comes to it: "
                f"{type(error).__name__}: {error}",
                found=f"{type(layer).__name__} after {shapes_of(x)}",
            ) from error
        yield stage, x, y
        x = y


def shapes_of(tree: Tree) -> str:
    """Return shapes and dtypes of what lies between two layers, without the rows."""
    leaves, structure = arrays.flatten(tree)
    shapes = ", ".join(f"{leaf.dtype}{list(leaf.shape[1:])}" for leaf in leaves)
    if structure is None:
        return shapes
    return f"{structure}: {shapes}"


# -- Batches ---------------------------------------------------------------------------------------


def where(method: str, number: int, rows: range) -> str:
    """Return the arguments of `batch` or `validation` in words."""
    name = {"batch": "step", "validation": "index"}[method]
    return f"({name}={number}, rows={rows.start}..{rows.stop - 1})"


def read(
    task: Task, method: str, number: int, rows: range, shard: Shard, microbatches: int | None = None
) -> Reading:
    """Return inputs, targets, and what comes with them; checks what this rank needs of them.

    With `microbatches` they are lists where the task gives these one by one.
    """
    if task.per_microbatch and microbatches is not None:
        readings = []
        for part in even_split(len(rows), microbatches):
            readings.append(read(task, method, number, rows[part.start : part.stop], shard))
        columns: list[Any] = [None if column[0] is None else [*column] for column in zip(*readings)]
        inputs, targets, more = columns
        return inputs, targets, more
    when = where(method, number, rows)
    place = f"{place_of(task, method)}{when}"
    # The lock is held until all is copied: another method of the task may fill the same arrays
    # again.
    with turn(task, method):
        result = call(task, method, number, rows, shard, when=when)
        if not isinstance(result, tuple) or len(result) not in (2, 3):
            kind = type(result).__name__
            if isinstance(result, tuple):
                kind = f"a tuple of {len(result)}"
            raise DataError(
                f"{place} returns no inputs and targets", found=kind, expected="(inputs, targets)"
            )
        wanted = None if task.per_microbatch else rows
        make = partial(as_batch, dtype=shard.dtype, rows=wanted)
        inputs = None
        targets = None
        if shard.reads_inputs:
            inputs = make(result[0], f"the inputs of {place}")
        if shard.reads_targets:
            targets = make(result[1], f"the targets of {place}")
    return inputs, targets, (*result, None)[2]


def example(
    task: Task, rows: int, microbatches: int, shard: Shard, most: int | None = None
) -> Pair:
    """Return inputs and targets for measurements: rows of step 0, again where it has `most`."""
    # A task may have some that need no data.
    if type(task).example is not Task.example:
        return task.example(rows, microbatches, shard)
    if task.per_microbatch and microbatches > 1:
        return read(task, "batch", 0, range(rows), shard, microbatches)[:2]
    first = range(min(rows, most or rows))
    inputs, targets, _ = read(task, "batch", 0, first, shard)
    if not task.per_microbatch:
        places = np.arange(rows) % len(first)
        inputs = arrays.mapped(lambda leaf: leaf[places], inputs)
        targets = arrays.mapped(lambda leaf: leaf[places], targets)
    return inputs, targets


def as_batch(tree: Tree, what: str, dtype: np.dtype, rows: range | None) -> Tree:
    """Copy a batch into the dtype of the training: the task may fill the same arrays again.

    Raises DataError for another number of rows, unless it may have any shapes, without `rows`, and
    for what is not finite.
    """
    try:
        leaves, structure = arrays.flatten(tree)
    except MpipipeError as error:
        raise DataError(
            f"{what} are no arrays", found=type(tree).__name__, expected="numpy arrays"
        ) from error
    if rows is None and (not leaves or 0 in leaves[0].shape[:1]):
        raise DataError(
            f"{what} are empty",
            found=", ".join(f"shape {leaf.shape}" for leaf in leaves) or "no arrays",
            expected="a row at least in the first array, such as a node of a graph",
            remedy="leave such rows out of the data, or let them count nothing: a weight of the "
            "loss says so",
        )
    copies = []
    for leaf in leaves:
        if rows is not None and (leaf.ndim == 0 or len(leaf) != len(rows)):
            raise DataError(
                f"{what} have another number of rows than was asked for",
                found=f"shape {leaf.shape}",
                expected=f"{len(rows)} along the first axis",
                remedy="return as many rows as `rows` has; a source that ends early has fewer",
            )
        kind = leaf.dtype
        if kind.kind == "f":
            kind = dtype
        on_host = isinstance(leaf, np.ndarray)
        if on_host and arrays.is_floating(leaf.dtype) and not np.isfinite(leaf.sum()):
            # A sum may be infinite by its size alone.
            bad = np.flatnonzero(~np.isfinite(leaf))
            if bad.size:
                place = f"value {bad[0]} of an array"
                if rows is not None:
                    row = rows[bad[0] * len(rows) // leaf.size]
                    place = f"row {row}, counted in the whole batch"
                raise DataError(
                    f"{what} are not finite",
                    found=f"NaN or infinity in {place}",
                    expected="numbers",
                    remedy="look at the data of this row; where values are missing, give numbers "
                    "and a mask as a tuple of targets, and let the loss use it",
                )
        copies.append(arrays.copied(leaf, kind))
    return arrays.unflatten(copies, structure)


@dataclass(eq=False)
class Reader:
    """Reads the rows of this replica."""

    task: Task
    shard: Shard
    plan: LayerPlan
    mesh: Mesh
    steps: int
    # The batch of the next step, where a thread reads it.
    ahead: ThreadTask[Reading] | None = None

    def __post_init__(self) -> None:
        begin = self.mesh.data.rank * self.plan.rows
        self.rows = range(begin, begin + self.plan.rows)
        placement = self.plan.schedule.placement
        shard = self.shard
        shard.reads_inputs = self.mesh.pipe.rank == placement[0]
        shard.reads_targets = self.mesh.pipe.rank == placement[-1]
        self.reads = shard.reads_inputs or shard.reads_targets or self.task.everywhere
        if self.task.read_ahead:
            let_draw_in_turn(turn_of(self.task))

    def batch(self, step: int) -> Pair:
        """Return the batch of a step; where the task reads ahead, begin with that of the next."""
        pair = self.pair("batch", step)
        if self.reads and self.task.read_ahead and step + 1 < self.steps:
            self.ahead = ThreadTask(partial(self._read, "batch", step + 1), "mpipipe batches")
        return pair

    def pair(self, method: str, number: int) -> Pair:
        """Return the inputs and targets of this rank that a method gives, if it needs some."""
        if not self.reads:
            return None, None
        ahead = self.ahead
        if method == "batch" and ahead is not None:
            self.ahead = None
            wait_locally(ahead.wait, f"the batch of step {number}")
            if ahead.problem is not None:
                raise ahead.problem
            inputs, targets, more = ahead.result
        else:
            inputs, targets, more = self._read(method, number)
        if more is not None:
            call(self.task, "begin", more)
        return inputs, targets

    def _read(self, method: str, number: int) -> Reading:
        """Return what the task gives of all rows of this rank."""
        try:
            return read(
                self.task, method, number, self.rows, self.shard, self.plan.schedule.microbatches
            )
        except MpipipeError as error:
            if error.rank is None:
                error.rank = self.mesh.rank
            raise


# -- The loss of a task as that of a pipeline, with the means of its metrics -----------------------


# Records, and the last line, have these names already.
RESERVED = {*FIELDS, "steps", "time", "seconds"}
NAME = re.compile(r"[^\s=]+")


class Sample(NamedTuple):
    """A micro-batch that a loss was called with, and its weight, if the loss returns one."""

    output: Any
    target: Any
    keywords: Mapping[str, object]
    weight: float | None


def elements(tree: Tree) -> int:
    """Count the numbers in the arrays of a tree."""
    return sum(leaf.size for leaf in arrays.flatten(tree)[0])


def loss_of(task: Task, shard: Shard, stage: nn.Stage, rows: int) -> Callable[..., Any]:
    """Return the loss after the last stage, for this many rows in a micro-batch."""
    return task.loss_for(stage, rows, shard) or TaskLoss(task, shard.cut is not None)


class TaskLoss:
    """The loss of a task as that of a pipeline.

    While it has `sums` it adds up the metrics of the task. While `samples` is true it remembers
    one micro-batch: the first whose weight is not 0, else the last.
    """

    # By the name of a metric, while somebody wants means: of values times weights, of weights.
    sums: Counter[tuple[str, str]] | None = None
    samples = False
    sample: Sample | None = None

    def __init__(self, task: Task, in_slices: bool = False) -> None:
        self.task = task
        # The loss is to be a mean along this axis; for whole sequences along the other one, too.
        self.axis = int(in_slices)
        self.plain = Loss(task.loss)
        self.has_metrics = getattr(task.metrics, "__func__", None) is not Task.metrics
        self.declared = getattr(task.loss, "mean_over_entries", None)
        # The pipeline looks at these, and at the names of the arguments.
        self.over_batch = self.plain.over_batch
        self.wants_host_targets = not self.plain.uploads
        self.mean_over_entries = self.declared
        if self.declared is None and not task.per_microbatch:
            self.mean_over_entries = True
        self.__signature__ = signature(task.loss)

    def __call__(self, output: Any, target: Any, **keywords: object) -> tuple[Any, ...]:
        if self.over_batch and not isinstance(output, list):
            # A measurement has one micro-batch.
            value, gradients, *more = self([output], [target], **keywords)
            return value, gradients[0], *more
        by = partial(self.evaluate, **keywords)
        result, weight = call(self.task, "loss", output, target, by=by)
        outputs = [output]
        targets = [target]
        if self.over_batch:
            outputs = output
            targets = target
        if self.samples and (self.sample is None or self.sample.weight == 0):
            # A stage may write the next output into the same memory.
            copies = [arrays.mapped(arrays.copied, tree) for tree in outputs]
            self.sample = Sample(copies if self.over_batch else copies[0], target, keywords, weight)
        if self.sums is None:
            return result
        for y, goal in zip(outputs, targets):
            share = weight
            if share is None or self.over_batch:
                share = elements(goal)
            # Nothing counts in a micro-batch without a share.
            if not share:
                continue
            for name, mean in self.metrics(y, goal).items():
                self.sums[name, "values"] += mean * share
                self.sums[name, "weights"] += share
        return result

    def evaluate(
        self, output: Any, target: object, **keywords: object
    ) -> tuple[tuple[Any, ...], float | None]:
        """Return what the loss of the task returns, and the weight in it, if there is one.

        Raises for a result that no pipeline takes.
        """
        result: tuple[Any, ...] = self.task.loss(output, target, **keywords)
        weight = self.plain.checked(result)[2]
        if weight is not None and self.declared is not None:
            raise self.weight_error("mean_over_entries, too")
        return result, weight

    def weight_error(self, found: str) -> ConfigError:
        """Return the error for a third value that is no weight."""
        return ConfigError(
            f"{place_of(self.task, 'loss')}: the third value that a loss returns is not the "
            "weight of a micro-batch",
            found=found,
            expected="how many things the value is a mean over, such as float(mask.sum()), said "
            "in one way",
            remedy="return what else is of interest from `metrics`, and two values where all "
            "entries count alike",
        )

    def metrics(self, output: Tree, target: Tree) -> dict[str, float]:
        """Return the metrics of a micro-batch by name. Raises ConfigError for other names."""
        host = partial(arrays.mapped, arrays.on_host)
        return call(self.task, "metrics", host(output), host(target), by=self._named)

    def _named(self, output: Tree, target: Tree) -> dict[str, float]:
        metrics = {}
        for name, value in self.task.metrics(output, target).items():
            if not isinstance(name, str) or not NAME.fullmatch(name) or name in RESERVED:
                raise ConfigError(
                    "the name of a metric cannot be written, or a record has it already",
                    found=f"{name!r:.80}",
                    expected="letters without spaces and =, and none of "
                    f"{', '.join(sorted(RESERVED))}",
                )
            metrics[name] = float(value)
        return metrics

    def means(self, group: RankGroup) -> dict[str, float]:
        """Return the means of the `sums` over all ranks, which end here; collective."""
        totals: Counter[tuple[str, str]] = Counter()
        for sums in group.gather("train: the metrics", self.sums):
            totals.update(sums)
        self.sums = None
        means = {}
        for (name, part), total in totals.items():
            if part == "values":
                means[name] = total / totals[name, "weights"]
        return means
