"""What one call is to do on this rank, what it holds while it runs, and what it gives."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mpipipe.arrays import Download, Tree
from mpipipe.comm.mailbox import Lease
from mpipipe.nn import Position
from mpipipe.pipeline.weighing import Weighing


class CallInputs(NamedTuple):
    """What one call is to do on this rank.

    Attributes
    ----------
    training : whether backwards follow
    inputs : inputs of each micro-batch, on the rank of stage 0; else empty
    targets : targets of each micro-batch, on the rank of the last stage; None if no loss is wanted
    weighing : share of each micro-batch in the loss, on that rank
    scale : factor on all gradients
    positions : Position of each micro-batch, for layers that draw random numbers
    """

    training: bool
    inputs: list[Tree]
    targets: list[Tree] | None
    weighing: Weighing
    scale: float
    positions: list[Position]


@dataclass(slots=True)
class CallState:
    """What this rank holds while a call runs.

    Attributes
    ----------
    saved : (stage, micro-batch) -> (what backward needs, lease), from forward until backward; the input until an R
    pending : the same from input gradient until weight gradient
    local : (edge, micro-batch, "F" or "B") -> tree for an action on this rank
    loss_gradients : micro-batch -> gradient of the loss
    alive, peak : whole activations (stage, micro-batch) held now, and at most
    under_way, peak_under_way : the same with those of which the input alone is kept, for an R
    losses_underway : (micro-batches, copies of their losses to the host), once the device was asked for all losses
    losses, outputs, input_gradients : results, by micro-batch; empty if they do not arise
    """

    inputs: CallInputs
    saved: dict[tuple[int, int], tuple[Any, Lease]] = field(default_factory=dict)
    pending: dict[tuple[int, int], tuple[Any, Lease]] = field(default_factory=dict)
    local: dict[tuple[int, int, str], Tree] = field(default_factory=dict)
    loss_gradients: dict[int, Tree] = field(default_factory=dict)
    alive: int = 0
    peak: int = 0
    under_way: int = 0
    peak_under_way: int = 0
    losses_underway: tuple[list[int], Download] | None = None
    losses: dict[int, Any] = field(default_factory=dict)
    outputs: dict[int, Tree] = field(default_factory=dict)
    input_gradients: dict[int, Tree] = field(default_factory=dict)

    def count_activation(self) -> None:
        """One more whole activation is held."""
        self.alive += 1
        self.peak = max(self.peak, self.alive)

    def drop_activation(self) -> None:
        """The last backward of an activation has ended."""
        self.alive -= 1
        self.under_way -= 1
