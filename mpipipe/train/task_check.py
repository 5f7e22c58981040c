"""What is wrong in a task although nothing raises: rows that are not the same twice, and a loss that is no mean.

Both end in a training that says ok. So each training looks for them before its first step, and `--check` does, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Any, TypeAlias

import numpy as np

from mpipipe import arrays
from mpipipe.arrays import Tree
from mpipipe.errors import ConfigError, DataError, MpipipeError
from mpipipe.pipeline import merge

OPTIONAL = {"costs", "everywhere", "freeze", "groups", "layout", "metrics", "optimizer", "show", "unit", "units"}
NEAR = 1e-3  # relative differences of the same rows, made among other ones or on another processor, are below
SEEDED = (
    "let a row depend on `step` and its index alone: draw each from np.random.default_rng((step, row)), or the whole "
    "batch from np.random.default_rng(step), and return [rows] of it"
)

Traits: TypeAlias = "list[tuple[tuple[int, ...], float, float]]"  # shape, norm and a projection of each array


def numbers(leaf: Any) -> np.ndarray:
    """Return an array of any dtype as float64, complex numbers as pairs."""
    array = np.asarray(arrays.as_reals(arrays.download(leaf) if arrays.is_device(leaf) else leaf))
    return array.astype(np.float64)


def traits(tree: Tree) -> Traits | None:
    """Return numbers by which the same arrays are known on another rank; None for what is no tree of numbers."""
    try:
        found = [numbers(leaf).ravel() for leaf in arrays.flatten(tree)[0]]
        shapes = [tuple(leaf.shape) for leaf in arrays.flatten(tree)[0]]
    except (MpipipeError, AttributeError, TypeError, ValueError):
        return None
    return [
        (shape, float(np.linalg.norm(values)), float(values @ np.cos(np.arange(values.size))))
        for shape, values in zip(shapes, found)
    ]


def alike(a: Traits, b: Traits) -> bool:
    """Whether these are traits of the same arrays, up to rounding."""
    return [each[0] for each in a] == [each[0] for each in b] and all(
        abs(x - y) <= NEAR * max(norm, other) for (_, norm, *one), (_, other, *two) in zip(a, b)
        for x, y in zip((norm, *one), (other, *two))
    )  # fmt: skip


def check_row(where: str, row: int, whole: Tree, alone: Tree) -> None:
    """Raise DataError unless the last row of a batch is the row that comes where it alone is asked for."""
    if whole is None:
        return
    for of_many, of_one in zip(arrays.flatten(whole)[0], arrays.flatten(alone)[0]):
        many, one = numbers(of_many[-1:]), numbers(of_one)
        if many.shape != one.shape or np.linalg.norm(many - one) > NEAR * np.linalg.norm(one):
            raise DataError(
                f"{where} gives another row {row} when that is asked for alone",
                found=_differing(many, one),
                expected="the same row, whatever is asked for with it and however often",
                remedy=SEEDED,
            )


def _differing(many: np.ndarray, one: np.ndarray) -> str:
    if many.shape != one.shape:
        return f"shape {many.shape[1:]}, then {one.shape[1:]}"
    place = int(np.abs(many - one).argmax())
    at = ", ".join(map(str, np.unravel_index(place, many.shape)[1:]))
    return f"{many.flat[place]:.6g}, then {one.flat[place]:.6g} at ({at})"


def check_ranks(where: str, found: Sequence[tuple[int, dict[str, Traits | None]]]) -> None:
    """Raise DataError where ranks with the same share of a sample have got other arrays for row 0.

    `found` is, for each rank that reads, which share it has, and the traits of its inputs and targets.
    """
    for name in ("inputs", "targets"):
        first: dict[int, tuple[int, Traits]] = {}
        for rank, (share, each) in enumerate(found):
            mine = each.get(name)
            if mine is None:
                continue
            other, theirs = first.setdefault(share, (rank, mine))
            if not alike(mine, theirs):
                raise DataError(
                    f"{where} gives other {name} of row 0 on other ranks",
                    found=f"sums that differ from rank {other} to rank {rank}",
                    expected="the same rows on all ranks: one takes the inputs of a pipeline, another its targets",
                    remedy=f"{SEEDED}; data that are drawn when the file is loaded need a seed, too",
                )


def check_mean(
    where: str, result: Sequence[Any], again: Callable[[Tree, Tree], Any], output: Tree, target: Tree
) -> None:
    """Raise ConfigError unless a loss is a mean over rows, and its gradient that of a mean.

    With each row twice a mean stays as it is, and the gradient for each of the rows is half of what it was.
    """
    value, gradient = again(*(merge([each, each]) for each in (output, target)))[:2]
    once, twice = float(result[0]), float(value)
    if not np.isclose(once, twice, rtol=1e-2, atol=1e-7):
        raise ConfigError(
            f"{where} returns a value that is no mean over the rows",
            found=f"{once:.6g}, and {twice:.6g} with each row twice",
            expected="the same: values of micro-batches are averaged",
            remedy="divide by what you sum over; a loss that compares rows with each other has over_batch = True",
        )
    for one, two in zip(arrays.flatten(result[1])[0], arrays.flatten(gradient)[0]):
        if one is None or two is None:
            continue
        single, double = numbers(one), numbers(two)[: len(one)]
        if np.linalg.norm(single - 2 * double) > 1e-2 * np.linalg.norm(single):
            raise ConfigError(
                f"{where} returns a gradient that is not that of a mean over the rows",
                found=f"norm {np.linalg.norm(single):.6g}; {np.linalg.norm(double):.6g} where each row is there twice",
                expected="half of it then, since the value is divided by twice as much",
                remedy="divide the gradient by what the value is divided by; "
                "`python -m mpipipe train FILE.py --check` compares it with differences",
            )


def check_metric(where: str, name: str, once: float, twice: float) -> None:
    """Raise ConfigError for a metric that is a sum over rows."""
    if once and np.isclose(twice, 2 * once, rtol=1e-3, atol=0):
        raise ConfigError(
            f"{where} returns a sum over the rows",
            found=f"{name} {once:.6g}, and {twice:.6g} with each row twice",
            expected="means, which are averaged over micro-batches and ranks",
            remedy="divide it by what it is summed over",
        )


def misnamed(kind: type, known: type) -> list[str]:
    """Return lines about what a task has and nothing calls, where it is named nearly as something that would be."""
    own = {name for each in kind.__mro__ if issubclass(each, known) and each is not known for name in vars(each)}
    found = []
    for name in sorted(own - {*dir(known)}):
        meant = get_close_matches(name, OPTIONAL - own, n=1, cutoff=0.85)
        if meant:
            found.append(f"{kind.__name__} has `{name}`, which nothing here calls, and no `{meant[0]}`")
    return found
