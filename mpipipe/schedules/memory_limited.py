"""ZB-2P: as little waiting as a limit of memory allows, for costs that are given.

    rank 0  F0 F1 F2 F3 F4 I0 F5 I1 W0 I2 W1 I3 W2 I4 W3 I5 W4 W5      more F's than 1F1B before the first I
    rank 1  .  F0 F1 F2 I0 F3 I1 F4 I2 F5 I3 W0 I4 W1 I5 W2 W3 W4 W5   W's late: some are left for the end,
    rank 2  .  .  F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 F5 I5 W0 W1 W2 W3 W4 W5    where I's travel through all ranks

Each rank begins with some forwards, then takes an I and an F in turn. Their number is a slope times the ranks behind,
as in 1F1B, where the slope is 1. Or it is a share of those that fit into the time until the first micro-batch is back.
Several slopes are tried, and the two orders that ranks find by themselves when they prefer I's, or F's. The fastest is
taken.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import accumulate, product
from typing import NamedTuple

from mpipipe.errors import ArgumentError
from mpipipe.schedules import given
from mpipipe.schedules.action import FORWARD, INPUT_GRAD
from mpipipe.schedules.classic import actions, alternate
from mpipipe.schedules.filling import PATIENCES, Filled, Queues, Score, fastest, filled
from mpipipe.schedules.schedule import Schedule, at_least_one, looped_placement
from mpipipe.schedules.simulate import EQUAL_COSTS, Costs

SLOPES, FINE = (0.8, 1.0, 1.2, 1.4, 1.6, 1.8, 2.0), 0.1  # and the step to those beside the best of them
MANY = 16  # ranks: for more, choices are tried on so many
FINALISTS, AFFORDABLE = 12, 1_000_000  # of the choices that are tried so many, with no more actions together
NO_SCORE: Score = (math.inf, math.inf, 0)


class Choice(NamedTuple):
    """How the orders of F's and I's are made.

    Attributes
    ----------
    rule : how many forwards come first: "ranks" behind times slope, or those that fit into the "time" away times
        slope / 2, or "I" or "F": whatever comes of preferring these
    slope, more : the number of forwards grows by the slope, and begins with 1 + more on the last rank
    patience, prompt : see ListScheduler
    """

    rule: str
    slope: float
    more: int
    patience: float
    prompt: bool = False


H1 = Choice("ranks", 1.0, 0, 1.0)  # its orders of F's and I's


def zero_bubble_2p(
    ranks: int, microbatches: int, costs: Costs = EQUAL_COSTS, memory_limit: float | None = None, kept: float = 1.0
) -> Schedule:
    """Build ZB-2P: a split backward with more forwards ahead, within a limit of memory.

    Where F, I and W take the same time f, the limit is 2P - 1 or more and M >= 2P, no rank waits between its first
    action and its last: the makespan is 3Mf + (P-1)f. With a limit of P it is not slower than `zero_bubble_h1`.
    Source: Qi et al. 2023, arXiv:2401.10241, schedules ZB-H2 and ZB-2p.

    Parameters
    ----------
    ranks, microbatches : int
        P and M, at least 1.
    costs : Costs, optional
        Times of the P stages; by default one unit for each of F, I and W.
    memory_limit : float, optional
        Activations that a rank may hold at once, at least 1; by default 2P.
    kept : float, optional
        Share of an activation that a stage still holds between I and W, 0 to 1, as far as the limit is concerned.

    Returns
    -------
    Schedule
        One stage per rank.

    Raises
    ------
    ArgumentError
        A count or the limit is below 1, `kept` is out of range, or the costs do not fit.

    Examples
    --------
    >>> from mpipipe import schedules
    >>> timeline = schedules.simulate(schedules.zero_bubble_2p(4, 8))
    >>> timeline.makespan - 3 * 8, timeline.peak_activations
    (3.0, [8, 8, 8, 8])
    """
    ranks, microbatches = at_least_one("ranks", ranks), at_least_one("microbatches", microbatches)
    limit = 2 * ranks if memory_limit is None else given.number("memory_limit", memory_limit)
    if not limit >= 1:
        raise ArgumentError("no schedule keeps this memory limit", found=f"memory_limit={limit}", expected="at least 1")
    if not 0 <= given.number("kept", kept) <= 1:
        raise ArgumentError("kept is no share", found=f"kept={kept}", expected="0 to 1")
    small = min(ranks, MANY)
    few = _Form(small, min(microbatches, 3 * small))
    average, share = (costs, limit) if small == ranks else (costs.average(ranks), limit * small / ranks)
    best = _best(few, average, share, kept)
    if (few.ranks, few.microbatches) == (ranks, microbatches):
        form, finalists = few, best[:1]  # H1 is among those that were tried
    else:
        form = _Form(ranks, microbatches)
        finalists = [*best[: max(1, min(FINALISTS, AFFORDABLE // (3 * ranks * microbatches)))], H1]
    found = fastest(form.made(choice, costs, limit, kept) for choice in dict.fromkeys(finalists))
    assert found is not None, f"no order keeps {limit} activations"
    return found


def _best(form: _Form, costs: Costs, limit: float, kept: float) -> list[Choice]:
    """Try choices, and those beside the best of them; return those that end, the fastest first."""
    tried: dict[Choice, Score] = {}
    scores: dict[tuple[object, ...], Score] = {}  # of choices that are the same on so few ranks

    def add(choices: Iterable[Choice]) -> list[Choice]:
        for choice in choices:
            same = (form.ahead(choice, costs, limit) or choice.rule, choice.patience, choice.prompt)
            if same not in scores:
                made = form.made(choice, costs, limit, kept)
                scores[same] = NO_SCORE if made is None else made.score
            tried[choice] = scores[same]
        return [choice for score, choice in sorted(zip(tried.values(), tried)) if score != NO_SCORE]

    rules = [("I", 0.0), ("F", 0.0), *product(("ranks", "time"), SLOPES)]
    coarse = add(Choice(*rule, 0, patience) for rule in rules for patience in PATIENCES)
    near = {(best.rule, best.slope + step) for best in coarse[:2] if best.slope for step in (-FINE, 0, FINE)}
    return add(
        Choice(*rule, more, patience, prompt)
        for rule in sorted(near)
        for more, prompt in ((0, False), (0, True), (1, False))
        for patience in PATIENCES
    )


class _Form:
    """The ranks and micro-batches, and their F's and I's."""

    def __init__(self, ranks: int, microbatches: int) -> None:
        every = range(microbatches)
        self.ranks, self.microbatches = ranks, microbatches
        self.schedule = Schedule("zero_bubble_2p", looped_placement(ranks, 1), microbatches, orders=())
        self.forwards = [actions(FORWARD, (rank,), every) for rank in range(ranks)]
        self.inputs = [actions(INPUT_GRAD, (rank,), every) for rank in range(ranks)]

    def made(self, choice: Choice, costs: Costs, limit: float, kept: float) -> Filled | None:
        """Return what comes of a choice, None where the memory does not let it end."""
        ahead = self.ahead(choice, costs, limit)
        pairs = zip(self.forwards, self.inputs)
        queues: Queues
        if ahead:  # `alternate` begins its turns with an F: one of those that are ahead
            queues = [[alternate(*pair, number - 1)] for pair, number in zip(pairs, ahead)]
        else:
            queues = [[of_i, of_f] if choice.rule == "I" else [of_f, of_i] for of_f, of_i in pairs]
        return filled(self.schedule, queues, costs, max(1, limit), choice.patience, kept, prompt=choice.prompt)

    def ahead(self, choice: Choice, costs: Costs, limit: float) -> tuple[int, ...]:
        """Return how many forwards each rank runs before its first I; nothing where that is not chosen."""
        if choice.rule == "time":
            counts = [math.floor(choice.slope / 2 * away + 1e-9) for away in _away(costs, self.ranks)]
        elif choice.rule == "ranks":
            counts = [math.ceil(choice.slope * behind - 1e-9) for behind in range(self.ranks - 1, -1, -1)]
        else:
            return ()
        most = max(1, int(min(limit, self.microbatches)))
        return tuple(min(count + 1 + choice.more, most) for count in counts)


def _away(costs: Costs, stages: int) -> list[float]:
    """How long after its end a forward comes back to each stage as a gradient, in F's as they come there."""
    forward, input_grad = costs.per_stage("forward", stages), costs.per_stage("input_grad", stages)
    transfer = costs.per_stage("transfer", stages)
    away = [0.0]
    for stage in range(stages - 1, 0, -1):
        away.append(away[-1] + forward[stage] + input_grad[stage] + 2 * transfer[stage])
    return [time / (pace or 1.0) for time, pace in zip(away[::-1], accumulate(forward, max))]
