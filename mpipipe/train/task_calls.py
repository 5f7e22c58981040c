"""How a training calls its task: an error names file, method, step and rows.

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
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from inspect import signature
from time import perf_counter
from typing import Any

import numpy as np

from mpipipe import arrays, nn, optim
from mpipipe.adapters import ForeignLayer, as_layer, let_draw_in_turn, seeded, with_loss
from mpipipe.arrays import Tree
from mpipipe.comm import Mesh
from mpipipe.errors import ConfigError, DataError, MpipipeError, PeerError
from mpipipe.even_split import even_split
from mpipipe.job import RankGroup, ThreadTask, wait_locally
from mpipipe.planning import LayerPlan, PlanningProblem, name_ends
from mpipipe.train.shard import Shard
from mpipipe.train.task import Pair, Task


def place_of(task: Task, method: str) -> str:
    """Return a method of a task in words: with the file, if the task was loaded from one."""
    name = f"{type(task).__name__}.{method}"
    return name if task.file is None else f"{name} in {task.file.path.name}"


def turn_of(task: Task) -> AbstractContextManager[Any]:
    """Return the lock of a task: the thread that runs code of the user holds it."""
    turn: AbstractContextManager[Any] = vars(task).setdefault("_turn", threading.RLock())
    return turn


def turn(task: Task, method: str) -> AbstractContextManager[Any]:
    """Return the lock of a task if a method of it is code of the user: one thread at a time runs
    that.
    """
    module: str = getattr(getattr(task, method, None), "__module__", "") or ""
    return nullcontext() if module.startswith("mpipipe.") else turn_of(task)


def call(
    task: Task, method: str, *arguments: Any, when: str = "", by: Callable[..., Any] | None = None
) -> Any:
    """Call a method of a task, or `by` in its place. An error says where it was, with `when`: the
    step and the rows.
    """
    try:
        with turn(task, method):
            return (by or getattr(task, method))(*arguments)
    except MpipipeError as error:
        # one that names a method of the task already stays as it is
        own = (
            not type(task).__module__.startswith("mpipipe.")
            and f"{type(task).__name__}." not in error.message
        )
        if own and not isinstance(error, PeerError):
            error.message = f"{place_of(task, method)}{when}: {error.message}"
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{place_of(task, method)}{when} raised {type(error).__name__}: {error}",
            found=line_of(error, "" if task.file is None else str(task.file.path)),
        ) from error


def line_of(error: BaseException, file: str) -> str | None:
    """Return the last line of a file in a traceback, in words, or the last one at all."""
    frames = traceback.extract_tb(error.__traceback__)[1:]
    last = next(
        (frame for frame in reversed(frames) if frame.filename == file),
        frames[-1] if frames else None,
    )
    return None if last is None else f"line {last.lineno} of {last.filename}: {last.line}"


def _is_function(value: Any) -> bool:
    try:
        return signature(value) is not None
    except (TypeError, ValueError):
        return False


def _is_list_of(kind: type, values: Any) -> bool:
    return isinstance(values, (list, tuple)) and all(isinstance(value, kind) for value in values)


PER_SECOND = "samples_per_second", "tokens_per_second"
LAYOUTS = "contiguous", "zigzag", "striped"
ATTRIBUTES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "loss": ("a function of output and target", _is_function),
    "layout": (" or ".join(LAYOUTS), lambda value: value in LAYOUTS),
    "unit": ("a word", lambda value: isinstance(value, str) and value.isprintable()),
    "units": ("a number above 0", lambda value: isinstance(value, (int, float)) and value > 0),
    "per_second": (" or ".join(PER_SECOND), lambda value: value in PER_SECOND),
    "freeze": ("patterns in a tuple", partial(_is_list_of, str)),
    "groups": ("optim.Group objects in a tuple", partial(_is_list_of, optim.Group)),
    "folders": ("names in a tuple", partial(_is_list_of, str)),
}


def check_attributes(task: Task) -> None:
    """Raise ConfigError for an attribute of a task that cannot be meant: it would be read far from
    here.
    """
    for name, (expected, is_right) in ATTRIBUTES.items():
        value = getattr(task, name)
        if not is_right(value):
            raise ConfigError(
                f"{place_of(task, name)} cannot be used", found=f"{value!r:.80}", expected=expected
            )


def costs_of(task: Task) -> list[float]:
    """Return the operations of each layer; ConfigError for what are no such numbers."""
    costs = call(task, "costs", by=lambda: [float(cost) for cost in task.costs()])
    count = len(task.outline)
    if len(costs) != count or not all(math.isfinite(cost) and cost >= 0 for cost in costs):
        raise ConfigError(
            f"{place_of(task, 'costs')} returns no cost of each layer",
            found=f"{len(costs)} numbers: {costs}"[:80],
            expected=f"{count} finite numbers from 0 on, one for each layer",
        )
    return costs


def rate_of(task: Task, step: int, config: Any) -> float:
    """Return the learning rate of a step; ConfigError for one that cannot be meant."""
    when = f"(step={step})"
    rate = call(
        task, "rate_at", step, config, when=when, by=lambda *given: float(task.rate_at(*given))
    )
    if not (math.isfinite(rate) and rate >= 0):
        raise ConfigError(
            f"{place_of(task, 'rate_at')}{when} returns no learning rate",
            found=rate,
            expected="a finite number from 0 on",
        )
    return rate


# -- The layers, on paper and in fact --------------------------------------------------------------


def entries_of(task: Task, shard: Shard, seed: int) -> list[Any]:
    """Return the list of layers of a task; collective over the ranks of the shard."""
    check_attributes(task)
    with seeded(seed, -1, waits=shard.comm.size > 1):
        entries = call(task, "layers", shard)
    if not isinstance(entries, (list, tuple)) or not entries:
        raise ConfigError(
            f"{place_of(task, 'layers')} returns no list of layers",
            found=f"an empty {type(entries).__name__}"
            if entries in ([], ())
            else type(entries).__name__,
            expected="a list with a layer at least",
        )
    entries = with_loss(entries, task.loss, seed)
    name_ends(entries)
    return entries


def layers_of(task: Task, shard: Shard, seed: int) -> list[nn.Layer]:
    """Return all layers of a task, unbound."""
    return [
        as_layer(entry, place, seed) for place, entry in enumerate(entries_of(task, shard, seed))
    ]


def outline(task: Task, shard: Shard, seed: int) -> list[Any]:
    """Set what the layers of a task are on paper; return the list of its layers, from which stages
    are made.
    """
    entries = entries_of(task, shard, seed)
    layers = (as_layer(entry, place, seed) for place, entry in enumerate(entries))
    task.outline = [
        layer.forget() if isinstance(layer, ForeignLayer) else layer for layer in layers
    ]
    return entries


def chain(task: Task, shard: Shard, seed: int, rows: int = 1) -> Iterator[tuple[nn.Stage, Tree]]:
    """Yield each layer by itself, bound, and an input of it; collective. Raises ConfigError where
    they do not fit.
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


