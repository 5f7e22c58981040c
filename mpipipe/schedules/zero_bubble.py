"""Schedules with a split backward: the stage before waits for I, and nobody waits for W, which fills the bubble.

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
    """Build ZB-H1: 1F1B whose weight gradients fill the bubble, in no more memory than 1F1B takes on rank 0.

    Rank r runs the W of a micro-batch r micro-batches after its I. Let f, b, w be the times of F, I, W, with w at most
    f and b. The bubble is (P-1)(f+b) - (min(M,P)-1)w, which is (P-1)(f+b-w) for M >= P. Every rank holds min(M, P)
    activations.
    Source: Qi et al. 2023, arXiv:2401.10241, schedule ZB-H1.

    Parameters
    ----------
    ranks, microbatches : int
        P and M, at least 1.

    Returns
    -------
    Schedule
        1F1B with a split backward.

    Raises
    ------
    ArgumentError
        A count is below 1.

    Examples
    --------
    >>> from mpipipe import schedules
    >>> print(schedules.zero_bubble_h1(2, 3).to_csv(), end="")
    0F0,0F1,0I0,0W0,0F2,0I1,0W1,0I2,0W2
    1F0,1I0,1F1,1I1,1W0,1F2,1I2,1W1,1W2
    """
    ranks, microbatches = at_least_one("ranks", ranks), at_least_one("microbatches", microbatches)
    orders = tuple(_order(rank, ranks, microbatches) for rank in range(ranks))
    return Schedule("zero_bubble_h1", looped_placement(ranks, 1), microbatches, orders)


def _order(rank: int, ranks: int, microbatches: int) -> tuple[Action, ...]:
    warmup = min(ranks - 1 - rank, microbatches)
    order = actions(FORWARD, (rank,), range(warmup))
    for microbatch in range(microbatches):
        order += actions(FORWARD, (rank,), range(microbatches)[warmup + microbatch : warmup + microbatch + 1])
        order.append(Action(rank, INPUT_GRAD, microbatch))
        if microbatch >= rank:
            order.append(Action(rank, WEIGHT_GRAD, microbatch - rank))
    order += actions(WEIGHT_GRAD, (rank,), range(max(0, microbatches - rank), microbatches))
    return tuple(order)
