"""The loss of a task as that of a pipeline, with the means of its metrics; and whether it is a
mean.

A loss that is no mean ends in a training that says ok. So a rehearsal tries micro-batches with each
row twice.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from inspect import signature
from typing import Any

import numpy as np

from mpipipe import arrays
from mpipipe.arrays import Tree
from mpipipe.errors import ConfigError
from mpipipe.job import RankGroup
from mpipipe.pipeline import Loss, merge
from mpipipe.train.report import FIELDS
from mpipipe.train.task import Task
from mpipipe.train.task_calls import call, place_of

RESERVED = {
    *FIELDS,
    "metrics",
    "steps",
    "time",
    "seconds",
}  # what records, and the last line, call their own
NAME = re.compile(r"[^\s=]+")
SUBNORMAL = float(
    np.finfo(np.float16).smallest_subnormal
)  # the steps in which small numbers are rounded there


class TaskLoss:
    """The loss of a task as that of a pipeline, and the sums of its metrics while `collects` is
    true.

    While it `rehearses`, it tries micro-batches with each row twice, too: means stay, and weights
    double. The first one with a weight is judged: were it any of them, a loss that draws random
    numbers would soon look wrong.
    """

    def __init__(self, task: Task, in_slices: bool = False) -> None:
        self.axis = int(in_slices)  # along which the loss is to be a mean, for whole sequences too
        self.task = task
        self.plain = Loss(task.loss)
        self.collects = False
        self.rehearses = False
        self.declared = getattr(task.loss, "mean_over_entries", None)
        self.mean_over_entries = self.declared  # else a weight says it
        if self.declared is None and not task.per_microbatch:
            self.mean_over_entries = True
        self.over_batch = bool(getattr(task.loss, "over_batch", False))
        self.wants_host_targets = not self.plain.uploads
        self.suspect: ConfigError | None = None  # of a rehearsal
        self.judged = False
        self.sums: dict[str, np.ndarray] = {}
        self.entries: list[int] = []  # of each array of the targets, where these count
        self.__signature__ = signature(
            task.loss
        )  # by which the pipeline knows whether it takes a factor

    def __call__(self, output: Any, target: Any, **factor: Any) -> Any:
        if self.over_batch and not isinstance(
            output, list
        ):  # of a measurement, which has one micro-batch
            value, gradient, *weight = self([output], [target], **factor)
            return value, gradient[0], *weight
        result = call(self.task, "loss", output, target, by=partial(self._evaluate, **factor))
        if self.collects and getattr(self.task.metrics, "__func__", None) is not Task.metrics:
            for y, goal in zip(output, target) if self.over_batch else [(output, target)]:
                entries = sum(leaf.size for leaf in arrays.flatten(goal)[0])
                weight = result[2] if len(result) == 3 and not self.over_batch else entries
                if not weight:  # nothing is valid here
                    continue
                both = (arrays.mapped(arrays.on_host, each) for each in (y, goal))
                for name, value in call(self.task, "metrics", *both, by=self._metrics).items():
                    self.sums[name] = self.sums.get(name, np.zeros(2)) + np.array(
                        [value * weight, weight]
                    )
        return result

    def rehearse(self, collects: bool) -> None:
        self.rehearses = True
        self.collects = collects
        self.suspect = None
        self.judged = False

    def _metrics(self, output: Tree, target: Tree) -> dict[str, float]:
        found = {name: float(value) for name, value in self.task.metrics(output, target).items()}
        for name in found:
            if not isinstance(name, str) or not NAME.fullmatch(name) or name in RESERVED:
                raise ConfigError(
                    "the name of a metric cannot be written, or a record has it already",
                    found=f"{name!r:.80}",
                    expected="letters without spaces and =, and none of "
                    f"{', '.join(sorted(RESERVED))}",
                )
        if self.rehearses and self._has_rows(output, target):
            twice = self.task.metrics(rows_twice(output, self.axis), rows_twice(target, self.axis))
            with self._suspecting():
                check_metrics(place_of(self.task, "metrics"), found, twice)
        return found

    @contextmanager
    def _suspecting(self) -> Iterator[None]:
        """Keep an error: of a loss that draws random numbers it is none."""
        try:
            yield
        except ConfigError as error:
            self.suspect = error

    def _evaluate(self, output: Any, target: Any, **factor: Any) -> Any:
        result = self.task.loss(output, target, **factor)
        checked = self.plain.checked(result)
        weight = checked[2]
        if weight is not None and self.declared is not None:
            raise self._weight_error("mean_over_entries, too")
        if self.rehearses:
            if weight != 0:
                Loss.scaled(result[1], 1.0, output)
            if (
                weight is None
                and self.declared is None
                and not (self.over_batch or self.task.per_microbatch)
            ):
                self.entries = [leaf.size for leaf in arrays.flatten(target)[0]]
            if (weight is not None or not self.over_batch) and self._has_rows(output, target):
                self._rehearse(checked, output, target, factor)
        return result

    def _has_rows(self, output: Tree, target: Tree) -> bool:
        """Whether each row may come twice: not those of a graph, whose edges and targets are not of
        nodes.
        """
        if not self.task.per_microbatch or self.over_batch:
            return True
        leaves = [leaf for tree in (output, target) for leaf in arrays.flatten(tree)[0]]
        return len({leaf.shape[:1] for leaf in leaves}) == 1

    def _rehearse(
        self, checked: Sequence[Any], output: Any, target: Any, factor: Mapping[str, float]
    ) -> None:
        """Suspect a loss that is no mean, or a weight that counts nothing."""
        weight = checked[2]

        def again(y: Any, goal: Any) -> Any:
            return self.plain.checked(self.task.loss(y, goal, **factor))

        twice = (
            [*each, *each] if self.over_batch else rows_twice(each, self.axis)
            for each in (output, target)
        )
        # as many calls on every rank
        once = again(output, target)
        doubled = again(*twice)
        if weight == 0 or self.judged:
            return
        self.judged = True
        if (
            once[2] != weight
            or not _near(once[0], checked[0], 1e-5)
            or _halved(checked, once, 1) is not None
        ):
            return  # it draws random numbers
        with self._suspecting():
            if weight is not None and not math.isclose(doubled[2] or 0, 2 * weight, rel_tol=1e-2):
                raise self._weight_error(f"{weight}, and {doubled[2]} with each row twice")
            if not self.over_batch:
                check_mean(
                    place_of(self.task, "loss"), once, doubled, ("row", "position")[self.axis]
                )

    def _weight_error(self, found: str) -> ConfigError:
        return ConfigError(
            f"{place_of(self.task, 'loss')}: the third value that a loss returns is not the "
            "weight of a micro-batch",
            found=found,
            expected="how many things the value is a mean over, such as float(mask.sum()), said "
            "in one way",
            remedy="return what else is of interest from `metrics`, and two values where all "
            "entries count alike",
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


# -- What a loss and its metrics are to be: means --------------------------------------------------


def numbers(leaf: Any) -> np.ndarray:
    """Return an array of any dtype as float64, complex numbers as pairs."""
    array = np.asarray(arrays.as_reals(arrays.on_host(leaf)))
    return array.astype(np.float64)


def rows_twice(tree: Tree, axis: int = 0) -> Tree:
    """Return a micro-batch with each row twice, or each position along axis 1."""
    both = merge([tree, tree], axis)
    return (
        tree._make(both) if hasattr(tree, "_make") else both
    )  # a loss may know its output as named


def check_mean(where: str, once: Sequence[Any], twice: Sequence[Any], what: str = "row") -> None:
    """Raise ConfigError unless a loss is a mean over rows, or positions, and its gradient that of a
    mean.

    With each row `twice` a mean stays as it is, and the gradient for each of the rows is half of
    what it was.
    """
    if not _near(once[0], twice[0], 1e-2):
        raise ConfigError(
            f"{where} returns a value that is no mean over the {what}s",
            found=f"{_number(once[0]):.6g}, and {_number(twice[0]):.6g} with each {what} twice",
            expected=f"the same: values of {'micro-batches' if what == 'row' else 'slices'} are "
            "averaged",
            remedy="divide by what you sum over; a loss that compares "
            + (
                "rows with each other has over_batch = True"
                if what == "row"
                else "positions needs slices = 1"
            ),
        )
    norms = _halved(once, twice)
    if norms is not None:
        raise ConfigError(
            f"{where} returns a gradient that is not that of a mean over the {what}s",
            found=f"norm {norms[0]:.6g}; {norms[1]:.6g} where each {what} is there twice",
            expected="half of it then, since the value is divided by twice as much",
            remedy="divide the gradient by what the value is divided by; "
            "`python -m mpipipe train FILE.py --check` compares it with differences",
        )


def _halved(
    result: Sequence[Any], other: Sequence[Any], factor: float = 2
) -> tuple[float, float] | None:
    """Return None where a gradient is `factor` times that of the same rows in the other result;
    else both norms.
    """
    for one, two in zip(*(arrays.flatten(each[1])[0] for each in (result, other))):
        if (
            one is None
            or two is None
            or (factor == 1 and not arrays.is_device(one) and np.array_equal(one, two))
        ):
            continue
        single = numbers(one)
        double = numbers(two)[tuple(map(slice, single.shape))]
        norms = float(np.linalg.norm(single)), float(np.linalg.norm(double))
        lost = 2 * SUBNORMAL * np.sqrt(single.size) if one.dtype == np.float16 else 0.0
        if np.linalg.norm(single - factor * double) > 1e-2 * norms[0] + lost:
            return norms
    return None


def _number(value: Any) -> float:
    return float(arrays.on_host(value).item() if arrays.is_array(value) else value)


def _near(one: Any, other: Any, relative: float) -> bool:
    return bool(np.isclose(_number(one), _number(other), rtol=relative, atol=1e-7))


def check_metrics(where: str, once: Mapping[str, float], twice: Mapping[str, float]) -> None:
    """Raise ConfigError for a metric that is a sum over rows."""
    for name, value in once.items():
        if value and math.isfinite(value) and np.isclose(twice[name], 2 * value, rtol=1e-3, atol=0):
            raise ConfigError(
                f"{where} returns a sum over the rows",
                found=f"{name} {value:.6g}, and {twice[name]:.6g} with each row twice",
                expected="means, which are averaged over micro-batches and ranks",
                remedy="divide it by what it is summed over",
            )
