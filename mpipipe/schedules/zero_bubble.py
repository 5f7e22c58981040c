"""Schedules with a split backward: the stage before waits for I, and no rank waits for W, which fills the bubble.

In the pictures time runs to the right, each action takes one cell, and dots are idle time. Small letters are a rank's
second chunk. P is `ranks`, V `chunks` and M `microbatches`; a count below 1 raises ArgumentError. `slices` are those of
classic.py.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import TypeAlias

from mpipipe.schedules.action import FORWARD, INPUT_GRAD, WEIGHT_GRAD, Action, OrdersOnDemand
from mpipipe.schedules.checks import counts
from mpipipe.schedules.classic import forth_and_back, grouped, looped
from mpipipe.schedules.schedule import Schedule
from mpipipe.schedules.search.orders import PATIENCES, fastest, fill_waits, score_of
from mpipipe.schedules.search.problem import OrderProblem, tasks_of
from mpipipe.schedules.simulate import EQUAL_COSTS, Costs, are_alike
from mpipipe.schedules.slices import in_slices


#     rank 0  F0 F1 F2 F3 .  .  .  I0 W0 F4 I1 W1 F5 I2 W2 I3 W3 I4 W4 I5 W5
#     rank 1  .  F0 F1 F2 .  .  I0 F3 I1 W0 F4 I2 W1 F5 I3 W2 I4 W3 I5 W4 W5
#     rank 2  .  .  F0 F1 .  I0 F2 I1 F3 I2 W0 F4 I3 W1 F5 I4 W2 I5 W3 W4 W5
#     rank 3  .  .  .  F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 W3 W4 W5
def zero_bubble_h1(ranks: int, microbatches: int, *, slices: int = 1) -> Schedule:
    """Build ZB-H1: 1F1B whose weight gradients fill the bubble, in no more memory than 1F1B takes on rank 0.

    Rank r runs the W of a micro-batch r micro-batches after its I. Let f, b, w be the times of F, I, W, with w at most
    f and b. The bubble is (P-1)(f+b) - (min(M,P)-1)w, which is (P-1)(f+b-w) for M >= P.
    Every rank holds min(M, P) activations.
    Source: Qi et al. 2023, arXiv:2401.10241, schedule ZB-H1.

    Parameters
    ----------
    ranks, microbatches, slices : int

    Examples
    --------
    >>> from mpipipe import schedules
    >>> print(schedules.zero_bubble_h1(2, 3).to_csv(), end="")
    0F0,0F1,0I0,0W0,0F2,0I1,0W1,0I2,0W2
    1F0,1I0,1F1,1I1,1W0,1F2,1I2,1W1,1W2
    """
    return looped("zero_bubble_h1", ranks, 1, microbatches, split_order, grouped, 1, slices=slices)


#     rank 0  F0 F1 f0 f1 .  i0 w0 F2 i1 w1 F3 I0 W0 f2 I1 W1 f3 i2 w2 i3 w3 I2 W2 I3 W3
#     rank 1  .  F0 F1 f0 i0 f1 i1 w0 F2 I0 w1 F3 I1 W0 f2 i2 W1 f3 i3 w2 I2 w3 I3 W2 W3
def interleaved_zero_bubble(ranks: int, chunks: int, microbatches: int, *, slices: int = 1) -> Schedule:
    """Build interleaved 1F1B with a split backward: ZB-H1 with several chunks per rank.

    Rank r runs each W r I's after its own I. Let f, b, w be the times of F, I, W of a chunk, with w at most f and b.
    The bubble is (P-1)(f+b-w) for M >= P.
    Source: Qi et al. 2023, arXiv:2401.10241, on the chunks of Narayanan et al. 2021, arXiv:2104.04473.

    Parameters
    ----------
    ranks, chunks, microbatches, slices : int
        Every rank holds at most min(MV, (V-1)g + P) chunk activations, where g is the size of the first group of
        micro-batches (see `interleaved_1f1b`).
    """
    return looped("interleaved_zero_bubble", ranks, chunks, microbatches, split_order, grouped, 1, slices=slices)


def split_order(ranks: int, chunks: int, microbatches: int, step: int, rank: int) -> list[Action]:
    """Run the first F's, then an F, an I and, some I's later, its W in turn; at the end what is left."""
    forwards, inputs, first = forth_and_back(INPUT_GRAD, ranks, chunks, microbatches, step, rank)
    weights = [Action(stage, WEIGHT_GRAD, microbatch) for stage, _, microbatch in inputs]
    order, delay = forwards[:first], step * rank
    for done, action in enumerate(inputs):
        order += [*forwards[first + done : first + done + 1], action]
        if done >= delay:
            order.append(weights[done - delay])
    return order + weights[max(0, len(weights) - delay) :]


# -- Schedules on a V: each rank has two stages, one on the way down and one on the way up, and the last rank the turn
#
#     stage 0  rank 0        stage 2P-1  rank 0        rank 0 has the first and the last stage: the loss is known there
#     stage 1  rank 1        stage 2P-2  rank 1
#       ...                    ...
#     stage P-1  rank P-1    stage P  rank P-1         no message at the turn
#
# Down is the stage r of rank r, up is the stage 2P-1-r. In the pictures small letters are the stages on the way up, and
# whole backwards take two cells.


Cells: TypeAlias = Callable[[int, int, int], str]  # (rank, ranks, micro-batches) -> its actions, one letter each


def v_placement(ranks: int) -> tuple[int, ...]:
    """Place stage l on rank l on the way down, and on rank 2P-1-l on the way up."""
    return (*range(ranks), *reversed(range(ranks)))


#     rank 0  F0 F1 F2 F3 F4 f0 i0 w0 f1 i1 w1 f2 i2 w2 I0 W0 f3 i3 w3 I1 W1 f4 i4 w4 I2 W2 I3 W3 I4 W4 .  .
#     rank 1  .  F0 F1 F2 f0 F3 f1 i0 w0 f2 i1 w1 F4 I0 W0 f3 i2 w2 I1 W1 f4 i3 w3 I2 i4 I3 W2 I4 w4 W3 W4 .
#     rank 2  .  .  F0 f0 F1 f1 F2 f2 i0 w0 F3 I0 W0 f3 i1 w1 F4 I1 W1 f4 i2 w2 I2 i3 I3 i4 I4 W2 w3 W3 w4 W4
def zero_bubble_v(ranks: int, microbatches: int, costs: Costs = EQUAL_COSTS, *, slices: int = 1) -> Schedule:
    """Build ZB-V: no rank waits between its first action and its last, in the memory of 1F1B.

    Where F, I and W of a chunk take the same time f, the makespan is 6Mf + (P-1)f for M >= 2P: ranks begin one after
    the other, and end so. For other costs F's and I's keep an order of theirs, and W's are put where ranks would wait.
    Source: Qi et al. 2024, arXiv:2405.15362, schedule V-ZB; first in Qi et al. 2023, arXiv:2401.10241.

    Parameters
    ----------
    ranks, microbatches : int
        A rank holds at most 2P chunk activations, which are P of a whole stage.
    costs : Costs, optional
        Times of the 2P stages.
    slices : int, optional

    Examples
    --------
    >>> from mpipipe import schedules
    >>> schedule = schedules.zero_bubble_v(4, 8)
    >>> schedule.placement
    (0, 1, 2, 3, 3, 2, 1, 0)
    >>> timeline = schedules.simulate(schedule)
    >>> timeline.makespan - 6 * 8, timeline.peak_activations
    (3.0, [8, 8, 8, 8])
    """
    ranks, microbatches, slices = counts(ranks=ranks, microbatches=microbatches, slices=slices)
    by_hand, costs = _on_a_v("zero_bubble_v", ranks, microbatches * slices, _zero_bubble, 1), costs.of_mean_slice()
    if are_alike(costs, 2 * ranks):
        return in_slices(by_hand, slices)
    problem = OrderProblem(by_hand.placement, by_hand.units, costs, None)
    queues = [[[task for task in order if task % 3 != 2]] for order in tasks_of(by_hand)]
    best = fastest(fill_waits(problem, queues, 2 * ranks, patience) for patience in PATIENCES)
    if best is None or score_of(by_hand, costs) <= best.score:
        return in_slices(by_hand, slices)
    return in_slices(problem.schedule(by_hand.name, best.orders), slices)


#     rank 0  F0 F1 F2 f0 i0 w0 f1 F3 b1-- f2 B0-- b2-- f3 .  B1-- b3-- I2 W2 I3 W3
#     rank 1  .  F0 f0 F1 f1 F2 b0-- f2 B0-- F3 b1-- f3 B1-- b2-- B2-- i3 I3 w3 W3
def dualpipe_v(ranks: int, microbatches: int, *, slices: int = 1) -> Schedule:
    """Build DualPipeV: in the middle each rank has one forward and one backward, of its two stages, in turn.

    Most backwards are whole. The two of a pair are made to run at the same time on one device; here they run one after
    the other. For M >= 2P the makespan is that of `zero_bubble_v`; a rank holds at most 2P + 1 chunk activations.
    Source: DeepSeek-AI 2025, github.com/deepseek-ai/DualPipe.

    Parameters
    ----------
    ranks, microbatches, slices : int
    """
    ranks, microbatches, slices = counts(ranks=ranks, microbatches=microbatches, slices=slices)
    return in_slices(_on_a_v("dualpipe_v", ranks, microbatches * slices, _dualpipe, 0), slices)


def _on_a_v(name: str, ranks: int, microbatches: int, cells: Cells, less: int) -> Schedule:
    # too few micro-batches to fill the pipeline: the order of a full one, without the micro-batches that are missing
    full = max(2 * ranks - less, microbatches)
    orders = OrdersOnDemand(
        ranks, partial(_kept, cells, ranks, full, microbatches), partial(_logical_time, cells, ranks, full)
    )
    return Schedule(name, v_placement(ranks), microbatches, orders)


def _kept(cells: Cells, ranks: int, full: int, microbatches: int, rank: int) -> Iterator[Action]:
    return (action for action in _of_rank(cells, ranks, full, rank) if action.microbatch < microbatches)


def _logical_time(cells: Cells, ranks: int, full: int, stage: int, backward: bool, microbatch: int) -> int:
    return _logical_times(cells, ranks, full, min(stage, 2 * ranks - 1 - stage))[stage, backward][microbatch]


@lru_cache(maxsize=4)  # a rank asks for its own times and for those of its neighbours
def _logical_times(cells: Cells, ranks: int, full: int, rank: int) -> dict[tuple[int, bool], array[int]]:
    """Return the logical times of F's, and of B's and I's, of both stages: action k of rank r has the time r + k."""
    both = rank, 2 * ranks - 1 - rank
    found = {(stage, backward): array("q", bytes(8 * full)) for stage in both for backward in (False, True)}
    for place, (stage, op, microbatch) in enumerate(_of_rank(cells, ranks, full, rank), rank):
        if op != WEIGHT_GRAD:
            found[stage, op != FORWARD][microbatch] = place
    return found


