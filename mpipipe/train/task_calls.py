"""How a training calls its task: an error names file, method, step and rows; and batches are read one step ahead.

    rank, main thread    | step 7: forwards, backwards, optimizer | step 8 ...
    thread               | read 8 ......... |                     | read 9 ......

The thread makes no call of MPI. A rank that comes to a step before its batch is there waits, and the wait is counted.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from inspect import signature
from time import perf_counter
from typing import Any

import numpy as np

from mpipipe import arrays, nn
from mpipipe.adapters import ForeignLayer, as_layer, seeded
from mpipipe.arrays import Tree
from mpipipe.comm import Mesh
from mpipipe.errors import ArgumentError, ConfigError, DataError, MpipipeError, PeerError, StageError
from mpipipe.job import Communicator, RankGroup, ThreadTask, found_by_all, group_of, wait_locally
from mpipipe.pipeline import Loss, Pipeline
from mpipipe.planning import LayerPlan, PlanningProblem, name_ends
from mpipipe.train.shard import Shard
from mpipipe.train.task import Pair, Task
from mpipipe.train.task_check import alike, check_mean, check_metric, check_ranks, check_row, misnamed, rows_twice, traits


def place_of(task: Task, method: str) -> str:
    """Return a method of a task in words: with the file, if the task was loaded from one."""
    name = f"{type(task).__name__}.{method}"
    return name if task.file is None else f"{name} in {task.file.path.name}"


def call(
    task: Task,
    method: str,
    *arguments: Any,
    when: str = "",
    named: Mapping[str, Any] | None = None,
    by: Callable[..., Any] | None = None,
) -> Any:
    """Call a method of a task, or `by`, which does for it. An error says where it is: `when` is the step, and the rows.

    An error that names a method of the task already stays as it is.
    """
    try:
        return (by or getattr(task, method))(*arguments, **named or {})
    except MpipipeError as error:
        own = not type(task).__module__.startswith("mpipipe.") and f"{type(task).__name__}." not in error.message
        if own and not isinstance(error, PeerError):
            error.message = f"{place_of(task, method)}{when}: {error.message}"
        raise
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)[1:]
        file = "" if task.file is None else str(task.file.path)
        last = next((frame for frame in reversed(frames) if frame.filename == file), frames[-1] if frames else None)
        raise ConfigError(
            f"{place_of(task, method)}{when} raised {type(error).__name__}: {error}",
            found=None if last is None else f"line {last.lineno} of {last.filename}: {last.line}",
        ) from error


# -- The layers, on paper and in fact ---------------------------------------------------------------------------------


def entries_of(task: Task, shard: Shard, seed: int) -> list[Any]:
    """Return the list of layers of a task; collective over the ranks of the shard."""
    with seeded(seed, -1, waits=shard.comm.size > 1):
        entries = call(task, "layers", shard)
    if not isinstance(entries, (list, tuple)) or not entries:
        raise ConfigError(
            f"{place_of(task, 'layers')} returns no list of layers",
            found=f"an empty {type(entries).__name__}" if entries in ([], ()) else type(entries).__name__,
            expected="a list with a layer at least",
        )
    name_ends(entries)
    return list(entries)


def layers_of(task: Task, shard: Shard, seed: int) -> list[nn.Layer]:
    """Return all layers of a task, unbound."""
    return [as_layer(entry, place, seed) for place, entry in enumerate(entries_of(task, shard, seed))]


def outline(task: Task, shard: Shard, seed: int) -> list[Any]:
    """Set what the layers of a task are on paper; return the list of its layers, from which stages are made."""
    entries = entries_of(task, shard, seed)
    with_place = (as_layer(entry, place, seed) for place, entry in enumerate(entries))
    task.outline = [layer.forget() if isinstance(layer, ForeignLayer) else layer for layer in with_place]
    return entries


def chain(task: Task, shard: Shard, seed: int, rows: int = 1) -> Iterator[tuple[nn.Stage, Tree]]:
    """Yield each layer by itself, bound, and an input of it with these rows; collective over the ranks of the shard.

    Raises ConfigError where a layer does not take what the one before it returns.
    """
    x = example(task, rows, 1, shard)[0]
    values: dict[str, Tree] = {}
    for place, layer in enumerate(layers_of(task, shard, seed)):
        stage = nn.Stage([layer], shard.dtype, seed, first=place, frozen=tuple(task.freeze))
        stage.hand_on(stage.gives)  # also what a layer further on in the same entry takes
        x = nn.handed(x, values, stage.takes)
        yield stage, x
        try:
            x = stage.forward(x, nn.Position(training=False))[0]
        except Exception as error:
            raise ConfigError(
                f"layers[{place}] from {place_of(task, 'layers')} does not take what comes to it: "
                f"{type(error).__name__}: {error}",
                found=f"{type(layer).__name__} after {shapes_of(x)}",
            ) from error


def check_task(task: Task, again: Task, seed: int, comm: Communicator, rows: int = 2) -> tuple[list[str], bool]:
    """Look for what goes wrong without a word: gradients of layers and loss, rows that are not the same twice.

    Return lines of what was found, and whether all is right. `comm` is one rank, and `again` the task loaded once more.
    Gradients are compared with differences in float64, for a batch of `rows`.
    """
    shard = task.shard(comm, 1)
    shard.dtype = arrays.dtype("float64")
    lines, right, output = _check_rows(task, again, range(rows), shard), True, None
    for place, (stage, x) in enumerate(chain(task, shard, seed, rows)):
        layer = stage.layers[0]
        name = type(layer.given if isinstance(layer, ForeignLayer) else layer).__name__
        line, fine = _checked(f"layers[{place}] {name}", stage, x, nn.Position())
        lines.append(line)
        right, output = right and fine, (stage, x)
    assert output is not None  # a task has a layer at least
    y, target = output[0].forward(output[1], nn.Position(training=False))[0], example(task, rows, 1, shard)[1]
    loss = TaskLoss(task)
    line, fine = _checked("loss", _LossStage(loss, target), y, None)
    if fine:
        loss.rehearses = loss.collects = True
        loss(y, target)
    return [*lines, line], right and fine


def _check_rows(task: Task, again: Task, rows: range, shard: Shard) -> list[str]:
    """Return lines about the rows of a task; raises DataError where they are not the same twice."""
    lines, seen = [], {}
    for method, number in (("batch", 0), ("batch", 1), ("validation", 0)):
        found = read(task, method, number, rows, shard)[:2]
        check_batch(task, method, number, rows, shard, found)
        both = [(0, row_traits(each, method, number, shard)) for each in (task, again)]
        check_ranks(f"{place_of(task, method)}, with the file loaded twice,", both)
        seen[method, number] = both[0][1]["inputs"]
    first = seen["batch", 0]
    for (method, number), more in seen.items():
        if (method, number) != ("batch", 0) and first is not None and more is not None and alike(first, more):
            lines.append(f"note: {method}({number}) has the same first row as batch(0)")
    return [*lines, *(f"note: {line}" for line in misnamed(type(task), Task))]


def _checked(name: str, stage: Any, x: Tree, position: nn.Position | None) -> tuple[str, bool]:
    try:
        differences = nn.check_gradients(stage, x, position=position)
    except StageError as error:
        return f"{name}: {error.found}", False
    except ArgumentError as error:
        if "nothing to differentiate" not in error.message:
            raise
        return f"{name}: nothing to differentiate", True
    return f"{name}: right to {max(differences.values()):.0e} ({', '.join(differences)})", True


class _LossStage:
    """A loss as a stage whose output is the value: its backward gives the gradient of what the loss is called with."""

    def __init__(self, loss: TaskLoss, target: Tree) -> None:
        self.loss, self.target = loss, target

    def forward(self, x: Tree) -> tuple[np.ndarray, Tree]:
        value, gradient = self.loss(x, self.target)[:2]
        return np.reshape(np.asarray(value, np.float64), 1), gradient

    def backward(self, dy: np.ndarray, saved: Tree) -> Tree:
        leaves, structure = arrays.flatten(saved)
        return arrays.unflatten([dy[0] * leaf for leaf in leaves], structure)


def shapes_of(tree: Tree) -> str:
    """Return shapes and dtypes of what lies between two layers, without the rows."""
    leaves, structure = arrays.flatten(tree)
    named = ", ".join(f"{leaf.dtype}{list(leaf.shape[1:])}" for leaf in leaves)
    return named if structure is None else f"{structure}: {named}"


def agree_on_layers(task: Task, problem: PlanningProblem, group: RankGroup) -> None:
    """Raise MismatchError on all ranks where they have different layers; collective."""
    group.agree(
        "train: the layers",
        (("layers", len(problem.layers)), *((f"layer {n}", text) for n, text in enumerate(problem.signatures))),
        message=f"the ranks have different layers from {place_of(task, 'layers')}",
        remedy="make the list of layers of what is the same on all ranks; a layer may use shard.rank, not its shapes",
    )


# -- The loss ---------------------------------------------------------------------------------------------------------


class TaskLoss:
    """The loss of a task as that of a pipeline, and the sums of its metrics while `collects` is true.

    While it `rehearses`, a third value is checked: the weight of a micro-batch with each row twice is twice as large.
    """

    def __init__(self, task: Task) -> None:
        self.task, self.plain, self.collects, self.rehearses = task, Loss(task.loss), False, False
        self.declared = getattr(task.loss, "mean_over_entries", None)
        self.mean_over_entries = self.declared is None or self.declared  # else a weight says it
        self.over_batch = bool(getattr(task.loss, "over_batch", False))
        self.sums: dict[str, np.ndarray] = {}
        self.entries: list[int] = []  # of each array of the targets, where these count
        self.__signature__ = signature(task.loss)  # by which the pipeline knows whether it takes a factor

    def __call__(self, output: Any, target: Any, **factor: float) -> Any:
        """Return what the loss of the task returns."""
        if self.over_batch and not isinstance(output, list):  # of a measurement, which has one micro-batch
            value, gradient, *weight = self([output], [target], **factor)
            return value, gradient[0], *weight
        result = call(self.task, "loss", output, target, named=factor, by=self._evaluate)
        if self.collects:
            for y, goal in zip(output, target) if self.over_batch else [(output, target)]:
                entries = sum(leaf.size for leaf in arrays.flatten(goal)[0])
                weight = result[2] if len(result) == 3 and not self.over_batch else entries
                if not weight:  # nothing is valid here
                    continue
                for name, value in call(self.task, "metrics", y, goal, by=self._metrics).items():
                    self.sums[name] = self.sums.get(name, np.zeros(2)) + np.array([value * weight, weight])
        return result

    def _metrics(self, output: Tree, target: Tree) -> dict[str, float]:
        found = {name: float(value) for name, value in self.task.metrics(output, target).items()}
        if self.rehearses:
            twice = self.task.metrics(rows_twice(output), rows_twice(target))
            for name, value in found.items():
                check_metric(place_of(self.task, "metrics"), name, value, twice[name])
        return found

    def _evaluate(self, output: Any, target: Any, **factor: float) -> Any:
        result = self.task.loss(output, target, **factor)
        checked = self.plain.checked(result)
        weight = checked[2]
        if self.rehearses and weight != 0:
            Loss.scaled(result[1], 1.0, output)
        if weight is None:
            if self.rehearses and self.declared is None and not self.over_batch:
                self.entries = [leaf.size for leaf in arrays.flatten(target)[0]]
        elif self.rehearses or self.declared is not None:
            self._check_weight(weight, output, target, factor)
        if self.rehearses and not self.over_batch and weight != 0:
            check_mean(place_of(self.task, "loss"), checked, partial(self._again, factor), output, target)
        return result

    def _again(self, factor: Mapping[str, float], output: Any, target: Any) -> Any:
        return self.plain.checked(self.task.loss(output, target, **factor))

    def _check_weight(self, weight: float, output: Any, target: Any, factor: Mapping[str, float]) -> None:
        """Raise ConfigError for a third value that another attribute contradicts, or that counts nothing."""
        found, doubled = "mean_over_entries, too", weight
        if self.declared is None:
            pair = ([*each, *each] if self.over_batch else rows_twice(each) for each in (output, target))
            doubled = float(self.task.loss(*pair, **factor)[2])  # type: ignore[misc]
            found = f"{weight}, and {doubled} with each row twice"
        if self.declared is not None or not math.isclose(doubled, 2 * weight, rel_tol=1e-2):
            raise ConfigError(
                "the third value that a loss returns is not the weight of a micro-batch",
                found=found,
                expected="how many things the value is a mean over, such as float(mask.sum()), said in one way",
                remedy="return what else is of interest from `metrics`, and two values where all entries count alike",
            )

    def means(self, group: RankGroup) -> dict[str, float]:
        """Return the means of all ranks since the last call; collective."""
        total: dict[str, np.ndarray] = {}
        for part in group.gather("train: the metrics", self.sums):
            for name, both in part.items():
                total[name] = total.get(name, np.zeros(2)) + both
        self.sums = {}
        return {name: float(value / weight) for name, (value, weight) in total.items()}


def scores_of(task: Task, loss: Any) -> TaskLoss | None:
    """Return the loss where a validation collects the metrics of a task by it."""
    return loss if isinstance(loss, TaskLoss) and type(task).metrics is not Task.metrics else None


# -- Batches ----------------------------------------------------------------------------------------------------------


def where(method: str, number: int, rows: range) -> str:
    """Return the arguments of `batch` or `validation` in words."""
    return f"({'step' if method == 'batch' else 'index'}={number}, rows={rows.start}..{rows.stop - 1})"


def read(task: Task, method: str, number: int, rows: range, shard: Shard) -> tuple[Any, Any, Any]:
    """Return inputs, targets, and what comes with them, from `batch` or `validation`; checks what this rank needs."""
    when = where(method, number, rows)
    found = call(task, method, number, rows, shard, when=when)
    if not isinstance(found, tuple) or len(found) not in (2, 3):
        kind = f"a tuple of {len(found)}" if isinstance(found, tuple) else type(found).__name__
        raise DataError(
            f"{place_of(task, method)}{when} returns no inputs and targets", found=kind, expected="(inputs, targets)"
        )
    whose = f" of {place_of(task, method)}{when}"
    inputs = as_batch(found[0], rows, f"the inputs{whose}", shard) if shard.reads_inputs else None
    targets = as_batch(found[1], rows, f"the targets{whose}", shard) if shard.reads_targets else None
    return inputs, targets, found[2] if len(found) == 3 else None


def check_batch(task: Task, method: str, number: int, rows: range, shard: Shard, found: Pair) -> None:
    """Raise DataError where the last row of a batch, asked for alone, is another one."""
    last = rows[-1:]
    for whole, alone in zip(found, read(task, method, number, last, shard)):
        check_row(f"{place_of(task, method)}", last[0], whole, alone)


def row_traits(task: Task, method: str, number: int, shard: Shard) -> dict[str, Any]:
    """Return the traits of the inputs and targets of row 0, as far as a task gives them on this rank."""
    found = call(task, method, number, range(1), shard, when=f" for row 0 of {number}")
    return dict(zip(("inputs", "targets"), map(traits, found)))


def example(task: Task, rows: int, microbatches: int, shard: Shard, most: int | None = None) -> Pair:
    """Return inputs and targets as they may come, for measurements: those of step 0, again where it has `most` rows."""
    if type(task).example is not Task.example:
        return task.example(rows, microbatches, shard)
    pair = read(task, "batch", 0, range(min(rows, most or rows)), shard)[:2]
    return (_repeated(pair[0], rows), _repeated(pair[1], rows)) if most is not None and rows > most else pair


def _repeated(tree: Tree, rows: int) -> Tree:
    leaves, structure = arrays.flatten(tree)
    return arrays.unflatten([leaf[np.arange(rows) % len(leaf)] for leaf in leaves], structure)


def as_batch(tree: Tree, rows: range, what: str, shard: Shard) -> Tree:
    """Return a batch with floating arrays in the dtype of the training.

    Raises DataError where it has another number of rows than was asked for, or is not finite.
    """
    try:
        leaves, structure = arrays.flatten(tree)
    except MpipipeError as error:
        raise DataError(f"{what} are no arrays", found=type(tree).__name__, expected="numpy arrays") from error
    for leaf in leaves:
        if leaf.ndim == 0 or len(leaf) != len(rows):
            raise DataError(
                f"{what} have another number of rows than was asked for",
                found=f"shape {leaf.shape}",
                expected=f"{len(rows)} along the first axis",
                remedy="return as many rows as `rows` has; a source that ends early has fewer",
            )
        if arrays.is_floating(leaf.dtype) and not arrays.is_device(leaf) and not np.isfinite(leaf.sum()):
            bad = [row for row, values in zip(rows, leaf) if not np.isfinite(values).all()]
            if bad:
                raise DataError(f"{what} are not finite", found=f"NaN or infinity in row {bad[0]}", expected="numbers")
    cast = [leaf.astype(shard.dtype if leaf.dtype.kind == "f" else leaf.dtype, "C", copy=False) for leaf in leaves]
    return arrays.unflatten(cast, structure)


class Reader:
    """Reads the rows of this replica, one step ahead; `waited` are the seconds in which the last step waited for it."""

    def __init__(self, task: Task, shard: Shard, plan: LayerPlan, mesh: Mesh, steps: int) -> None:
        self.task, self.shard, self.steps, self.waited = task, shard, steps, 0.0
        begin = mesh.data.rank * plan.rows
        self.rows = range(begin, begin + plan.rows)
        placement, rank = plan.schedule.placement, mesh.pipe.rank
        shard.reads_inputs, shard.reads_targets = rank == placement[0], rank == placement[-1]
        self.reads = shard.reads_inputs or shard.reads_targets or task.everywhere
        self.number = -1  # the step that is being read
        self.ahead: ThreadTask[tuple[Any, Any, Any]] | None = None  # the thread that reads it
        self.rank, self.kinds = mesh.rank, ""  # shapes and dtypes of the rows that this rank reads

    def batch(self, step: int) -> Pair:
        """Return the batch of a step, and begin to read that of the next one."""
        start = perf_counter()
        if not self.reads:
            return None, None
        self.begin(step)
        assert self.ahead is not None
        task, self.ahead = self.ahead, None
        wait_locally(task.wait, f"the batch of step {step}")
        self.waited = perf_counter() - start
        if task.problem is not None:
            problem = task.problem
            if isinstance(problem, MpipipeError) and problem.rank is None:
                problem.rank = self.rank
            raise problem
        if step + 1 < self.steps:
            self.begin(step + 1)
        return self.begun(task.result)

    def begin(self, step: int) -> None:
        """Begin to read the batch of a step, unless that is done already."""
        if self.reads and (self.ahead is None or self.number != step):
            self.number = step
            self.ahead = ThreadTask(partial(self._read, step), "mpipipe batches")

    def _read(self, step: int) -> tuple[Any, Any, Any]:
        found = read(self.task, "batch", step, self.rows, self.shard)
        kinds = " and ".join(shapes_of(tree) for tree in found[:2] if tree is not None)
        self.kinds = self.kinds or kinds
        if kinds != self.kinds:
            raise DataError(
                f"{place_of(self.task, 'batch')}{where('batch', step, self.rows)} returns other shapes than before",
                found=f"{kinds} in each row",
                expected=self.kinds,
                remedy="pad what varies to one length, and let the loss count what is valid",
            )
        return found

    def validation(self, index: int) -> Pair:
        """Return a batch of the validation."""
        if not self.reads:
            return None, None
        return self.begun(read(self.task, "validation", index, self.rows, self.shard))

    def begun(self, found: tuple[Any, Any, Any]) -> Pair:
        """Return inputs and targets of what was read, and give the task what came with them."""
        inputs, targets, more = found
        if more is not None:
            self.task.begin(more)
        return inputs, targets


def validate(
    pipeline: Pipeline, reader: Reader, scores: TaskLoss | None, batches: int, group: RankGroup
) -> tuple[float, dict[str, float]]:
    """Return the mean loss over the batches of the validation and the means of the task's metrics; collective."""
    values = []
    if scores is not None:
        scores.collects = True
    for index in range(batches):
        batch = reader.validation(index)
        values.append(call(reader.task, "layers", *batch, when=" in the validation", by=pipeline.evaluate))
    if scores is None:
        return sum(values) / batches, {}
    scores.collects = False
    return sum(values) / batches, scores.means(group)


