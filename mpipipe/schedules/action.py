"""One action of a schedule: what a rank does next."""

from __future__ import annotations

from typing import NamedTuple

FORWARD, BACKWARD, INPUT_GRAD, WEIGHT_GRAD, RECOMPUTE = "F", "B", "I", "W", "R"
OPS = (FORWARD, BACKWARD, INPUT_GRAD, WEIGHT_GRAD, RECOMPUTE)


class Action(NamedTuple):
    """One computation of one micro-batch in one stage; its text form is ``2F0``: stage, op, micro-batch.

    Parameters
    ----------
    stage : int
        Logical stage; 0 is the first.
    op : str
        ``F`` forward, ``B`` full backward, ``I`` gradient of the input, ``W`` gradient of the weights; B = I + W. ``R``
        is the forward once more: its F kept the input of the stage alone, from which R makes what the backward needs.
    microbatch : int
        Index of the micro-batch.

    Examples
    --------
    >>> from mpipipe.schedules import Action
    >>> str(Action(stage=2, op="F", microbatch=0))
    '2F0'
    """

    stage: int
    op: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.op}{self.microbatch}"