def shapes_of(tree: Tree) -> str:
    """Return shapes and dtypes of what lies between two layers, without the rows."""
    leaves, structure = arrays.flatten(tree)
    named = ", ".join(f"{leaf.dtype}{list(leaf.shape[1:])}" for leaf in leaves)
    return named if structure is None else f"{structure}: {named}"


def agree_on_layers(task: Task, problem: PlanningProblem, shard: Shard, group: RankGroup) -> None:
    """Raise MismatchError on all ranks where they have different layers; collective."""
    group.agree(
        "train: the layers",
        (
            ("layers", len(problem.layers)),
            *((f"layer {n}", text) for n, text in enumerate(problem.signatures)),
        ),
        message=f"the ranks have different layers from {place_of(task, 'layers')}",
        remedy="make the list of layers of what is the same on all ranks; a layer may use "
        "shard.rank, not its shapes",
    )


# -- Batches ---------------------------------------------------------------------------------------


def where(method: str, number: int, rows: range) -> str:
    """Return the arguments of `batch` or `validation` in words."""
    return (
        f"({'step' if method == 'batch' else 'index'}={number}, rows={rows.start}..{rows.stop - 1})"
    )


def read(task: Task, method: str, number: int, rows: range, shard: Shard) -> tuple[Any, Any, Any]:
    """Return inputs, targets, and what comes with them, from `batch` or `validation`; checks what
    this rank needs.
    """
    when = where(method, number, rows)
    whose = f" of {place_of(task, method)}{when}"
    # The lock is held until all is copied: another method of the task may fill the same arrays
    # again.
    with turn(task, method):
        found = call(task, method, number, rows, shard, when=when)
        if not isinstance(found, tuple) or len(found) not in (2, 3):
            kind = f"a tuple of {len(found)}" if isinstance(found, tuple) else type(found).__name__
            raise DataError(
                f"{place_of(task, method)}{when} returns no inputs and targets",
                found=kind,
                expected="(inputs, targets)",
            )
        make = partial(as_batch, shard=shard, any_shapes=task.per_microbatch)
        inputs = make(found[0], rows, f"the inputs{whose}") if shard.reads_inputs else None
        targets = make(found[1], rows, f"the targets{whose}") if shard.reads_targets else None
    return inputs, targets, found[2] if len(found) == 3 else None