def rehearse(task: Task, reader: Reader, pipeline: Pipeline, mesh: Mesh, step: int, loss: Any) -> list[str]:
    """Read the first batches, and run them forward: what does not fit is found before anything is written.

    Returns the names of the task's metrics.
    """
    group, scores = group_of(mesh.comm), scores_of(task, loss)
    own = loss if isinstance(loss, TaskLoss) else None
    for method, number in (("batch", step), ("validation", 0)):
        pair: Pair = None, None
        with group.raise_together(f"train: the first {method}"):
            if reader.reads:
                pair = reader.begun(read(task, method, number, reader.rows, reader.shard))
                check_batch(task, method, number, reader.rows, reader.shard, pair)
        facts: dict[str, Any] = {}
        with group.raise_together(f"train: the first row of {method}"):
            facts = row_traits(task, method, number, reader.shard) if reader.reads else {}
        seen = group.gather(f"train: the first row of {method}", (mesh.seq.rank, facts))
        with group.raise_together(f"train: the first row of {method} on all ranks"):
            check_ranks(place_of(task, method), seen)
        if own is not None:
            own.rehearses, own.collects = True, scores is not None
        call(task, "layers", *pair, when=" in the validation" * (method == "validation"), by=pipeline.evaluate)
        if own is not None:
            own.rehearses = own.collects = False
    parts = [part for part in group.gather("train: the entries of targets", own and own.entries) if part]
    different = [part for part in parts if any(a * parts[0][0] != part[0] * b for a, b in zip(part, parts[0]))]
    if different:
        problem = ConfigError(
            "targets of several arrays, of which ranks have parts that differ by other numbers",
            found=" and ".join(", ".join(map(str, part)) for part in (parts[0], different[0])) + " entries",
            expected="a loss that says how many things its value is a mean over",
            remedy="return (value, doutput, weight), or set loss.mean_over_entries = True or False (rows)",
        )
        raise found_by_all(problem, [group])
    return [] if scores is None else list(scores.means(group))


def shown(task: Task, plan: LayerPlan, pipeline: Pipeline, mesh: Mesh, shard: Shard) -> str:
    """Return what `Task.show` says of the first micro-batch of the validation; collective."""
    if type(task).show is Task.show:
        return ""
    group, begin, text = group_of(mesh.comm), mesh.data.rank * plan.rows, ""
    inputs, targets = None, None
    with group.raise_together("train: the batch to show"):
        if shard.reads_inputs or shard.reads_targets:
            rows = range(begin, begin + plan.microbatch_rows)
            inputs, targets, _ = read(task, "validation", 0, rows, shard)
    output = pipeline.forward(inputs)
    with group.raise_together("train: what the task shows"):
        if shard.reads_targets and mesh.data.rank == 0:
            text = str(call(task, "show", output, targets, shard) or "")
    return next(filter(None, group.gather("train: what the task shows", text)), "")
