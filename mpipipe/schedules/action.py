"""One action of a schedule: what a rank does next."""

from __future__ import annotations

from typing import NamedTuple

FORWARD, BACKWARD, INPUT_GRAD, WEIGHT_GRAD = "F", "B", "I", "W"
OPS = (FORWARD, BACKWARD, INPUT_GRAD, WEIGHT_GRAD)


class Action(NamedTuple):
    """One computation of one micro-batch in one stage; its text form is ``2F0``: stage, op, micro-batch.

    Attributes
    ----------
    stage : logical stage, 0 is the first
    op : ``F`` forward, ``B`` full backward, ``I`` gradient of the input, ``W`` gradient of the weights; B = I + W
    microbatch : index of the micro-batch
    """

    stage: int
    op: str
    microbatch: int

    def __str__(self):
        return f"{self.stage}{self.op}{self.microbatch}"
