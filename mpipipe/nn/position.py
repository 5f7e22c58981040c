"""Where a training stands, as far as layers that draw random numbers must know."""

from __future__ import annotations

from typing import NamedTuple


class Position(NamedTuple):
    """Where a training stands, as far as layers that draw random numbers must know.

    Parameters
    ----------
    step : int
        Number of the training step.
    microbatch : int
        Number of the micro-batch in the step.
    replica : int
        Number of the replica.
    training : bool
        Whether this is a training step: otherwise `Dropout` is the identity.
    """

    step: int = 0
    microbatch: int = 0
    replica: int = 0
    training: bool = True
