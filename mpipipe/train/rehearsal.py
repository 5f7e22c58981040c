"""One batch before the first step, or before a job is queued: mistakes that raise nothing.

Rows that ranks draw without a seed, layers that mix rows, and a loss that is no mean end in a
training that says ok. Each training looks for them before its first step. `--check` looks before a
job is queued, and compares gradients, too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, TypeAlias

import numpy as np

from mpipipe import arrays, nn
from mpipipe.adapters import ForeignLayer
from mpipipe.arrays import Array, Tree
from mpipipe.attention import Local
from mpipipe.errors import ArgumentError, ConfigError, DataError, MpipipeError, StageError
from mpipipe.exchange import AllToAll, HaloExchange
from mpipipe.job import Communicator, found_by_all, group_of
from mpipipe.pipeline import Loss, Pipeline, merge, rows_of_any
from mpipipe.train.shard import Shard
from mpipipe.train.task import Pair, Task
from mpipipe.train.task_calls import (
    Reader,
    Sample,
    TaskLoss,
    call,
    chain,
    example,
    place_of,
    read,
    where,
)

# Relative differences of the same numbers: made among other rows in float64, made in the precision
# of a training, and read again on another processor.
NEAR = 1e-3
COARSE = 1e-2
ROUGH = 1e-6
# Absolute differences of numbers of size one; a small number of float16 has few bits.
ROUNDING = 1e-12
SUBNORMAL = 2 * float(np.finfo(np.float16).smallest_subnormal)
# Evaluations by which a loss is known that draws random numbers. With two values to draw from, all
# of a micro-batch are alike, and those of all its rows are not, once in 2^17.
REPEATS = 6
# Of the inputs and the targets of a row: a number for each array, or None.
Fingerprints: TypeAlias = "list[list[float] | None]"
RIGHT_IN_PARTS = HaloExchange, AllToAll, nn.AdaptiveNorm, nn.Patches
SEEDED = (
    "let a row depend on `step` and its index alone: draw each from np.random.default_rng((step, "
    "row)), or the whole batch from np.random.default_rng(step), and return [rows] of it; data "
    "that are drawn when the file is loaded need a seed, too"
)


def seq_warning(task: Task, shard: Shard) -> str:
    """Name the layers that see a part of each row alone, in a line for the start of a training."""
    apart = set()
    for outer in task.outline:
        for _, layer in outer.walk(""):
            if _sees_part_alone(layer, shard):
                apart.add(type(layer).__name__)
    if shard.size == 1 or not apart:
        return ""
    return (
        f"mpipipe: note: {', '.join(sorted(apart))}: on each rank of seq they see its own part of "
        "a row alone, which is right where they work along an axis that is not shared, or at each "
        "point by itself; mpipipe.exchange.HaloConv and HaloExchange, and shard.attend, take what "
        "they need from other ranks"
    )


def _sees_part_alone(layer: nn.Layer, shard: Shard) -> bool:
    """True if a layer may mix positions and, as far as is known, asks no other rank for theirs."""
    asks = isinstance(layer, RIGHT_IN_PARTS)
    if isinstance(layer, ForeignLayer):
        asks = shard.attended is not None
    elif isinstance(layer, nn.LearnedPositions):
        asks = layer.positions is not None
    alone = isinstance(getattr(layer, "attend", None), (Local, type(None)))
    return nn.mixes(layer) and alone and not asks


# -- Rows: the same on all ranks, and whatever is asked for with them ------------------------------


def row_alone(task: Task, method: str, number: int, row: int, shard: Shard) -> Fingerprints:
    """Return the fingerprints of a row that is asked for alone."""
    rows = range(row, row + 1)
    pair = call(task, method, number, rows, shard, when=where(method, number, rows))
    return list(map(row_fingerprint, pair[:2]))


def check_rows(task: Task, method: str, row: int, alike: Sequence[Fingerprints]) -> None:
    """Raise DataError where a row is another one on another rank, or out of a batch.

    One rank takes the inputs of a pipeline, another one the targets: rows that are drawn without a
    seed would not belong together.
    """
    for name, side in zip(("inputs", "targets"), zip(*alike)):
        first, *others = [norms for norms in side if norms is not None] or [[]]
        for other in others:
            if len(other) == len(first) and np.allclose(other, first, rtol=ROUGH, atol=0):
                continue
            raise DataError(
                f"{place_of(task, method)} gives other {name} of row {row} on other ranks, or "
                "when that is asked for alone",
                found=f"fingerprints {first} and {other}",
                expected="the same row, whatever is asked for with it and however often: one "
                "rank takes the inputs of a pipeline, another its targets",
                remedy=SEEDED,
            )


def row_fingerprint(tree: Tree) -> list[float] | None:
    """Return a number for each array; None for what is no tree of numbers, as on other ranks."""
    norms = []
    try:
        for leaf in arrays.flatten(tree)[0]:
            values = numbers(leaf).ravel()
            # A factor for each place tells arrays with the same values in another order.
            norms.append(float(np.linalg.norm(values * (1 + np.arange(values.size)))))
    except (MpipipeError, AttributeError, TypeError, ValueError):
        return None
    return norms


def numbers(leaf: object) -> Array:
    """Return an array of any dtype as float64, complex numbers as pairs."""
    return np.asarray(arrays.as_reals(arrays.on_host(leaf)), np.float64)


def difference(
    whole: Tree, parts: Sequence[Tree], near: float, shares: Sequence[float], axis: int = 0
) -> str:
    """Return norms of arrays and of their parts, each times its share, where they differ, else "".

    Arrays of other shapes are left out, and integers: they may be numbers of nodes of a graph.
    """
    leaves = [arrays.flatten(getattr(tree, "main", tree))[0] for tree in (whole, *parts)]
    for leaf, *pieces in zip(*leaves):
        if leaf is None or not arrays.is_floating(leaf.dtype):
            continue
        scaled = [share * numbers(piece) for share, piece in zip(shares, pieces)]
        joined = np.concatenate(scaled, axis)
        values = numbers(leaf)
        least = ROUNDING
        if leaf.dtype == np.float16:
            least = SUBNORMAL
        norm = np.linalg.norm(joined)
        if values.shape == joined.shape and np.linalg.norm(
            values - joined
        ) > near * norm + least * np.sqrt(values.size):
            return f"norm {np.linalg.norm(values):.6g}, and {norm:.6g} of its parts"
    return ""


# -- A loss and its metrics: means over rows -------------------------------------------------------


def check_mean(
    loss: TaskLoss,
    parts: Sequence[Pair],
    whole: Pair,
    near: float,
    how: str,
    keywords: Mapping[str, object],
) -> None:
    """Compare the loss of a micro-batch with the mean, by weights, of those of its parts.

    Raises ConfigError where they differ, but for a loss that draws random numbers. The number of
    evaluations does not depend on results: a loss may exchange messages.
    """
    series = []
    for _ in range(REPEATS):
        losses = [loss.task.loss(*pair, **keywords) for pair in (whole, *parts)]
        values, gradients, given = zip(*map(loss.plain.checked, losses))
        series.append(list(map(_number, values)))
    weight, *weights = given
    stays = np.allclose(series, series[0], rtol=1e-5, atol=1e-7, equal_nan=True)
    if not stays or (loss.over_batch and weight is None):
        return
    if weight is None:
        weights = [rows_of_any(target) for _, target in parts]
    total = sum(weights)
    if not total:
        return
    if weight is not None and not math.isclose(weight, total, rel_tol=COARSE):
        raise loss.weight_error(f"{weights[0]}, and {weight} {how}")
    if loss.over_batch:
        return
    what = ("row", "position")[loss.axis]
    of_whole, *of_parts = series[0]
    # What counts nothing may have the value NaN.
    mean = np.dot(weights, np.nan_to_num(of_parts)) / total
    if not np.isclose(of_whole, mean, rtol=near, atol=1e-7):
        raise ConfigError(
            f"{place_of(loss.task, 'loss')} returns a value that is no mean over the {what}s",
            found=f"{mean:.6g}, and {of_whole:.6g} {how}",
            expected="the same, or the result depends on --microbatches: values of micro-batches, "
            "and of slices, are averaged",
            remedy="divide by what you sum over, or return as a third value the weight of the "
            "micro-batch, by which means are averaged; a loss that compares rows with each other "
            "has over_batch = True, and one that compares positions needs slices = 1",
        )
    norms = ""
    if all(weights):
        shares = [share / total for share in weights]
        norms = difference(gradients[0], gradients[1:], near, shares, loss.axis)
    if norms:
        raise ConfigError(
            f"{place_of(loss.task, 'loss')} returns a gradient that is not that of a mean over the "
            f"{what}s",
            found=f"{norms}, {how}",
            expected="gradients of rows that fall as their number grows, since the value is "
            "divided by it",
            remedy="divide the gradient by what the value is divided by; "
            "`python -m mpipipe train FILE.py --check` compares it with differences",
        )


def _number(value: Any) -> float:
    return float(arrays.on_host(value).item() if arrays.is_array(value) else value)


def check_sample(loss: TaskLoss, sample: Sample) -> None:
    """Raise ConfigError for a loss that is no mean: with each row twice a mean stays."""
    output, target, keywords, weight = sample
    if weight != 0:
        Loss.scaled(loss.task.loss(output, target, **keywords)[1], 1.0, output)
    twice = _twice(output, target, loss.axis)
    if twice is None:
        return
    how = f"with each {('row', 'position')[loss.axis]} twice"
    check_mean(loss, [(output, target)] * 2, twice, COARSE, how, keywords)


def check_metrics(loss: TaskLoss, sample: Sample) -> None:
    """Raise ConfigError for a metric that is a sum over rows."""
    if not loss.has_metrics or sample.weight == 0:
        return
    output, target = sample[:2]
    if loss.over_batch:
        output = output[0]
        target = target[0]
    twice = _twice(output, target, loss.axis)
    if twice is None:
        return
    doubled = loss.metrics(*twice)
    for name, value in loss.metrics(output, target).items():
        if abs(doubled[name] - 2 * value) < 2 * NEAR * abs(value):
            raise ConfigError(
                f"{place_of(loss.task, 'metrics')} returns a sum over the rows",
                found=f"{name} {value:.6g}, and {doubled[name]:.6g} with each row twice",
                expected="means, which are averaged over micro-batches and ranks",
                remedy="divide it by what it is summed over",
            )


def _twice(output: Tree, target: Any, axis: int) -> Pair | None:
    """Return a micro-batch with each row twice, or each position along axis 1, or a batch twice.

    None for graphs whose targets are not of their nodes: these share no rows.
    """
    # The loss is over the batch.
    if isinstance(output, list):
        return output * 2, target * 2
    rows = rows_of_any(output)
    if rows == 0 or rows != rows_of_any(target):
        return None
    outputs = merge([output, output], axis)
    # A loss may know its output by names.
    if hasattr(output, "_make"):
        outputs = output._make(outputs)
    return outputs, merge([target, target], axis)


# -- A rehearsal -----------------------------------------------------------------------------------


def rehearse(reader: Reader, pipeline: Pipeline, step: int, loss: TaskLoss) -> None:
    """Run the first batches forward, before anything is written, and judge the loss; collective."""
    task = reader.task
    group = group_of(reader.mesh.comm)
    pipe = group_of(reader.mesh.pipe)
    for method, number in (("batch", step), ("validation", 0)):
        alone: Fingerprints = []
        with group.raise_together(f"train: the first {method}"):
            pair = reader.pair(method, number)
            if reader.reads and pipe.size > 1:
                alone = row_alone(task, method, number, 0, reader.shard)
        alike = list(filter(None, pipe.gather("train: the first row", alone)))
        with group.raise_together("train: the first row on all ranks"):
            check_rows(task, method, 0, alike)
        loss.samples = True
        loss.sample = None
        call(task, "layers", *pair, when=f" in the {method}", by=pipeline.evaluate)
        loss.samples = False
        sample = loss.sample
        with group.raise_together("train: the loss"):
            if sample is not None:
                call(task, "loss", loss, sample, by=check_sample)
                check_metrics(loss, sample)
    # A loss that says nothing is a mean over entries, of which each array has the same share.
    says = loss.declared is not None or loss.over_batch or task.per_microbatch
    entries: list[int] = []
    if sample is not None and sample.weight is None and not says:
        entries = [leaf.size for leaf in arrays.flatten(sample.target)[0]]
    of_ranks = list(filter(None, group.gather("train: the entries of targets", entries)))
    for sizes in of_ranks:
        first = of_ranks[0]
        if any(size * first[0] != sizes[0] * other for size, other in zip(sizes, first)):
            problem = ConfigError(
                "targets of several arrays, of which ranks have parts that differ by other numbers",
                found=f"{', '.join(map(str, first))} and {', '.join(map(str, sizes))} entries",
                expected="a loss that says how many things its value is a mean over",
                remedy="return (value, doutput, weight), or set loss.mean_over_entries = True or "
                "False (rows)",
            )
            raise found_by_all(problem, [group])


# -- `train --check`: one batch on one rank, before a job is queued --------------------------------


# A line about a part of a task, and whether that is right.
Finding: TypeAlias = "tuple[str, bool]"


def check_task(task: Task, seed: int, comm: Communicator, rows: int = 2) -> tuple[list[str], bool]:
    """Rehearse one batch of `rows` in float64, on one rank, and compare gradients with differences.

    Return lines about the task, and whether all is right.
    """
    shard = task.shard(comm, 1)
    shard.dtype = arrays.dtype("float64")
    shard.seed = seed
    for method in ("batch", "validation"):
        batch = read(task, method, 0, range(rows), shard)[:2]
        last = list(map(row_fingerprint, _single(task, method, rows - 1, shard, batch)))
        alike = row_alone(task, method, 0, rows - 1, shard), last
        check_rows(task, method, rows - 1, alike)
    inputs, target = example(task, rows, 1, shard)
    singles = [_single(task, "batch", row, shard, (inputs, target)) for row in range(rows)]
    # What has become of each row by itself, and of its names.
    alone = [x for x, _ in singles]
    names: list[dict[str, Tree]] = [{} for _ in singles]
    still = nn.Position(training=False)
    lines = []
    right = True
    for place, (stage, x, output) in enumerate(chain(task, shard, rows)):
        module: object = stage.layers[0]
        if isinstance(module, ForeignLayer):
            module = module.entry
        name = f"layers[{place}] {type(module).__name__}"
        for row, values in enumerate(names):
            alone[row] = nn.handed(alone[row], values, stage.takes)
            alone[row] = call(task, "layers", alone[row], still, by=stage.forward)[0]
        # After the rows: a layer may have state, such as a running mean.
        line, fine = _checked(name, stage, x, nn.Position())
        lines.append(line)
        right = right and fine
        if right and difference(output, alone, NEAR, [1.0] * rows):
            right = False
            lines.append(
                f"{name}: gives other rows for a batch than for each row alone, so the result "
                "depends on --microbatches; "
                "let no row change another one: take norms and means of each row by itself"
            )
    parts: list[Pair] = []
    if right:
        parts = [(x, goal) for x, (_, goal) in zip(alone, singles)]
    line, fine = _checked_loss(TaskLoss(task), output, target, parts)
    return [*lines, line], right and fine


def _single(task: Task, method: str, row: int, shard: Shard, pair: Pair) -> Pair:
    """Return inputs and targets of one row of a pair."""
    if task.per_microbatch:
        return read(task, method, 0, range(row, row + 1), shard)[:2]
    inputs, targets = (arrays.mapped(lambda leaf: leaf[row : row + 1], tree) for tree in pair)
    return inputs, targets


def _checked(name: str, stage: object, x: Tree, position: nn.Position | None = None) -> Finding:
    try:
        differences = nn.check_gradients(stage, x, position=position)
    except StageError as error:
        return f"{name}: {error.found}", False
    except ArgumentError as error:
        if "nothing to differentiate" not in error.message:
            raise
        return f"{name}: nothing to differentiate", True
    return f"{name}: right to {max(differences.values()):.0e} ({', '.join(differences)})", True


def _checked_loss(loss: TaskLoss, output: Tree, target: Tree, alone: Sequence[Pair]) -> Finding:
    """Return a line about the loss and its metrics; `alone` are outputs and targets of each row."""
    training: Mapping[str, object] = {}
    still: Mapping[str, object] = {}
    end = ""
    if loss.plain.takes_position:
        training = {"position": nn.Position()}
        still = {"position": nn.Position(training=False)}
        end = "; random numbers that it draws are those of step, micro-batch and replica"

    def forward(x: Tree) -> tuple[Array, Tree]:
        value, gradient = loss(x, target, **training)[:2]
        return np.reshape(np.asarray(value, np.float64), 1), gradient

    def backward(dy: Array, saved: Tree) -> Tree:
        return arrays.mapped(lambda leaf: dy[0] * leaf, saved)

    # A stage whose output is the value, and whose backward gives the gradient.
    line, fine = _checked("loss", SimpleNamespace(forward=forward, backward=backward), output)
    line += end
    if not fine or loss.over_batch:
        return line, fine
    how = f"for {len(alone)} rows, where the first is the mean of each alone"
    whole = output, target
    try:
        call(loss.task, "loss", loss, alone, whole, NEAR, how, still, by=check_mean)
    except ConfigError as error:
        return f"loss: {error.message}; {error.found}; {error.expected}; {error.remedy}", False
    check_metrics(loss, Sample(output, target, still, None))
    return line, True
