"""Actions: what a rank does next."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

FORWARD = "F"
BACKWARD = "B"
INPUT_GRAD = "I"
WEIGHT_GRAD = "W"
RECOMPUTE = "R"
OPS = (FORWARD, BACKWARD, INPUT_GRAD, WEIGHT_GRAD, RECOMPUTE)


class Action(NamedTuple):
    """One computation of one micro-batch in one stage, written as ``2F0``.

    Parameters
    ----------
    stage : int
        Logical stage.
    op : str
        ``F`` forward, ``B`` full backward, ``I`` gradient of the input, ``W`` gradient of the
        weights; B = I + W. ``R`` is the forward once more: its F kept the input of the stage alone,
        from which R makes what the backward needs.
    microbatch : int
        Its index; 0 is the first. In a schedule with n slices that of a unit: slice s of
        micro-batch m is m n + s.
    """

    stage: int
    op: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.op}{self.microbatch}"


def cell(action: tuple[int, str, int], slices: int) -> str:
    """Write an action as ``2F0``, or with its slice as ``2F0.1``."""
    stage, op, unit = action
    if slices == 1:
        return f"{stage}{op}{unit}"
    return f"{stage}{op}{unit // slices}.{unit % slices}"


def place_of(unit: int | None, slices: int) -> dict[str, int | None]:
    """Return micro-batch and slice of a unit, as errors name them; no slice where there is one."""
    if slices == 1 or type(unit) is not int:
        return {"microbatch": unit}
    return {"microbatch": unit // slices, "slice": unit % slices}


Order: TypeAlias = "tuple[Action, ...]"
