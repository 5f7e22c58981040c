"""Schedules whose units are slices of sequences, made by one rule for all.

A causal sequence is cut into n slices, which pass the pipeline one after the other, so that one
long sequence fills it. Slice s attends to slices 0 ... s, so forwards of a sequence come in rising
order. The gradients of a slice's keys and values are whole once all later slices have gone back, so
backwards come in falling order. Sources: Sun et al. 2024 (Seq1F1B), arXiv:2406.03488; Li et al.
2025 (SlimPipe), arXiv:2504.14519.

    1F1B, 4 units    rank 0  F0 F1 .  .  B0--- F2 B1--- F3 B2--- .  B3---
                     rank 1  .  F0 B0--- F1 B1--- F2 B2--- F3 B3--- .  .

    2 slices each    rank 0  F0.0 F0.1 F1.0 .    .    B0.1------- F1.1 B0.0------- B1.1------- ...
                     rank 1  .    F0.0 F0.1 B0.1------- F1.0 B0.0------- F1.1 B1.1------- ...

The units take the places of the micro-batches: forwards as they are, and the k-th backward of a
stage is that of the k-th unit where each sequence counts backwards. The last slice of a sequence
must have gone forward before its first backward, so each backward comes after some forwards more,
as many on all ranks: n - 1 where a rank has one stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import count

from mpipipe.schedules.action import FORWARD, Action, Order
from mpipipe.schedules.replay import reached
from mpipipe.schedules.schedule import Schedule


def backward_unit(number: int, slices: int) -> int:
    """Return the unit whose backward has this number on a stage: in each sequence slices fall."""
    return number - number % slices + slices - 1 - number % slices


def in_slices(schedule: Schedule, slices: int) -> Schedule:
    """Make the micro-batches of a schedule slices of sequences: n of them are one.

    The result has the fewest forwards ahead of the backwards with which no ranks wait for each
    other. With all forwards first they do not, so there is a number.
    """
    if slices == 1:
        return schedule
    whole = replace(schedule, microbatches=schedule.microbatches // slices, slices=slices)
    if schedule.forwards_only:
        return whole
    parts = [_parts(order, slices) for order in schedule.orders]
    least = 0
    for part in parts:
        least = max(least, _needed(*part))
    for ahead in count(least):
        whole = replace(whole, orders=[_merged(*part, ahead) for part in parts])
        if reached(whole) == [*map(len, whole.orders)]:
            break
        assert ahead < schedule.chunks * whole.units, f"{schedule!r} does not run"
    return whole


Backwards = list[tuple[Action, int]]  # each with the number of forwards before it on its rank


def _parts(order: Order, slices: int) -> tuple[list[Action], Backwards]:
    """Return the forwards of a rank, and what is left, each with its unit."""
    forwards: list[Action] = []
    backwards: Backwards = []
    for action in order:
        if action.op == FORWARD:
            forwards.append(action)
        else:
            unit = backward_unit(action.microbatch, slices)
            backwards.append((action._replace(microbatch=unit), len(forwards)))
    return forwards, backwards


def _needed(forwards: Sequence[Action], backwards: Backwards) -> int:
    """Return how many more forwards must come before each backward."""
    numbers = {}
    for number, forward in enumerate(forwards, 1):
        numbers[forward.stage, forward.microbatch] = number
    needed = []
    for action, before in backwards:
        if action.op in "BI":
            needed.append(numbers[action.stage, action.microbatch] - before)
    return max(needed)


def _merged(forwards: Sequence[Action], backwards: Backwards, ahead: int) -> Order:
    done = 0
    order: list[Action] = []
    for action, before in backwards:
        order += forwards[done : before + ahead]
        done = max(done, before + ahead)
        order.append(action)
    return tuple(order)