def read_all(
    task: Task, method: str, number: int, rows: range, microbatches: int, shard: Shard
) -> Any:
    """Return what `read` does for the rows of all micro-batches; lists of it where the task gives
    them one by one.
    """
    if not task.per_microbatch:
        return read(task, method, number, rows, shard)
    parts = even_split(len(rows), microbatches)
    found = [read(task, method, number, rows[part.start : part.stop], shard) for part in parts]
    return tuple(None if each[0] is None else [*each] for each in zip(*found))


def example(
    task: Task, rows: int, microbatches: int, shard: Shard, most: int | None = None
) -> Pair:
    """Return inputs and targets as they may come, for measurements: those of step 0, again where it
    has `most` rows.
    """
    if type(task).example is not Task.example:  # a task may have some that need no data
        return task.example(rows, microbatches, shard)
    if microbatches > 1 and task.per_microbatch:
        inputs, targets, _ = read_all(task, "batch", 0, range(rows), microbatches, shard)
        return inputs, targets
    pair = read(task, "batch", 0, range(min(rows, most or rows)), shard)[:2]
    if most is None or rows <= most or task.per_microbatch:
        return pair
    inputs, targets = (
        arrays.mapped(lambda leaf: leaf[np.arange(rows) % len(leaf)], tree) for tree in pair
    )
    return inputs, targets


def as_batch(tree: Tree, rows: range, what: str, shard: Shard, any_shapes: bool = False) -> Tree:
    """Return a batch in the dtype of the training; DataError for another number of rows, and what
    is not finite.

    One of `any_shapes` is only not to be empty. Arrays are copied: the task may fill the same ones
    again while a step computes with these.
    """
    try:
        leaves, structure = arrays.flatten(tree)
    except MpipipeError as error:
        raise DataError(
            f"{what} are no arrays", found=type(tree).__name__, expected="numpy arrays"
        ) from error
    if any_shapes and (not leaves or 0 in leaves[0].shape[:1]):
        raise DataError(
            f"{what} are empty",
            found=", ".join(f"shape {leaf.shape}" for leaf in leaves) or "no arrays",
            expected="a row at least in the first array, such as a node of a graph",
            remedy="leave such rows out of the data, or let them count nothing: a weight of the "
            "loss says so",
        )
    for leaf in leaves:
        if not any_shapes and (leaf.ndim == 0 or len(leaf) != len(rows)):
            raise DataError(
                f"{what} have another number of rows than was asked for",
                found=f"shape {leaf.shape}",
                expected=f"{len(rows)} along the first axis",
                remedy="return as many rows as `rows` has; a source that ends early has fewer",
            )
        if (
            arrays.is_floating(leaf.dtype)
            and not arrays.is_device(leaf)
            and not np.isfinite(leaf.sum())
        ):
            numbers = np.arange(leaf.size) if any_shapes else rows
            bad = [
                row
                for row, values in zip(numbers, leaf.reshape(len(numbers), -1))
                if not np.isfinite(values).all()
            ]
            if bad:
                part = (
                    "value {} of an array" if any_shapes else "row {}, counted in the whole batch"
                )
                raise DataError(
                    f"{what} are not finite",
                    found=f"NaN or infinity in {part.format(bad[0])}",
                    expected="numbers",
                    remedy="look at the data of this row; where values are missing, give numbers "
                    "and a mask as a tuple "
                    "of targets, and let the loss use it",
                )
    cast = []
    for leaf in leaves:
        dtype = shard.dtype if leaf.dtype.kind == "f" else leaf.dtype
        if arrays.is_device(leaf):
            cast.append(arrays.copied(leaf, dtype))
        else:
            cast.append(leaf.astype(dtype, "C"))
    return arrays.unflatten(cast, structure)


