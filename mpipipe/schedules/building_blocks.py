"""Schedules on a V whose memory is chosen: one micro-batch's way is a block, repeated evenly.

    rank 0  F . . . . . . . f i . . . . . . . I
    rank 1  . F . . . . . f . . i . . . . . I .
    rank 2  . . F . . . f . . . . i . . . I . .
    rank 3  . . . F . f . . . . . . i . I . . .

F and f are forwards on the way down and up, i and I gradients of the input. Each step from rank to
rank takes one cell in this block.

A block begins every 6 cells: the six actions of a micro-batch on a rank, F, f, i, I and two W's,
fill that time. A rank holds an activation from its F until its I, so a rank holds as many as the
block is long, divided by 6. Steps that take longer make longer blocks, with more memory and a
smaller bubble. No two actions of a rank may fall on the same cell of the six; the cells at the
turns are chosen so. Source: Qi et al. 2024, "Pipeline Parallelism with Controllable Memory",
arXiv:2405.15362.

A block only gives the order of F's and I's on each rank. They then run as early as they can, and
W's fill the waits. P is `ranks`, M `microbatches`; a count below 1, and costs that do not fit,
raise ArgumentError. `slices` are those of classic.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import accumulate, product
from typing import NamedTuple

from mpipipe.errors import ArgumentError
from mpipipe.schedules import checks
from mpipipe.schedules.classic import looped
from mpipipe.schedules.schedule import Schedule, looped_placement
from mpipipe.schedules.simulate import EQUAL_COSTS, Costs, are_alike
from mpipipe.schedules.slices import in_slices
from mpipipe.schedules.zero_bubble import PATIENCES, Filled, StageTimes, split_order, v_placement

PERIOD = 6


class BuildingBlock(NamedTuple):
    """The way of one micro-batch through the ranks, in cells of time.

    steps : cells from rank to rank: of F down, f up, i down, I up
    turns : cells from F to f on the last rank, from f to i on rank 0, from i to I on the last rank
    """

    steps: tuple[int, int, int, int]
    turns: tuple[int, int, int]

    def cells(self, ranks: int, rank: int) -> list[tuple[int, int]]:
        """List (cell, task) of one micro-batch on a rank; tasks are those of zero_bubble.py."""
        down, up, input_down, input_up = self.steps
        last = ranks - 1
        turn = last * down + self.turns[0]  # f on the last rank
        loss = turn + last * up + self.turns[1]  # i on rank 0
        end = loss + last * input_down + self.turns[2]  # I on the last rank
        forward_down = 3 * rank
        forward_up = 3 * (2 * ranks - 1 - rank)
        return [
            (rank * down, forward_down),
            (turn + (last - rank) * up, forward_up),
            (loss + rank * input_down, forward_up + 1),
            (end + (last - rank) * input_up, forward_down + 1),
        ]

    def fits(self, ranks: int) -> bool:
        """Whether no two actions of a rank fall on the same cell of the six."""
        for rank in range(ranks):
            if len({cell % PERIOD for cell, _ in self.cells(ranks, rank)}) < 4:
                return False
        return True

    def filled(self, times: StageTimes, patience: float) -> Filled | None:
        """Repeat the block, with W's in the waits; None where the memory does not suffice."""
        ranks = len(times.placement) // 2
        queues = []
        for rank in range(ranks):
            runs = []
            for cell, task in self.cells(ranks, rank):
                for unit in range(times.microbatches):
                    runs.append((cell + PERIOD * unit, task))
            queues.append([[task for _, task in sorted(runs)]])
        return times.fill_idle_with_weight_grads(queues, patience)


SHORT = (1, 1, 1, 1)
MIDDLE = (1, 2, 1, 2)
BLOCKS = 12  # number of blocks that are tried
TRIED = 8  # they are tried on so many micro-batches more than ranks


