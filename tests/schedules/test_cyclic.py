"""Blocks of a given period: what is said to fit runs one period after the other, and keeps the limit of memory."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from mpipipe.schedules import Costs, check, lower_bound, simulate
from mpipipe.schedules.cyclic import Cycle
from mpipipe.schedules.kinds import Form
from mpipipe.schedules.repeated_block import Block

STEPS = 3000


def found(form, seed=0, steps=STEPS):
    used = iter(range(10 * steps))
    return Cycle(form, random.Random(seed)).search(lambda: next(used) / steps)


def placed(form, times):
    """Every action of every rank at its time: rank -> (begin, end, kind), one micro-batch a period after the other."""
    spans = [[] for _ in form.own]
    for kind, first in enumerate(times.first):
        begins = [first + k * times.period for k in range(form.microbatches)]
        spans[form.rank[kind]] += [(begin, begin + form.seconds[kind], kind) for begin in begins]
    return [sorted(each) for each in spans]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("placement, limit", [((0, 1, 2, 2, 1, 0), 5), ((0, 1, 2), 3), ((0, 1, 0, 1), 5)])
def test_a_block_that_fits_runs_at_its_times(placement, limit, seed):
    draw = random.Random(f"{placement} {seed}")
    costs = Costs(*[[draw.randint(1, 3) for _ in placement] for _ in range(4)])
    form = Form(placement, 12, costs, limit)
    times = found(form, seed)
    if times is None:
        return
    for rank, spans in enumerate(placed(form, times)):
        for (_, end, _), (begin, _, _) in pairwise(spans):
            assert begin >= end - 1e-6
        # a W that ends when an F begins has left its place
        opened = [(begin + 1e-6, 1) for begin, _, kind in spans if kind % 3 == 0]
        closed = [(end, -1) for _, end, kind in spans if kind % 3 == 2]
        held = peak = 0
        for _, change in sorted(opened + closed):
            held += change
            peak = max(peak, held)
        assert peak <= form.limit, rank
    for kind, before in enumerate(form.waits_for):
        if before >= 0:
            assert times.first[kind] >= times.first[before] + form.seconds[before] + form.lag[kind] - 1e-9
    schedule = form.schedule("block", Block(form, random.Random(0)).orders(times))
    check(schedule)
    latest = max(first + time for first, time in zip(times.first, form.seconds))
    assert lower_bound(schedule, costs, limit) <= simulate(schedule, costs).makespan + 1e-9
    assert simulate(schedule, costs).makespan <= latest + 11 * times.period + 1e-6
    assert max(simulate(schedule, costs).peak_activations) <= limit


def test_most_cases_have_a_block():
    """Slack in memory and in time: a block is found, and with equal stages one without idle time."""
    for placement in ((0, 1, 2, 2, 1, 0), (0, 1, 2)):
        form = Form(placement, 12, Costs(transfer=0.5), 3 * len(placement))
        times = found(form)
        assert times is not None
        assert times.period == form.busy


def test_no_period_is_shorter_than_memory_allows():
    """One activation at a time: each micro-batch is away and back before the next one begins."""
    times = found(Form((0, 1), 6, Costs(transfer=2), 1))
    assert times is not None
    assert times.period >= 2 * 2 + 5


def test_it_ends_where_nothing_is_left_to_use():
    form = Form((0, 1), 6, Costs(0, 0, 0, transfer=1), 1)
    assert Cycle(form, random.Random(0)).search(lambda: 1.0) is None