class Reader:
    """Reads the rows of this replica; `waited` are the seconds in which the last step waited for
    them.
    """

    def __init__(self, task: Task, shard: Shard, plan: LayerPlan, mesh: Mesh, steps: int) -> None:
        self.task = task
        self.shard = shard
        self.steps = steps
        self.waited = 0.0
        begin = mesh.data.rank * plan.rows
        self.microbatches = plan.schedule.microbatches
        self.rows = range(begin, begin + plan.rows)
        placement = plan.schedule.placement
        rank = mesh.pipe.rank
        shard.reads_inputs = rank == placement[0]
        shard.reads_targets = rank == placement[-1]
        self.reads = shard.reads_inputs or shard.reads_targets or task.everywhere
        self.number = -1  # the step that a thread reads
        self.ahead: ThreadTask[tuple[Any, Any, Any]] | None = None
        # shapes and dtypes of the rows that this rank reads
        self.rank = mesh.rank
        self.kinds = ""
        if task.read_ahead:
            let_draw_in_turn(turn_of(task))

    def batch(self, step: int) -> Pair:
        """Return the batch of a step; where the task reads ahead, begin to read that of the next
        one.
        """
        if not self.reads:
            return None, None
        start = perf_counter()
        found = self._read_ahead(step) if self.task.read_ahead else self._read(step)
        self.waited = perf_counter() - start
        pair = self.begun(found)
        if step + 1 < self.steps:
            self.begin(step + 1)
        return pair

    def begin(self, step: int) -> None:
        """Let a thread read the batch of a step, if the task reads ahead and no thread does so
        yet.
        """
        if self.reads and self.task.read_ahead and (self.ahead is None or self.number != step):
            self.number = step
            self.ahead = ThreadTask(partial(self._read, step), "mpipipe batches")

    def _read_ahead(self, step: int) -> tuple[Any, Any, Any]:
        self.begin(step)
        assert self.ahead is not None
        task = self.ahead
        self.ahead = None
        wait_locally(task.wait, f"the batch of step {step}")
        if task.problem is not None:
            raise task.problem
        return task.result

    def _read(self, step: int) -> tuple[Any, Any, Any]:
        try:
            found = self.read("batch", step)
        except MpipipeError as error:
            error.rank = self.rank if error.rank is None else error.rank
            raise
        if self.task.per_microbatch:
            return found
        kinds = " and ".join(shapes_of(tree) for tree in found[:2] if tree is not None)
        self.kinds = self.kinds or kinds
        if kinds != self.kinds:
            raise DataError(
                f"{place_of(self.task, 'batch')}{where('batch', step, self.rows)} returns other "
                "shapes than before",
                found=f"{kinds} in each row",
                expected=self.kinds,
                remedy="pad what varies to one length, and let the loss count what is valid",
            )
        return found

    def read(self, method: str, number: int) -> tuple[Any, Any, Any]:
        """Return what the task gives of all rows of this rank; lists of it with one entry for each
        micro-batch.
        """
        return read_all(self.task, method, number, self.rows, self.microbatches, self.shard)

    def validation(self, index: int) -> Pair:
        if not self.reads:
            return None, None
        return self.begun(self.read("validation", index))

    def begun(self, found: tuple[Any, Any, Any]) -> Pair:
        """Return inputs and targets of what was read, and give the task what came with them."""
        inputs, targets, more = found
        if more is not None:
            call(self.task, "begin", more)
        return inputs, targets