#     rank 0  F0 F1 .  .  .  .  .  f0 i0 F2 w0 .  .  f1 i1 I0 w1 F3 W0 f2 i2 I1 w2 W1 .  f3 i3 I2 w3
#     W2 .  .  .  I3 W3 rank 1  .  F0 .  .  .  .  f0 F1 .  i0 w0 .  f1 F2 I0 i1 W0 w1 f2 F3 I1 i2 W1
#     w2 f3 .  I2 i3 W2 w3 .  .  I3 W3 . rank 2  .  .  F0 .  .  f0 .  .  F1 .  i0 f1 w0 I0 F2 W0 i1
#     f2 w1 I1 F3 W1 i2 f3 w2 I2 W2 .  i3 w3 .  I3 W3 .  . rank 3  .  .  .  F0 f0 .  .  .  .  F1 f1
#     i0 I0 w0 W0 F2 f2 i1 I1 w1 W1 F3 f3 i2 I2 w2 W2 .  .  i3 I3 w3 W3 .  .
def v_min(
    ranks: int, microbatches: int, costs: Costs = EQUAL_COSTS, *, slices: int = 1
) -> Schedule:
    """Build V-Min: a third of 1F1B's memory, at about two thirds of its bubble.

    Where F, I and W take the same time, the bubble is at most 2/3 of 1F1B's for M >= 2P.
    Source: Qi et al. 2024, arXiv:2405.15362, schedule V-Min.

    Parameters
    ----------
    ranks, microbatches : int
        A rank holds at most 2 floor((P+4)/3) chunk activations, half as many of a whole stage.
    costs : Costs, optional
        Times of the 2P stages, for the places of the W's.
    slices : int, optional
    """
    return _repeated(
        "v_min", SHORT, lambda p: 2 * ((p + 4) // 3), ranks, microbatches, costs, slices=slices
    )


#     rank 0  F0 F1 F2 .  .  .  .  f0 i0 F3 w0 f1 i1 w1 .  f2 i2 w2 I0 W0 .  f3 i3 I1 w3 W1 .  I2 W2
#     I3 W3 rank 1  .  F0 F1 .  .  .  f0 F2 .  i0 f1 F3 w0 i1 f2 w1 .  I0 i2 W0 f3 w2 I1 i3 W1 w3 I2
#     W2 I3 W3 . rank 2  .  .  F0 F1 .  f0 .  .  F2 f1 i0 w0 F3 f2 i1 w1 I0 W0 .  f3 i2 I1 w2 W1 i3
#     I2 w3 I3 W2 W3 . rank 3  .  .  .  F0 f0 F1 f1 .  .  F2 .  i0 f2 w0 F3 I0 i1 W0 f3 I1 w1 i2 I2
#     W1 w2 i3 I3 W2 w3 W3 .
def v_half(
    ranks: int, microbatches: int, costs: Costs = EQUAL_COSTS, *, slices: int = 1
) -> Schedule:
    """Build V-Half: half of 1F1B's memory, at less than half of its bubble.

    Where F, I and W take the same time, the bubble is at most 1/2 of 1F1B's for M >= 2P.
    Source: Qi et al. 2024, arXiv:2405.15362, schedule V-Half.

    Parameters
    ----------
    ranks, microbatches : int
        A rank holds at most 2 floor((P+2)/2) chunk activations, half as many of a whole stage.
    costs, slices : optional
        As for `v_min`.

    Examples
    --------
    >>> from mpipipe import schedules
    >>> max(schedules.simulate(schedules.v_half(8, 16)).peak_activations), 8 + 2
    (10, 10)
    """
    return _repeated(
        "v_half", MIDDLE, lambda p: 2 * ((p + 2) // 2), ranks, microbatches, costs, slices=slices
    )


def _repeated(
    name: str,
    steps: tuple[int, int, int, int],
    limit: Callable[[int], int],
    ranks: int,
    microbatches: int,
    costs: Costs,
    *,
    slices: int,
) -> Schedule:
    """Try blocks on few micro-batches and ranks; repeat the best one."""
    ranks, _, microbatches, slices = checks.sizes(
        ranks=ranks, chunks=2, microbatches=microbatches, slices=slices
    )
    units = microbatches * slices
    costs = costs.of_mean_slice()
    # Its actions fall on the same cells of the six.
    small = ranks
    average = costs
    if ranks >= 2 * PERIOD:
        small = PERIOD + ranks % PERIOD
        average = costs.average(2 * ranks)
    few = StageTimes(v_placement(small), min(units, small + TRIED), average, limit(small))
    blocks = []
    cells = range(1, PERIOD + 1)
    for turns in product(cells, cells, cells):
        block = BuildingBlock(steps, turns)
        if block.fits(small):
            blocks.append(block)
    # The shortest ones.
    blocks.sort(key=lambda block: sum(block.turns))
    tried = []
    for block, patience in product(blocks[:BLOCKS], PATIENCES):
        filled = block.filled(few, patience)
        if filled is not None:
            tried.append((filled.score, block, patience))
    whole = StageTimes(v_placement(ranks), units, costs, limit(ranks))
    for _, block, patience in sorted(tried):
        filled = block.filled(whole, patience)
        if filled is not None:
            return in_slices(whole.schedule(name, filled.orders), slices)
    raise AssertionError(f"{name} on {ranks} ranks: no block fits {limit(ranks)} activations")


# -- ZB-2P: as little waiting as a limit of memory allows, for costs that are given ----------------
#
#     rank 0  F0 F1 F2 F3 .  I0 W0 I1 F4 I2 W1 I3 F5 W2 W3 I4 W4 I5 W5
#     rank 1  .  F0 F1 F2 I0 F3 I1 W0 I2 F4 I3 W1 .  F5 I4 W2 I5 W3 W4 W5
#     rank 2  .  .  F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 W3 W4 W5
#
# More F's than in 1F1B come before the first I. W's come late: some are left for the end, where I's
# travel through all ranks.
#
# The picture is that of a limit of 4 activations.
#
# Each rank begins with some forwards, then takes an I and an F in turn. Their number is a slope
# times the later ranks, as in 1F1B, where the slope is 1; or it is a share of those that fit into
# the time until the first micro-batch is back. Several slopes are tried, and the two orders that
# ranks find by themselves when they prefer I's, or F's. The fastest is taken. Nothing is tried
# where all F's, I's and W's take the same time, messages take none, and there are memory and
# micro-batches for the orders of ZB-H2: no rank waits in those.
#
#     rank 0  F0 F1 F2 F3 F4 I0 W0 F5 I1 W1 I2 W2 I3 W3 I4 W4 I5 W5
#     rank 1  .  F0 F1 F2 I0 F3 I1 F4 I2 W0 F5 I3 W1 I4 W2 I5 W3 W4 W5
#     rank 2  .  .  F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 F5 I5 W1 W2 W3 W4 W5


SLOPES = (0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7, 1.8, 1.9, 2.0)
MANY = 16  # ranks: for more, choices are tried on so many
# of the choices that are tried so many, with no more actions together
FINALISTS = 12
AFFORDABLE = 1_000_000


class Rule(NamedTuple):
    """How the orders of F's and I's are made.

    `kind` says how many forwards come first: later "ranks" times slope, or those that fit into the
    "time" away times slope / 2, or "I" or "F": whatever comes of preferring these.
    """

    kind: str
    slope: float
    more: int  # it begins with 1 + more on the last rank
    patience: float  # see fill_idle_with_weight_grads


H1 = Rule("ranks", 1.0, 0, 1.0)  # its orders of F's and I's


def zero_bubble_2p(
    ranks: int,
    microbatches: int,
    costs: Costs = EQUAL_COSTS,
    memory_limit: float | None = None,
    kept: float = 1.0,
    *,
    slices: int = 1,
) -> Schedule:
    """Build ZB-2P: a split backward with more forwards ahead, within a limit of memory.

    Where F, I and W take the same time f, messages take none, and the limit and M are 2P - 1 or
    more, no rank waits between its first action and its last: the makespan is 3Mf + (P-1)f. With a
    limit of P it is not slower than `zero_bubble_h1`. Source: Qi et al. 2023, arXiv:2401.10241,
    schedules ZB-H2 and ZB-2p.

    Parameters
    ----------
    ranks, microbatches : int
    costs : Costs, optional
        Times of the P stages.
    memory_limit : float, optional
        Activations of units that a rank may hold at once, at least n; by default 2P + n - 1.
    kept : float, optional
        Share of an activation that a stage still holds between I and W, 0 to 1, as far as the limit
        is concerned.
    slices : int, optional

    Examples
    --------
    >>> from mpipipe import schedules
    >>> timeline = schedules.simulate(schedules.zero_bubble_2p(4, 8))
    >>> timeline.makespan - 3 * 8, timeline.peak_activations
    (3.0, [7, 7, 7, 7])
    """
    ranks, _, microbatches, slices = checks.sizes(
        ranks=ranks, microbatches=microbatches, slices=slices
    )
    units = microbatches * slices
    costs = costs.of_mean_slice()
    limit: float = 2 * ranks
    if memory_limit is not None:
        limit = checks.number("memory_limit", memory_limit) - (slices - 1)
    if not limit >= 1:
        raise ArgumentError(
            "no schedule keeps this memory limit",
            found=f"memory_limit={memory_limit}",
            expected=f"at least {slices}",
        )
    if not 0 <= kept <= 1:
        raise ArgumentError("kept is no share", found=f"kept={kept}", expected="0 to 1")
    if are_alike(costs, ranks) and min(limit, units) >= 2 * ranks - 1:
        order = partial(split_order, step=2)
        return looped("zero_bubble_2p", ranks, 1, microbatches, order, slices=slices)
    small = min(ranks, MANY)
    average = costs
    if small < ranks:
        average = costs.average(ranks)
    few_units = min(units, 3 * small)
    few_limit = max(1, limit * small / ranks)
    few = StageTimes(looped_placement(small, 1), few_units, average, few_limit, kept)
    rules = []
    for patience in PATIENCES:
        rules += [Rule("I", 0.0, 0, patience), Rule("F", 0.0, 0, patience)]
        for kind, slope, more in product(("ranks", "time"), SLOPES, (0, 1)):
            rules.append(Rule(kind, slope, more, patience))
    tried = []
    for rule in rules:
        filled = _filled(few, rule)
        if filled is not None:
            tried.append((filled.score, rule))
    number = max(1, min(FINALISTS, AFFORDABLE // (3 * ranks * units)))
    finalists = {H1, *[rule for _, rule in sorted(tried)[:number]]}
    whole = StageTimes(looped_placement(ranks, 1), units, costs, limit, kept)
    best = min(filter(None, map(partial(_filled, whole), finalists)))
    return in_slices(whole.schedule("zero_bubble_2p", best.orders), slices)


def _filled(times: StageTimes, rule: Rule) -> Filled | None:
    """Return the orders by a rule; None where the memory does not let them end."""
    units = times.microbatches
    queues: list[list[list[int]]] = []
    for rank, away in enumerate(_away(times)):
        forward = 3 * rank
        inputs = forward + 1
        if rule.kind == "I":
            queues.append([[inputs] * units, [forward] * units])
            continue
        if rule.kind == "F":
            queues.append([[forward] * units, [inputs] * units])
            continue
        ahead = math.floor(rule.slope / 2 * away + 1e-9)
        if rule.kind == "ranks":
            ahead = math.ceil(rule.slope * (len(times.placement) - 1 - rank) - 1e-9)
        first = min(1 + rule.more + ahead, int(min(times.limit, units)))
        in_turn = [inputs, forward] * (units - first)
        queues.append([[forward] * first + in_turn + [inputs] * first])
    return times.fill_idle_with_weight_grads(queues, rule.patience)


def _away(times: StageTimes) -> list[float]:
    """Return how long after its end a forward comes back to each stage as a gradient."""
    seconds = times.seconds
    away = [0.0]
    for task in range(len(seconds) - 3, 0, -3):
        away.append(away[-1] + seconds[task] + seconds[task + 1] + 2 * times.lag[task])
    paces = accumulate(seconds[::3], max)
    return [time / (pace or 1.0) for time, pace in zip(away[::-1], paces)]
