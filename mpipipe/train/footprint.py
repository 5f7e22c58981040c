"""The memory of one rank in a training step, action by action: what it holds, and what the action takes on top.

F  leaves `saved` until B, or until I, which leaves `pending` until W
R  leaves it where F has kept its input alone, which stays as long, in a buffer of messages
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from mpipipe.pipeline.plan import receive_windows
from mpipipe.schedules import Schedule
from mpipipe.train.rehearsal import StageBytes


class Held(NamedTuple):
    """Bytes of one rank at the peak of its step, by what they are for."""

    activations: float
    messages: float
    scratch: float

    @property
    def total(self) -> float:
        """All of them."""
        return sum(self)


def peak_of_step(
    schedule: Schedule,
    rank: int,
    stages: Sequence[StageBytes],
    inputs: Sequence[int],
    windows: Callable[[int], int] | None = None,
) -> Held:
    """Walk through the order of a rank, and return what it holds at the peak.

    Parameters
    ----------
    schedule : what runs, with its R's
    rank : of the pipeline
    stages : bytes of all stages
    inputs : bytes of the input of a micro-batch, for all stages
    windows : `receive_windows` of the schedule, for those who ask for more than one rank
    """
    placement, last = schedule.placement, schedule.stages - 1
    window = (windows or receive_windows(schedule))(rank) if schedule.ranks > 1 else 0
    waiting = sum(_receives(schedule, rank, *action[:2]) for action in schedule.orders[rank])
    largest = max((inputs[stage + 1] for stage in schedule.stages_of(rank) if stage < last), default=0)
    largest = max([largest, *(inputs[stage] for stage in schedule.stages_of(rank) if stage)])
    best = Held(0, 0, 0)
    activations, local, leased, buffers, leaving = 0.0, 0.0, 0, 0, 0.0
    for stage, op, microbatch in schedule.orders[rank]:
        own = stages[stage]
        again = (stage, microbatch) in schedule.recomputed
        trained = schedule.has_backward(stage)
        receives = _receives(schedule, rank, stage, op)
        if receives:
            buffers = max(buffers, leased + min(window, waiting))
            waiting -= 1
            leased += 1
        elif op == "F" and stage and placement[stage - 1] == rank:
            local += inputs[stage]
        scratch = {"F": own.forward, "R": own.forward, "B": own.backward, "I": own.input_grad, "W": own.weight_grad}[op]
        held = Held(activations + local, buffers * largest, scratch + leaving)
        best = max(best, held, key=lambda each: each.total)
        leaving = 0.0
        if op == "F":
            activations += own.saved if trained and not again else 0.0
            leaving = own.output if stage < last and placement[stage + 1] != rank else 0.0
        elif op == "R":
            activations += own.saved
        elif op == "I":
            activations += own.pending - own.saved
        elif op == "W":
            activations -= own.pending
        elif op == "B":
            activations -= own.saved
        if op in "BI":
            leaving = inputs[stage] if stage and placement[stage - 1] != rank else 0.0
        if (op in "BW") or (op == "F" and not trained):  # the input of the forward, and the gradient of the output
            if stage and placement[stage - 1] == rank:
                local -= inputs[stage]
            leased -= (stage > 0 and placement[stage - 1] != rank) + (
                op != "F" and stage < last and placement[stage + 1] != rank
            )
    return best


def _receives(schedule: Schedule, rank: int, stage: int, op: str) -> bool:
    """Whether an action of this rank takes an array from another one."""
    if op == "F":
        return stage > 0 and schedule.placement[stage - 1] != rank
    return op in "BI" and stage < schedule.stages - 1 and schedule.placement[stage + 1] != rank
