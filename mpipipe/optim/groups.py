"""Groups of parameters with a learning rate and a weight decay of their own, as pieces of the flat buffers.

flat     | 0.weight | 0.gain | 2.weight | 2.bias |        Group("*.bias", lr=2): two pieces, and two calls
pieces   |             lr             |   2 lr   |        of the kernel that updates them
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NamedTuple

from mpipipe.arrays import Shape
from mpipipe.errors import ArgumentError
from mpipipe.optim.stages import Updated


@dataclass(frozen=True)
class Group:
    """Parameters with a learning rate or a weight decay of their own, for an optimizer.

    Parameters
    ----------
    match : str or callable
        Which parameters: a pattern of names as in a shell, such as `"*.bias"`, or a function `match(name, shape)` that
        returns a bool. A tied parameter goes by its tie, which is the same in all places.
    lr : float
        Factor of the optimizer's learning rate, and of what overrides that for a step. 0 keeps them as they are.
    weight_decay : float, optional
        In place of the optimizer's, and for vectors too. By default that of the optimizer, where a parameter decays.

    Raises
    ------
    ArgumentError
        `lr` or `weight_decay` is negative or not finite.

    Examples
    --------
    >>> from mpipipe import nn, optim
    >>> stage = nn.Stage([nn.LayerNorm(2)])
    >>> stage.gradients["0.gain"][...] = stage.gradients["0.bias"][...] = 1
    >>> optim.SGD([stage], lr=0.5, groups=[optim.Group("*.bias", lr=2)]).step()
    >>> stage.parameters["0.gain"], stage.parameters["0.bias"]
    (array([0.5, 0.5], dtype=float32), array([-1., -1.], dtype=float32))
    """

    match: str | Callable[[str, Shape], bool]
    lr: float = 1.0
    weight_decay: float | None = None

    def __post_init__(self) -> None:
        for name, number in (("lr", self.lr), ("weight_decay", self.weight_decay or 0.0)):
            if not 0 <= number < math.inf:
                raise ArgumentError(f"{name} of a group", found=repr(number), expected="0 or more, and finite")

    def _has(self, name: str, shape: Shape) -> bool:
        return fnmatchcase(name, self.match) if isinstance(self.match, str) else bool(self.match(name, shape))


class Piece(NamedTuple):
    """A part of the flat buffers with one learning rate.

    Attributes
    ----------
    at : its place
    lr : factor of the learning rate
    weight_decay : None for that of the optimizer
    ranges : (start, stop, decay) within the piece; None if all of it decays
    """

    at: slice
    lr: float
    weight_decay: float | None
    ranges: list[tuple[int, int, bool]] | None


def checked(groups: Sequence[Group]) -> tuple[Group, ...]:
    """Return groups as a tuple; raises ArgumentError for anything else in it."""
    strange = [type(group).__name__ for group in groups if not isinstance(group, Group)]
    if strange:
        raise ArgumentError("groups of an optimizer", found=", ".join(strange), expected="a list of optim.Group")
    return tuple(groups)


def pieces(stage: Updated, groups: Sequence[Group]) -> list[Piece]:
    """Cut the flat buffers of a stage into the longest pieces of equal settings; gaps go with what is before them."""
    size = stage.parameters.flat.size
    if not groups:
        return [Piece(slice(0, size), 1.0, None, stage.decay_ranges)]
    ties = {name: key for key, names in getattr(stage, "ties", {}).items() for name in names}
    pair = getattr(stage.parameters, "parts", 1) - 1  # an axis that complex parameters have here alone
    cuts: list[tuple[int, float, float | None]] = [(0, 1.0, None)]
    for name, start in sorted(stage.parameters.offsets.items(), key=lambda entry: entry[1]):
        shape = stage.parameters[name].shape
        found = next((g for g in groups if g._has(ties.get(name, name), shape[: len(shape) - pair])), Group("*"))
        if 0 not in shape and cuts[-1][1:] != (found.lr, found.weight_decay):
            cuts = [cut for cut in cuts if cut[0] != start] + [(start, found.lr, found.weight_decay)]
    stops = [*(start for start, _, _ in cuts[1:]), size]
    return [
        Piece(slice(start, stop), lr, decay, _within(stage.decay_ranges, start, stop) if decay is None else None)
        for (start, lr, decay), stop in zip(cuts, stops)
    ]


def _within(ranges: Sequence[tuple[int, int, bool]], start: int, stop: int) -> list[tuple[int, int, bool]]:
    return [(max(a, start) - start, min(b, stop) - start, decay) for a, b, decay in ranges if a < stop and b > start]
