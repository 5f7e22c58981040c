"""What is wrong in a task although nothing raises: one batch before the first step, or before a job
is queued.

Rows that ranks draw without a seed, and a loss that is no mean, end in a training that says ok. So
each training looks for them before its first step, in a rehearsal. `--check` does it before a job
is queued: it compares rows of two calls, and gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from mpipipe import arrays, nn
from mpipipe.adapters import ForeignLayer
from mpipipe.arrays import Tree
from mpipipe.attention import Local
from mpipipe.comm import Mesh
from mpipipe.errors import ArgumentError, ConfigError, DataError, MpipipeError, StageError
from mpipipe.exchange import AllToAll, HaloExchange
from mpipipe.job import Communicator, RankGroup, found_by_all, group_of
from mpipipe.pipeline import Loss, Pipeline, rows_of_any
from mpipipe.planning import LayerPlan
from mpipipe.train.shard import Shard
from mpipipe.train.task import Pair, Task
from mpipipe.train.task_calls import Reader, call, chain, example, place_of, read, shapes_of, where
from mpipipe.train.task_loss import TaskLoss, numbers, scores_of

# Relative differences of the same rows, made among other ones or on another processor, are below.
NEAR = 1e-3
ROUGH = 1e-6  # the same of norms of what is read
# Evaluations in all of which a loss looks wrong: one that draws one of two values does once in
# 2^16.
REPEATS = 8
RIGHT_IN_PARTS = HaloExchange, AllToAll, nn.AdaptiveNorm, nn.Patches
SEEDED = (
    "let a row depend on `step` and its index alone: draw each from np.random.default_rng((step, "
    "row)), or the whole "
    "batch from np.random.default_rng(step), and return [rows] of it; data that are drawn when "
    "the file is loaded need "
    "a seed, too"
)


def doubts(task: Task, shard: Shard) -> list[str]:
    """Return lines for the start of a training: which layers see a part of each row alone."""
    inner = [layer for outer in task.outline for _, layer in outer.walk("")]
    apart = {
        type(layer).__name__ for layer in inner if shard.size > 1 and _sees_part_alone(layer, shard)
    }
    if not apart:
        return []
    return [
        f"mpipipe: note: {', '.join(sorted(apart))}: on each rank of seq they see its own part of "
        "a row alone, which "
        "is right where they work along an axis that is not shared, or at each point by itself; "
        "mpipipe.exchange.HaloConv and HaloExchange, and shard.attend, take what they need from "
        "other ranks"
    ]


def _sees_part_alone(layer: nn.Layer, shard: Shard) -> bool:
    """Whether a layer may mix positions and, as far as can be known, asks no other rank for
    theirs.
    """
    is_right = isinstance(layer, RIGHT_IN_PARTS) or (
        isinstance(layer, ForeignLayer) and shard.attends
    )
    if isinstance(layer, nn.LearnedPositions):
        is_right = is_right or layer.positions is not None
    return (
        nn.mixes(layer)
        and not is_right
        and isinstance(getattr(layer, "attend", None), (Local, type(None)))
    )


# -- A rehearsal, and a validation -----------------------------------------------------------------


def check_first_row(reader: Reader, mesh: Mesh, method: str, number: int) -> None:
    """Raise DataError on all ranks where those of a pipeline have other arrays for row 0 of a
    batch.

    One takes the inputs, another one the targets: rows that are drawn without a seed would not
    belong together.
    """
    task = reader.task
    group = group_of(mesh.comm)
    norms: list[list[float] | None] = [None, None]
    with group.raise_together("train: the first row"):
        if reader.reads and mesh.pipe.size > 1:
            found = call(
                task, method, number, range(1), reader.shard, when=where(method, number, range(1))
            )
            norms = [None if each is None else _norms(each) for each in found[:2]]
    seen = group_of(mesh.pipe).gather("train: the first row", norms)
    with group.raise_together("train: the first row on all ranks"):
        for name, of_ranks in zip(("inputs", "targets"), zip(*seen)):
            known = [each for each in of_ranks if each is not None]
            if any(
                len(each) != len(known[0]) or not np.allclose(each, known[0], rtol=ROUGH, atol=0)
                for each in known
            ):
                raise DataError(
                    f"{place_of(task, method)} gives other {name} of row 0 on other ranks",
                    found=f"arrays of norms {' and '.join(map(str, known))}",
                    expected="the same rows on all ranks: one takes the inputs of a pipeline, "
                    "another its targets",
                    remedy=SEEDED,
                )


def _norms(tree: Tree) -> list[float] | None:
    """Return the norm of each array; None for what is no tree of numbers, as this rank may not need
    it.
    """
    try:
        return [float(np.linalg.norm(numbers(leaf))) for leaf in arrays.flatten(tree)[0]]
    except (MpipipeError, AttributeError, TypeError, ValueError):
        return None


def validate(
    pipeline: Pipeline, reader: Reader, loss: Any, batches: int, group: RankGroup
) -> tuple[float, dict[str, float]]:
    """Return the mean loss over the batches of the validation and the means of the task's metrics;
    collective.

    Where the loss returns weights, each batch counts by the sum of its weights.
    """
    values = []
    scores = scores_of(reader.task, loss)
    if scores is not None:
        scores.collects = True
    for index in range(batches):
        batch = reader.validation(index)
        by = pipeline.weighed_evaluation
        values.append(call(reader.task, "layers", *batch, when=" in the validation", by=by))
    mean = sum(value * weight for value, weight in values) / sum(weight for _, weight in values)
    if scores is None:
        return mean, {}
    scores.collects = False
    return mean, scores.means(group)


def rehearse(reader: Reader, pipeline: Pipeline, mesh: Mesh, step: int, loss: Any) -> None:
    """Read the first batches and run them forward, before anything is written; collective."""
    task = reader.task
    group = group_of(mesh.comm)
    scores = scores_of(task, loss)
    own = loss if isinstance(loss, TaskLoss) else None
    for method, number in (("batch", step), ("validation", 0)):
        pair: Pair = None, None
        with group.raise_together(f"train: the first {method}"):
            if reader.reads:
                pair = reader.begun(reader.read(method, number))
        check_first_row(reader, mesh, method, number)
        suspects = []  # of all evaluations: a loss that is right once is right
        for _ in range(REPEATS):
            if own is not None:
                own.rehearse(scores is not None)
            when = " in the validation" * (method == "validation")
            call(task, "layers", *pair, when=when, by=pipeline.evaluate)
            suspects.append(own.suspect if own is not None else None)
            if not any(group.gather("train: whether the loss is a mean", all(suspects))):
                break
        if own is not None:
            own.rehearses = own.collects = False
        with group.raise_together("train: the loss"):
            if suspects[-1] is not None and all(suspects):
                raise suspects[-1]
    parts = [
        part for part in group.gather("train: the entries of targets", own and own.entries) if part
    ]
    different = [
        part
        for part in parts
        if any(a * parts[0][0] != part[0] * b for a, b in zip(part, parts[0]))
    ]
    if different:
        problem = ConfigError(
            "targets of several arrays, of which ranks have parts that differ by other numbers",
            found=" and ".join(", ".join(map(str, part)) for part in (parts[0], different[0]))
            + " entries",
            expected="a loss that says how many things its value is a mean over",
            remedy="return (value, doutput, weight), or set loss.mean_over_entries = True or "
            "False (rows)",
        )
        raise found_by_all(problem, [group])
    if scores is not None:
        scores.means(group)


def shown(task: Task, plan: LayerPlan, pipeline: Pipeline, mesh: Mesh, shard: Shard) -> str:
    """Return what `Task.show` says of the first micro-batch of the validation; collective."""
    if type(task).show is Task.show:
        return ""
    group = group_of(mesh.comm)
    begin = mesh.data.rank * plan.rows
    text = ""
    inputs = None
    targets = None
    with group.raise_together("train: the batch to show"):
        if shard.reads_inputs or shard.reads_targets:
            rows = range(begin, begin + plan.microbatch_rows)
            inputs, targets, _ = read(task, "validation", 0, rows, shard)
    output = pipeline.forward(inputs)
    with group.raise_together("train: what the task shows"):
        if shard.reads_targets and mesh.data.rank == 0:
            both = [arrays.mapped(arrays.on_host, each) for each in (output, targets)]
            try:
                text = str(call(task, "show", *both, shard) or "")
            except MpipipeError as error:
                # The training is done and saved. A program that was to end here says so as before.
                if isinstance(error.__cause__, SystemExit):
                    raise
                text = f"mpipipe: warning: {error.message}"
    return next(filter(None, group.gather("train: what the task shows", text)), "")


# -- `train --check`: one batch on one rank, before a job is queued --------------------------------


ROUNDING = 1e-12  # of numbers of size one in float64, with much room


def check_task(task: Task, seed: int, comm: Communicator, rows: int = 2) -> tuple[list[str], bool]:
    """Rehearse one batch of `rows` in float64, on one rank, and compare gradients with differences.

    Return lines of what was found, and whether all is right.
    """
    shard = task.shard(comm, 1)
    shard.dtype = arrays.dtype("float64")
    for method in ("batch", "validation"):
        check_last_row(task, method, rows, shard)
    lines: list[str] = []
    right = True
    output = None
    passed: list[tuple[nn.Stage, Tree]] = []  # each layer, and its output
    inputs, target = example(task, rows, 1, shard)
    still = nn.Position(training=False)
    mixing = ""
    # what each row by itself becomes, and what it has under names
    singles = [_single(task, "batch", row, shard, (inputs, target)) for row in range(rows)]
    alone: list[tuple[Tree, dict[str, Tree]]] = [(own, {}) for own, _ in singles]
    for place, (stage, x) in enumerate(chain(task, shard, seed, rows)):
        layer = stage.layers[0]
        name = type(layer.given if isinstance(layer, ForeignLayer) else layer).__name__
        line, fine = _checked(f"layers[{place}] {name}", stage, x, nn.Position())
        lines.append(line)
        right = right and fine
        output = stage.forward(x, still)[0]
        passed.append((stage, output))
        ways = [(nn.handed(own, named, stage.takes), named) for own, named in alone]
        alone = [
            (call(task, "layers", own, still, by=stage.forward)[0], named) for own, named in ways
        ]
        if right and not mixing and _differ(output, [own for own, _ in alone], task.per_microbatch):
            mixing = f"layers[{place}] {name}"
    if mixing:
        lines.append(
            f"{mixing}: gives other rows for a batch than for each row alone, so the result "
            "depends on --microbatches; "
            "let no row change another one: take norms and means of each row by itself"
        )
    facts, fine = _facts(passed)
    lines += facts
    right = right and fine
    loss = TaskLoss(task)
    draws = "position" in loss.__signature__.parameters
    still_loss = partial(loss, position=still) if draws else loss
    line, fine = _checked(
        "loss", _LossStage(partial(loss, position=nn.Position()) if draws else loss, target), output
    )
    line += (
        "; random numbers that it draws are those of step, micro-batch and replica" if draws else ""
    )
    if fine:
        for _ in range(REPEATS):
            loss.rehearse(True)
            still_loss(output, target)
            if loss.suspect is None:
                break
        if loss.suspect is not None:
            raise loss.suspect
        if right and not mixing and not loss.over_batch:
            loss.rehearses = loss.collects = False
            pairs = [(own, goal) for (own, _), (_, goal) in zip(alone, singles)]
            wrong = _loss_error(still_loss, loss.plain, output, target, pairs)
            line = wrong or line
            fine = not wrong
    return [*lines, line], right and fine and not mixing


def check_last_row(task: Task, method: str, rows: int, shard: Shard) -> None:
    """Raise DataError where a task gives another last row when that is asked for alone."""
    last = range(rows - 1, rows)
    pair = _single(task, method, rows - 1, shard, read(task, method, 0, range(rows), shard)[:2])
    for one, again in zip(pair, read(task, method, 0, last, shard)[:2]):
        if _differ(one, [again]):
            raise DataError(
                f"{place_of(task, method)} gives another row {rows - 1} when that is asked for "
                "alone",
                found=f"norms {_norms(one)}, then {_norms(again)}",
                expected="the same row, whatever is asked for with it and however often",
                remedy=SEEDED,
            )


def _single(task: Task, method: str, row: int, shard: Shard, pair: Pair) -> Pair:
    """Return inputs and targets of one row of a pair."""
    if task.per_microbatch:
        return read(task, method, 0, range(row, row + 1), shard)[:2]
    inputs, targets = (arrays.mapped(lambda leaf: leaf[row : row + 1], tree) for tree in pair)
    return inputs, targets


def _differ(whole: Tree, alone: Sequence[Tree], graphs: bool = False) -> bool:
    """Whether a batch has other rows than each alone; unknown, so False, where shapes differ.

    Integers of `graphs` are numbers of nodes, which change with what else is in the batch.
    """
    for leaf, *parts in zip(
        *(arrays.flatten(getattr(tree, "main", tree))[0] for tree in (whole, *alone))
    ):
        if leaf is not None and not (graphs and not arrays.is_floating(leaf.dtype)):
            both = numbers(leaf)
            joined = np.concatenate([numbers(part) for part in parts])
            least = ROUNDING * both.size**0.5
            if (
                both.shape == joined.shape
                and np.linalg.norm(both - joined) > NEAR * np.linalg.norm(both) + least
            ):
                return True
    return False


def _facts(passed: Sequence[tuple[nn.Stage, Tree]]) -> tuple[list[str], bool]:
    """Return a line each about ties, state, dtypes at all cuts and split backwards, and whether
    ties agree.
    """
    ties: dict[str, list[tuple[str, arrays.Shape]]] = {}
    state: list[str] = []
    whole: list[str] = []
    for stage, _ in passed:
        state += stage.state
        if getattr(stage.layers[0], "in_one_walk", False):
            whole.append(f"layers[{stage.first}]")
        for key, names in stage.ties.items():
            ties.setdefault(key, []).extend((name, stage.parameters[name].shape) for name in names)
    fine = all(len({shape for _, shape in places}) == 1 for places in ties.values())
    tied = [
        " = ".join(f"{name} {list(shape)}" for name, shape in places) for places in ties.values()
    ]
    between = [shapes_of(getattr(output, "main", output)) for _, output in passed[:-1]]
    lines = [
        f"ties: {', '.join(tied) or 'none'}" + ("" if fine else "; tied parameters have one shape"),
        f"state in checkpoints: {', '.join(state) or 'none'}",
        f"between layers: {'; '.join(between) or 'nothing'}",
        f"whole backward in I, and nothing left for W: {', '.join(whole) or 'no layer'}",
    ]
    return lines, fine


def _loss_error(
    loss: Callable[..., Any], plain: Loss, output: Tree, target: Tree, singles: Sequence[Pair]
) -> str:
    """Return a line where the loss of a batch is not the mean, by their weights, of those of its
    rows; else "".
    """
    whole = plain.checked(loss(output, target))[0]
    alone = [plain.checked(loss(*each)) for each in singles]
    weights = []
    for (_, _, weight), (_, goal) in zip(alone, singles):
        weights.append(float(rows_of_any(goal)) if weight is None else weight)
    total = sum(weights)
    mean = sum(weight * float(value) for (value, _, _), weight in zip(alone, weights) if weight) / (
        total or 1
    )
    if not total:
        return ""
    if np.isclose(float(whole), mean, rtol=NEAR, atol=1e-7):
        return ""
    return (
        f"loss: {float(whole):.6g} for {len(singles)} rows, and {mean:.6g} as the mean of each "
        "alone: no "
        "mean over rows, so the result depends on --microbatches; take the mean of a value of "
        "each row, "
        "or return as a third value the weight of the micro-batch, by which means are averaged"
    )


def _checked(
    name: str, stage: Any, x: Tree, position: nn.Position | None = None
) -> tuple[str, bool]:
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
    """A loss as a stage whose output is the value: its backward gives the gradient of what the loss
    is called with.
    """

    def __init__(self, loss: Callable[..., Any], target: Tree) -> None:
        self.loss = loss
        self.target = target

    def forward(self, x: Tree) -> tuple[np.ndarray, Tree]:
        value, gradient = self.loss(x, self.target)[:2]
        return np.reshape(np.asarray(value, np.float64), 1), gradient

    def backward(self, dy: np.ndarray, saved: Tree) -> Tree:
        return arrays.mapped(lambda leaf: dy[0] * leaf, saved)