def _zero_bubble(rank: int, ranks: int, full: int) -> str:
    rest = ranks - rank
    filling = "F" * (2 * rest - 1) + "fF" * rank + "fiW" * rest
    steady = "FIWfiW" * (full - (2 * rest - 1) - rank) + "IWfiW" * (rest - 1)
    return filling + steady + "Ii" * rank + "IW" * rest + "W" * rank * 2


def _dualpipe(rank: int, ranks: int, full: int) -> str:
    rest = ranks - rank - 1
    filling = "F" * 2 * rest + "Ff" * (rank + 1) + "iWf" * rest
    steady = "FbfB" * (full - 2 * ranks + rank + 1) + "bfB" * rest
    # The backwards of both stages alternate; from the middle of them on they are split, and their W's come last.
    emptying = (
        ("bB" * (rank + 1))[: rank + 1] + ("iI" if rank % 2 else "Ii") * ((rank + 1) // 2) + "I" * (rank % 2 == 0)
    )
    return filling + steady + emptying + "WI" * rest + "W" * (rank + 1)


def _of_rank(cells: Cells, ranks: int, full: int, rank: int) -> list[Action]:
    """Write out an order: a letter is of its chain's next micro-batch, small ones on the way up; W of the oldest I."""
    count: Counter[str] = Counter()
    owed: deque[Action] = deque()
    order = []
    for cell in cells(rank, ranks, full):
        op, stage = cell.upper(), rank if cell.isupper() else 2 * ranks - 1 - rank
        if op == WEIGHT_GRAD:
            order.append(owed.popleft())
            continue
        chain = cell if op == FORWARD else cell.replace("b", "i").replace("B", "I")  # both are backwards
        action = Action(stage, op, count[chain])
        count[chain] += 1
        order.append(action)
        if op == INPUT_GRAD:
            owed.append(Action(stage, WEIGHT_GRAD, action.microbatch))
    return order
