"""The loss of a task as that of a pipeline, with the means of its metrics."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from inspect import signature
from typing import Any, NamedTuple

import numpy as np

from mpipipe import arrays, nn
from mpipipe.arrays import Array, Tree
from mpipipe.errors import ConfigError
from mpipipe.job import RankGroup
from mpipipe.pipeline import Loss
from mpipipe.train.report import FIELDS
from mpipipe.train.shard import Shard
from mpipipe.train.task import Task
from mpipipe.train.task_calls import call, place_of

# Records, and the last line, have these names already.
RESERVED = {*FIELDS, "metrics", "steps", "time", "seconds"}
NAME = re.compile(r"[^\s=]+")


def new_sums() -> dict[str, Array]:
    """Return a dict in which sums of two numbers begin with zeros."""
    return defaultdict(partial(np.zeros, 2))


class Sample(NamedTuple):
    """A micro-batch that a loss was called with, and its weight, if the loss returns one."""

    output: Any
    target: Any
    keywords: Mapping[str, object]
    weight: float | None


def loss_of(task: Task, stage: nn.Stage, rows: int, shard: Shard) -> Callable[..., Any]:
    """Return the loss after the last stage, for this many rows in a micro-batch."""
    return task.loss_for(stage, rows, shard) or TaskLoss(task, shard.cut is not None)


class TaskLoss:
    """The loss of a task as that of a pipeline.

    While it has `sums` it adds up the metrics of the task. While `samples` is true it remembers
    one micro-batch: the first whose weight is not 0, else the last.
    """

    def __init__(self, task: Task, in_slices: bool = False) -> None:
        self.task = task
        # The loss is to be a mean along this axis; for whole sequences along the other one, too.
        self.axis = int(in_slices)
        self.plain = Loss(task.loss)
        self.has_metrics = getattr(task.metrics, "__func__", None) is not Task.metrics
        # Of metrics times weights, and of weights, while somebody wants their means.
        self.sums: dict[str, Array] | None = None
        self.samples = False
        self.sample: Sample | None = None
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
                share = sum(leaf.size for leaf in arrays.flatten(goal)[0])
            # Nothing counts in a micro-batch without a share.
            metrics = {}
            if share:
                metrics = self.metrics(y, goal)
            for name, mean in metrics.items():
                self.sums[name] += mean * share, share
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
        y = arrays.mapped(arrays.on_host, output)
        goal = arrays.mapped(arrays.on_host, target)
        return call(self.task, "metrics", y, goal, by=self._named)

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
        totals = new_sums()
        for sums in group.gather("train: the metrics", self.sums):
            for name, both in sums.items():
                totals[name] += both
        self.sums = None
        return {name: float(value / weight) for name, (value, weight) in totals.items()}
