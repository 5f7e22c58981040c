"""Schedules on a V whose memory is chosen: one micro-batch's way through the ranks is a block, repeated at even times.

    rank 0  F . . . . . . . f i . . . . . . . I      F, f: forward down and up; i, I: gradient of the input
    rank 1  . F . . . . . f . . i . . . . . I .
    rank 2  . . F . . . f . . . . i . . . I . .      each step from rank to rank takes 1 cell in this block
    rank 3  . . . F . f . . . . . . i . I . . .

A block begins every 6 cells: the six actions of a micro-batch on a rank, F, f, i, I and two W's, fill that time. A rank
holds an activation from its F until its I, so a rank holds as many as the block is long, divided by 6. Steps that take
longer make longer blocks, with more memory and a smaller bubble. No two actions of a rank may fall on the same cell of
the six; the cells at the turns are chosen so.
Source: Qi et al. 2024, "Pipeline Parallelism with Controllable Memory", arXiv:2405.15362.

A block only gives the order of F's and I's on each rank. They then run as early as they can, and W's fill the waits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from mpipipe.schedules.filling import PATIENCES, Queues, filled
from mpipipe.schedules.kinds import Form
from mpipipe.schedules.schedule import Schedule, at_least_one
from mpipipe.schedules.simulate import EQUAL_COSTS, Costs
from mpipipe.schedules.v_shaped import v_placement

PERIOD = 6


class Block(NamedTuple):
    """The way of one micro-batch through the ranks, in cells of time.

    Attributes
    ----------
    steps : cells from rank to rank: of F down, f up, i down, I up
    turns : cells from F to f on the last rank, from f to i on rank 0, from i to I on the last rank
    """

    steps: tuple[int, int, int, int]
    turns: tuple[int, int, int]


SHORT, MIDDLE = (1, 1, 1, 1), (1, 2, 1, 2)
BLOCKS = 12  # number of blocks that are tried
TRIED = 8  # they are tried on so many micro-batches more than ranks


#     rank 0  F0 F1 .  .  .  .  .  f0 i0 F2 w0 .  .  f1 i1 I0 w1 F3 W0 f2 i2 I1 w2 W1 .  f3 i3 I2 w3 W2 .  .  .  I3 W3
#     rank 1  .  F0 .  .  .  .  f0 F1 .  i0 w0 .  f1 F2 I0 i1 W0 w1 f2 F3 I1 i2 W1 w2 f3 .  I2 i3 W2 w3 .  .  I3 W3 .
#     rank 2  .  .  F0 .  .  f0 .  .  F1 .  i0 f1 w0 I0 F2 W0 i1 f2 w1 I1 F3 W1 i2 f3 w2 I2 W2 .  i3 w3 .  I3 W3 .  .
#     rank 3  .  .  .  F0 f0 .  .  .  .  F1 f1 i0 I0 w0 W0 F2 f2 i1 I1 w1 W1 F3 f3 i2 I2 w2 W2 .  .  i3 I3 w3 W3 .  .
def v_min(ranks: int, microbatches: int, costs: Costs = EQUAL_COSTS) -> Schedule:
    """Build V-Min: a third of 1F1B's memory, at about two thirds of its bubble.

    A rank holds at most 2 floor((P+4)/3) chunk activations, half as many of a whole stage. Where F, I and W take the
    same time, the bubble is at most 2/3 of 1F1B's for M >= 2P.
    Source: Qi et al. 2024, arXiv:2405.15362, schedule V-Min.

    Parameters
    ----------
    ranks, microbatches : int
        P and M, at least 1.
    costs : Costs, optional
        Times of the 2P stages, for the places of the W's; by default one unit for each of F, I and W.

    Returns
    -------
    Schedule
        Two stages per rank, placed on a V.

    Raises
    ------
    ArgumentError
        A count is below 1, or the costs do not fit.

    Examples
    --------
    >>> from mpipipe import schedules
    >>> max(schedules.simulate(schedules.v_min(8, 16)).peak_activations), 2 * (8 + 4) // 3
    (8, 8)
    """
    ranks = at_least_one("ranks", ranks)
    return _repeated("v_min", ranks, at_least_one("microbatches", microbatches), costs, SHORT, _third)


#     rank 0  F0 F1 F2 .  .  .  .  f0 i0 F3 w0 f1 i1 w1 .  f2 i2 w2 I0 W0 .  f3 i3 I1 w3 W1 .  I2 W2 I3 W3
#     rank 1  .  F0 F1 .  .  .  f0 F2 .  i0 f1 F3 w0 i1 f2 w1 .  I0 i2 W0 f3 w2 I1 i3 W1 w3 I2 W2 I3 W3 .
#     rank 2  .  .  F0 F1 .  f0 .  .  F2 f1 i0 w0 F3 f2 i1 w1 I0 W0 .  f3 i2 I1 w2 W1 i3 I2 w3 I3 W2 W3 .
#     rank 3  .  .  .  F0 f0 F1 f1 .  .  F2 .  i0 f2 w0 F3 I0 i1 W0 f3 I1 w1 i2 I2 W1 w2 i3 I3 W2 w3 W3 .
def v_half(ranks: int, microbatches: int, costs: Costs = EQUAL_COSTS) -> Schedule:
    """Build V-Half: half of 1F1B's memory, at less than half of its bubble.

    A rank holds at most 2 floor((P+2)/2) chunk activations, half as many of a whole stage. Where F, I and W take the
    same time, the bubble is at most 1/2 of 1F1B's for M >= 2P.
    Source: Qi et al. 2024, arXiv:2405.15362, schedule V-Half.

    Parameters
    ----------
    ranks, microbatches : int
        P and M, at least 1.
    costs : Costs, optional
        Times of the 2P stages, for the places of the W's; by default one unit for each of F, I and W.

    Returns
    -------
    Schedule
        Two stages per rank, placed on a V.

    Raises
    ------
    ArgumentError
        A count is below 1, or the costs do not fit.

    Examples
    --------
    >>> from mpipipe import schedules
    >>> max(schedules.simulate(schedules.v_half(8, 16)).peak_activations), 8 + 2
    (10, 10)
    """
    ranks = at_least_one("ranks", ranks)
    return _repeated("v_half", ranks, at_least_one("microbatches", microbatches), costs, MIDDLE, _half)


def _third(ranks: int) -> int:
    return 2 * ((ranks + 4) // 3)


def _half(ranks: int) -> int:
    return 2 * ((ranks + 2) // 2)


def _repeated(
    name: str,
    ranks: int,
    microbatches: int,
    costs: Costs,
    steps: tuple[int, int, int, int],
    limit: Callable[[int], int],
) -> Schedule:
    """Try some blocks on few micro-batches, and on fewer ranks if there are many; then repeat the best one."""
    small = ranks if ranks < 2 * PERIOD else PERIOD + ranks % PERIOD  # its actions fall on the same cells of the six
    average = costs if small == ranks else costs.average(2 * ranks)
    few = Form(v_placement(small), min(microbatches, small + TRIED), average, None)
    tried = []
    for block in _blocks(small, steps):
        for patience in PATIENCES:
            made = filled(few, _queues(few, block), limit(small), patience)
            if made is not None:
                tried.append((made.score, block, patience))
    whole = Form(v_placement(ranks), microbatches, costs, None)
    for _, block, patience in sorted(tried):
        made = filled(whole, _queues(whole, block), limit(ranks), patience)
        if made is not None:
            return whole.schedule(name, made.orders)
    raise AssertionError(f"{name} on {ranks} ranks: no block fits {limit(ranks)} activations")


def _blocks(ranks: int, steps: tuple[int, int, int, int]) -> list[Block]:
    """List the shortest blocks without two actions of a rank on the same cell of the six."""
    cells = range(1, PERIOD + 1)
    blocks = (Block(steps, (first, second, third)) for first in cells for second in cells for third in cells)
    return sorted((each for each in blocks if _is_free(ranks, each)), key=lambda each: sum(each.turns))[:BLOCKS]


def _is_free(ranks: int, block: Block) -> bool:
    return all(len({cell % PERIOD for cell, _ in _cells(ranks, rank, block)}) == 4 for rank in range(ranks))


def _cells(ranks: int, rank: int, block: Block) -> list[tuple[int, int]]:
    """List (cell, kind) of one micro-batch on a rank; see kinds.py."""
    down, up, input_down, input_up = block.steps
    last = ranks - 1
    turn = last * down + block.turns[0]  # f on the last rank
    loss = turn + last * up + block.turns[1]  # i on rank 0
    end = loss + last * input_down + block.turns[2]  # I on the last rank
    forward_down, forward_up = 3 * rank, 3 * (2 * ranks - 1 - rank)
    return [
        (rank * down, forward_down),
        (turn + (last - rank) * up, forward_up),
        (loss + rank * input_down, forward_up + 1),
        (end + (last - rank) * input_up, forward_down + 1),
    ]


def _queues(form: Form, block: Block) -> Queues:
    queues = []
    for rank in range(len(form.own)):
        cells = sorted(
            (cell + PERIOD * microbatch, kind)
            for cell, kind in _cells(len(form.own), rank, block)
            for microbatch in range(form.microbatches)
        )
        queues.append([[kind for _, kind in cells]])
    return queues
