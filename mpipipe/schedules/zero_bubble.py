"""Schedules that split the backward into I, which the stage before waits for, and W, which nobody waits for.

In the picture time runs to the right, each action takes one cell, and dots are idle time.
"""

from __future__ import annotations

from mpipipe.schedules.action import FORWARD, INPUT_GRAD, WEIGHT_GRAD, Action
from mpipipe.schedules.classic import actions
from mpipipe.schedules.schedule import Schedule, at_least_one, looped_placement


#     rank 0  F0 F1 F2 F3 .  .  .  I0 W0 F4 I1 W1 F5 I2 W2 I3 W3 I4 W4 I5 W5
#     rank 1  .  F0 F1 F2 .  .  I0 F3 I1 W0 F4 I2 W1 F5 I3 W2 I4 W3 I5 W4 W5
#     rank 2  .  .  F0 F1 .  I0 F2 I1 F3 I2 W0 F4 I3 W1 F5 I4 W2 I5 W3 W4 W5
#     rank 3  .  .  .  F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 W3 W4 W5
def zero_bubble_h1(ranks: int, microbatches: int) -> Schedule:
    """ZB-H1: 1F1B whose weight gradients fill the bubble, in no more memory than 1F1B takes on rank 0.

    Rank r runs the W of a micro-batch r micro-batches after its I. With f, b, w the times of F, I, W and w not above
    f or b, the bubble is (P-1)(f+b) - (min(M,P)-1)w: (P-1)(f+b-w) for M >= P. Every rank holds min(M, P) activations.
    Source: Qi et al. 2023, arXiv:2401.10241, schedule ZB-H1.

    Parameters
    ----------
    ranks, microbatches : P and M, at least 1

    Raises
    ------
    ArgumentError : a count below 1
    """
    ranks, microbatches = at_least_one("ranks", ranks), at_least_one("microbatches", microbatches)
    orders = tuple(_order(rank, ranks, microbatches) for rank in range(ranks))
    return Schedule("zero_bubble_h1", looped_placement(ranks, 1), microbatches, orders)


def _order(rank, ranks, microbatches) -> tuple[Action, ...]:
    warmup = min(ranks - 1 - rank, microbatches)
    order = actions(FORWARD, (rank,), range(warmup))
    for microbatch in range(microbatches):
        order += actions(FORWARD, (rank,), range(microbatches)[warmup + microbatch : warmup + microbatch + 1])
        order.append(Action(rank, INPUT_GRAD, microbatch))
        if microbatch >= rank:
            order.append(Action(rank, WEIGHT_GRAD, microbatch - rank))
    order += actions(WEIGHT_GRAD, (rank,), range(max(0, microbatches - rank), microbatches))
    return tuple(order)
