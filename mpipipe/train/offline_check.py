"""`train --check`: gradients, and rows that are not the same twice or not the same alone, before a job is queued."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpipipe import arrays, nn
from mpipipe.adapters import ForeignLayer
from mpipipe.arrays import Tree
from mpipipe.errors import ArgumentError, StageError
from mpipipe.job import Communicator
from mpipipe.train.shard import Shard
from mpipipe.train.task import Task
from mpipipe.train.task_calls import call, chain, example, place_of, read
from mpipipe.train.task_check import (
    NEAR,
    REPEATS,
    TaskLoss,
    alike,
    check_batch,
    check_ranks,
    misnamed,
    numbers,
    row_traits,
    rows_twice,
)

ROUNDING = 1e-12  # of numbers of size one in float64, with much room


def check_task(task: Task, again: Task, seed: int, comm: Communicator, rows: int = 2) -> tuple[list[str], bool]:
    """Look for what goes wrong without a word: gradients of layers and loss, rows that are not the same twice.

    Return lines of what was found, and whether all is right. `comm` is one rank, and `again` the task loaded once more.
    Gradients are compared with differences in float64, for a batch of `rows`.
    """
    shard = task.shard(comm, 1)
    shard.dtype = arrays.dtype("float64")
    lines, right, output = _check_rows(task, again, range(rows), shard), True, None
    inputs, target = example(task, rows, 1, shard)
    layers: list[nn.Layer] = []
    still, mixing, draws = nn.Position(training=False), "", False  # `draws`: a layer that draws numbers has come
    # what each row by itself becomes, and what it has under names
    alone: list[tuple[Tree, dict[str, Tree]]] = [(_single(inputs, row), {}) for row in range(rows)]
    for place, (stage, x) in enumerate(chain(task, shard, seed, rows)):
        layer = stage.layers[0]
        layers.append(layer)
        name = type(layer.given if isinstance(layer, ForeignLayer) else layer).__name__
        line, fine = _checked(f"layers[{place}] {name}", stage, x, nn.Position())
        lines.append(line)
        right, output = right and fine, stage.forward(x, still)[0]
        ways = [(nn.handed(own, named, stage.takes), named) for own, named in alone]
        alone = [(call(task, "layers", own, still, by=stage.forward)[0], named) for own, named in ways]
        if not (mixing or draws) and _differ(output, [own for own, _ in alone]):
            twice = call(task, "layers", rows_twice(ways[0][0]), still, by=stage.forward)[0]
            draws = _differ(_single(twice, 0), [_single(twice, 1)])
            mixing = "" if draws else f"layers[{place}] {name}"
    unused = {*getattr(inputs, "skips", ())}.difference(nn.names_of(layers)[0])
    if unused:
        lines.append(f"inputs: no layer takes {', '.join(sorted(unused))}, which the inputs have")
    singles = [own for own, _ in alone]
    differs = _differ(output, singles)
    mixes = right and bool(mixing) and differs
    if mixes:
        lines.append(
            f"{mixing}: gives other rows for a batch than for each row alone, so the result depends on --microbatches; "
            "let no row change another one: take norms and means of each row by itself"
        )
    loss = TaskLoss(task)
    line, fine = _checked("loss", _LossStage(loss, target), output, None)
    if fine:
        for _ in range(REPEATS):
            loss.rehearse(True)
            loss(output, target)
            if loss.suspect is None:
                break
        if loss.suspect is not None:
            raise loss.suspect
        if right and not differs and not loss.over_batch:
            loss.rehearses = loss.collects = False
            wrong = _loss_error(loss, output, singles, target)
            line, fine = wrong or line, not wrong
    return [*lines, line], right and fine and not unused and not mixes


def _single(tree: Tree, row: int) -> Tree:
    return arrays.mapped(lambda leaf: leaf[row : row + 1], tree)


def _differ(whole: Tree, alone: Sequence[Tree], factors: Sequence[float] = ()) -> bool:
    """Whether a batch has other rows than each alone, times its factor; unknown, so False, where shapes differ."""
    factors = factors or [1.0] * len(alone)
    for leaf, *parts in zip(*(arrays.flatten(getattr(tree, "main", tree))[0] for tree in (whole, *alone))):
        if leaf is not None:
            both, joined = numbers(leaf), np.concatenate([f * numbers(part) for f, part in zip(factors, parts)])
            least = ROUNDING * both.size**0.5
            if both.shape == joined.shape and np.linalg.norm(both - joined) > NEAR * np.linalg.norm(both) + least:
                return True
    return False


def _loss_error(loss: TaskLoss, output: Tree, singles: Sequence[Tree], target: Tree) -> str:
    """Return a line where the loss of a batch is not the mean, by their weights, of those of its rows; else ""."""
    goals = [_single(target, row) for row in range(len(singles))]
    whole, *alone = (loss.plain.checked(loss(*each)) for each in [(output, target), *zip(singles, goals)])
    weights = [1.0 if weight is None else weight for _, _, weight in alone]
    total = sum(weights)
    mean = sum(weight * float(value) for (value, _, _), weight in zip(alone, weights) if weight) / (total or 1)
    if not total:
        return ""
    gradients = [  # where nothing counts, there may be none
        gradient if weight else arrays.mapped(np.zeros_like, _single(whole[1], row))
        for row, ((_, gradient, _), weight) in enumerate(zip(alone, weights))
    ]
    factors = [weight / total for weight in weights]
    if np.isclose(float(whole[0]), mean, rtol=NEAR, atol=1e-7) and not _differ(whole[1], gradients, factors):
        return ""
    return (
        f"loss: {float(whole[0]):.6g} for {len(singles)} rows, and {mean:.6g} as the mean of each alone, or another "
        "gradient: no mean over rows, so the result depends on --microbatches; take the mean of a value of each row, "
        "or return as a third value the weight of the micro-batch, by which means are averaged"
    )


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
    return [*lines, *(f"note: {line}" for line in misnamed(task))]


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
        return arrays.mapped(lambda leaf: dy[0] * leaf, saved)
