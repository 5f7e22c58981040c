"""Blocks that repeat: what is said to fit runs one period after the other, and keeps the limit of memory."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from mpipipe.schedules import Costs, check, lower_bound, simulate
from mpipipe.schedules.search.blocks import BlockSearch, RepeatedBlock, orders_of
from mpipipe.schedules.search.problem import OrderProblem

STEPS = 3000


def searched(problem, seed=0, steps=STEPS):
    used = iter(range(10 * steps))
    return BlockSearch(problem, random.Random(seed)).search(lambda: next(used) / steps)


def placed(problem, block):
    """Every action of every rank at its time: rank -> (begin, end, task), one micro-batch a period after the other."""
    spans = [[] for _ in problem.own]
    for task, first in enumerate(block.starts):
        begins = [first + k * block.period for k in range(problem.microbatches)]
        spans[problem.rank[task]] += [(begin, begin + problem.seconds[task], task) for begin in begins]
    return [sorted(each) for each in spans]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("placement, limit", [((0, 1, 2, 2, 1, 0), 5), ((0, 1, 2), 3), ((0, 1, 0, 1), 5)])
def test_a_block_that_fits_runs_at_its_times(placement, limit, seed):
    draw = random.Random(f"{placement} {seed}")
    costs = Costs(*[[draw.randint(1, 3) for _ in placement] for _ in range(4)])
    problem = OrderProblem(placement, 12, costs, limit)
    block = searched(problem, seed)
    if block is None:
        return
    for rank, spans in enumerate(placed(problem, block)):
        for (_, end, _), (begin, _, _) in pairwise(spans):
            assert begin >= end - 1e-6
        # a W that ends when an F begins has left its place
        opened = [(begin + 1e-6, 1) for begin, _, task in spans if task % 3 == 0]
        closed = [(end, -1) for _, end, task in spans if task % 3 == 2]
        held = peak = 0
        for _, change in sorted(opened + closed):
            held += change
            peak = max(peak, held)
        assert peak <= problem.limit, rank
    for task, before in enumerate(problem.waits_for):
        if before >= 0:
            assert block.starts[task] >= block.starts[before] + problem.seconds[before] + problem.lag[task] - 1e-9
    schedule = problem.schedule("block", orders_of(problem, block))
    check(schedule)
    latest = max(first + time for first, time in zip(block.starts, problem.seconds))
    assert lower_bound(schedule, costs, limit) <= simulate(schedule, costs).makespan + 1e-9
    assert simulate(schedule, costs).makespan <= latest + 11 * block.period + 1e-6
    assert max(simulate(schedule, costs).peak_activations) <= limit


def test_most_cases_have_a_block():
    """Slack in memory and in time: a block is found, and with equal stages one without idle time."""
    for placement in ((0, 1, 2, 2, 1, 0), (0, 1, 2)):
        problem = OrderProblem(placement, 12, Costs(transfer=0.5), 3 * len(placement))
        block = searched(problem)
        assert block is not None and block.period == problem.busy and block == searched(problem)


def test_no_period_is_shorter_than_memory_allows_and_no_search_longer_than_its_budget():
    """One activation at a time: each micro-batch is away and back before the next one begins."""
    block = searched(OrderProblem((0, 1), 6, Costs(transfer=2), 1))
    assert block is not None and block.period >= 2 * 2 + 5
    problem = OrderProblem((0, 1), 6, Costs(0, 0, 0, transfer=1), 1)
    assert BlockSearch(problem, random.Random(0)).search(lambda: 1.0) is None  # nothing is left to use


@pytest.mark.parametrize("place", [(0, 1, 2), (0, 1, 2, 0, 1, 2), (0, 1, 2, 2, 1, 0)])
@pytest.mark.parametrize("transfer", [0, 1])
def test_orders_of_one_microbatch_alone_are_a_schedule(place, transfer):
    costs = Costs([1 + stage for stage in range(len(place))], 2, 1, transfer)
    problem = OrderProblem(place, 5, costs, None)
    schedule = problem.schedule("block", orders_of(problem, RepeatedBlock(problem.alone(), problem.busy)))
    check(schedule)
    assert simulate(schedule, costs).makespan >= lower_bound(schedule, costs) - 1e-9


def test_a_block_keeps_the_limit_for_any_number_of_microbatches():
    place, costs, limit = (0, 1, 2, 2, 1, 0), Costs(transfer=1), 6
    block = searched(OrderProblem(place, 6, costs, limit))
    assert block is not None and block.period >= 6
    for microbatches in (6, 12, 20):
        problem = OrderProblem(place, microbatches, costs, limit)
        schedule = problem.schedule("block", orders_of(problem, block))
        check(schedule)
        assert max(simulate(schedule, costs).peak_activations) <= limit
