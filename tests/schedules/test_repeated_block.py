"""Blocks that are repeated: their orders are schedules, keep the limit, and get faster."""

from __future__ import annotations

from random import Random

import pytest

from mpipipe.schedules import Costs, check, lower_bound, simulate
from mpipipe.schedules.kinds import Form
from mpipipe.schedules.repeated_block import Block

V = (0, 1, 2, 2, 1, 0)


def counted(steps):
    """A budget of so many steps, as a share that is used up."""
    numbers = iter(range(steps + 1))
    return lambda: next(numbers) / steps


@pytest.mark.parametrize("place", [(0, 1, 2), (0, 1, 2, 0, 1, 2), V])
@pytest.mark.parametrize("transfer", [0, 1])
def test_orders_of_one_microbatch_alone_are_a_schedule(place, transfer):
    costs = Costs([1 + stage for stage in range(len(place))], 2, 1, transfer)
    form = Form(place, 5, costs, None)
    block = Block(form, Random(0))
    schedule = form.schedule("block", block.orders(block.earliest()))
    check(schedule)
    assert simulate(schedule, costs).makespan >= lower_bound(schedule, costs) - 1e-9


@pytest.mark.parametrize("limit", [4, 6])
def test_a_block_that_was_found_keeps_the_limit_for_any_number_of_microbatches(limit):
    costs = Costs(transfer=1)
    few = Block(Form(V, 6, costs, limit), Random(1))
    times = few.search(few.earliest(), counted(1500))
    assert times is not None and times.period >= 6
    for microbatches in (6, 12, 20):
        form = Form(V, microbatches, costs, limit)
        schedule = form.schedule("block", Block(form, Random(0)).orders(times))
        check(schedule)
        assert max(simulate(schedule, costs).peak_activations) <= limit


def test_the_search_is_the_same_for_the_same_seed_and_comes_near_the_bound():
    costs, form = Costs(transfer=1), Form(V, 6, Costs(transfer=1), 6)
    blocks = [Block(form, Random(3)) for _ in range(2)]
    first, again = (block.search(block.earliest(), counted(3000)) for block in blocks)
    assert first == again
    schedule = form.schedule("block", blocks[0].orders(first))
    assert simulate(schedule, costs).makespan <= 1.15 * lower_bound(schedule, costs, 6)
