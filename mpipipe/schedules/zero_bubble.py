"""Schedules with a split backward: the stage before waits for I, and nobody waits for W, which fills the bubble.

In the pictures time runs to the right, each action takes one cell, and dots are idle time. Small letters are a rank's
second chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from mpipipe.schedules import logical_time
from mpipipe.schedules.action import FORWARD, INPUT_GRAD, WEIGHT_GRAD, Action
from mpipipe.schedules.classic import actions, groups_of
from mpipipe.schedules.on_demand import OrdersOnDemand
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
    schedule = interleaved_zero_bubble(ranks, 1, microbatches)
    return Schedule("zero_bubble_h1", schedule.placement, schedule.microbatches, schedule.orders)


#     rank 0  F0 F1 f0 f1 .  i0 w0 F2 i1 w1 F3 I0 W0 f2 I1 W1 f3 i2 w2 i3 w3 I2 W2 I3 W3
#     rank 1  .  F0 F1 f0 i0 f1 i1 w0 F2 I0 w1 F3 I1 W0 f2 i2 W1 f3 i3 w2 I2 w3 I3 W2 W3
def interleaved_zero_bubble(ranks: int, chunks: int, microbatches: int) -> Schedule:
    """Build interleaved 1F1B with a split backward: ZB-H1 with several chunks per rank.

    Rank r runs each W r I's after its own I. Let f, b, w be the times of F, I, W of a chunk, with w at most f and b.
    The bubble is (P-1)(f+b-w) for M >= P. Every rank holds at most min(MV, (V-1)g + P) chunk activations, where g is
    the size of the first group of micro-batches (see `interleaved_1f1b`).
    Source: Qi et al. 2023, arXiv:2401.10241, on the chunks of Narayanan et al. 2021, arXiv:2104.04473.

    Parameters
    ----------
    ranks, chunks, microbatches : int
        P, V and M, at least 1.

    Returns
    -------
    Schedule
        Interleaved 1F1B with a split backward.

    Raises
    ------
    ArgumentError
        A count is below 1.

    Examples
    --------
    >>> from mpipipe import schedules
    >>> print(schedules.interleaved_zero_bubble(2, 2, 2).to_csv(), end="")
    0F0,0F1,2F0,2F1,2I0,2W0,2I1,2W1,0I0,0W0,0I1,0W1
    1F0,1F1,3F0,3I0,3F1,3I1,3W0,1I0,3W1,1I1,1W0,1W1
    """
    ranks, chunks = at_least_one("ranks", ranks), at_least_one("chunks", chunks)
    microbatches = at_least_one("microbatches", microbatches)
    orders = _on_demand(ranks, chunks, microbatches, 1)
    return Schedule("interleaved_zero_bubble", looped_placement(ranks, chunks), microbatches, orders)


#     rank 0  F0 F1 F2 F3 F4 I0 W0 F5 I1 W1 I2 W2 I3 W3 I4 W4 I5 W5
#     rank 1  .  F0 F1 F2 I0 F3 I1 F4 I2 W0 F5 I3 W1 I4 W2 I5 W3 W4 W5
#     rank 2  .  .  F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 F5 I5 W1 W2 W3 W4 W5
def h2_orders(ranks: int, microbatches: int) -> OrdersOnDemand:
    """Make the orders of ZB-H2: no rank waits between its first action and its last, in twice the memory of 1F1B.

    That holds where F, I and W take the same time f, messages take none, and M is 2P - 1 or more. The makespan is then
    3Mf + (P-1)f. Every rank holds 2P - 1 activations.
    Source: Qi et al. 2023, arXiv:2401.10241, schedule ZB-H2.
    """
    return _on_demand(ranks, 1, microbatches, 2)


def _on_demand(ranks: int, chunks: int, microbatches: int, step: int) -> OrdersOnDemand:
    """Make orders whose warm-up shrinks by `step` F's from rank to rank, while W's come `step` I's later."""
    return OrdersOnDemand(
        ranks,
        partial(_order, ranks, chunks, microbatches, step),
        partial(logical_time.grouped, ranks, chunks, microbatches, step),
    )


def _order(ranks: int, chunks: int, microbatches: int, step: int, rank: int) -> tuple[Action, ...]:
    stages, groups = range(rank, chunks * ranks, ranks), groups_of(microbatches, ranks)
    forwards = [action for group in groups for action in actions(FORWARD, stages, group)]
    inputs = [action for group in groups for action in actions(INPUT_GRAD, reversed(stages), group)]
    warmup = min((chunks - 1) * len(groups[0]) + step * (ranks - 1 - rank), chunks * microbatches)
    return _split(forwards, inputs, warmup, delay=step * rank)


def _split(forwards: Sequence[Action], inputs: Sequence[Action], warmup: int, delay: int) -> tuple[Action, ...]:
    """Take `warmup` F's, then an F, an I and, `delay` I's later, its W in turn; at the end what is left."""
    weights = [Action(stage, WEIGHT_GRAD, microbatch) for stage, _, microbatch in inputs]
    order = [*forwards[:warmup]]
    for done, action in enumerate(inputs):
        order += [*forwards[warmup + done : warmup + done + 1], action]
        if done >= delay:
            order.append(weights[done - delay])
    return (*order, *weights[max(0, len(weights) - delay) :])
