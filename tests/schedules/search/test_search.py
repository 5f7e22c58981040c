"""Searched schedules: proven, within the limit, never slower than the package's own, and close to the bound."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpipipe import schedules
from mpipipe.errors import ArgumentError
from mpipipe.schedules import Costs, check, gap, search, simulate
from mpipipe.schedules.registry import names

STEPS = 120
PLENTY = 1000.0  # seconds: what ends the search is the number of steps


@settings(max_examples=15)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 9), st.integers(0, 8), st.integers(0, 1000))
def test_it_is_proven_keeps_the_limit_and_is_no_slower_than_any_other(ranks, chunks, microbatches, more, seed):
    draw = random.Random(seed)
    costs = Costs(*[[draw.randint(1, 4) for _ in range(ranks * chunks)] for _ in range(4)])
    limit = chunks + more
    found = search(
        ranks, microbatches, costs, chunks=chunks, memory_limit=limit, seconds=PLENTY, steps=STEPS, seed=seed
    )
    check(found)
    timeline = simulate(found, costs)
    assert max(timeline.peak_activations) <= limit
    assert gap(found, costs, limit).bound <= timeline.makespan + 1e-9
    for name in names(chunks):
        other = schedules.by_name(
            name, ranks=ranks, chunks=chunks, microbatches=microbatches, costs=costs, memory_limit=max(1, limit)
        )
        if max(simulate(other).peak_activations) <= limit:
            assert timeline.makespan <= simulate(other, costs).makespan + 1e-9, name


def test_the_same_steps_and_seed_give_the_same_schedule():
    costs = Costs(forward=[1, 2, 1, 1.5], transfer=0.3)
    first, again, other = (
        search(4, 9, costs, memory_limit=3, seconds=PLENTY, steps=STEPS, seed=seed) for seed in (5, 5, 6)
    )
    assert first == again
    assert simulate(other, costs).makespan > 0


@pytest.mark.parametrize(
    "ranks, chunks, microbatches, limit, costs",
    [
        (4, 1, 16, 4, Costs()),
        (8, 1, 16, 16, Costs(transfer=1)),
        (4, 1, 16, 4, Costs(18.522, 18.086, 9.337, 0.601)),
        (4, 1, 8, 4, Costs([1, 1, 1, 1.5], [1, 1, 1, 1.5], [1, 1, 1, 1.5], 0.05)),
    ],
)
def test_the_bound_is_reached(ranks, chunks, microbatches, limit, costs):
    found = search(ranks, microbatches, costs, chunks=chunks, memory_limit=limit, seconds=PLENTY, steps=400)
    assert gap(found, costs, limit).share < 1e-4


def test_of_many_microbatches_only_the_repeated_part_is_searched():
    costs = Costs(forward=1, input_grad=1.1, weight_grad=0.8, transfer=0.2)
    found = search(3, 90, costs, memory_limit=4, seconds=PLENTY, steps=300)
    check(found)
    assert gap(found, costs, 4).share < 0.005


def test_stages_may_lie_anywhere():
    placement = (0, 1, 2, 1, 0)
    found = search(placement, 4, memory_limit=4, seconds=PLENTY, steps=STEPS)
    check(found)
    assert found.placement == placement


def test_with_two_chunks_a_v_is_tried_as_well():
    """Two looped stages on each of four ranks cannot be fast in half of 1F1B's memory; on a V they can."""
    placed = search(4, 8, chunks=2, memory_limit=4, seconds=PLENTY, steps=STEPS).placement
    assert placed == (0, 1, 2, 3, 3, 2, 1, 0)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (dict(placement=0), "ranks is not a count"),
        (dict(placement=(0, 2)), "without a gap"),
        (dict(placement=()), "without a gap"),
        (dict(microbatches=0), "microbatches is not a count"),
        (dict(chunks=2, memory_limit=1), "at least 2"),
        (dict(costs=Costs(transfer=[1])), "the cost transfer"),
        (dict(steps=0), "steps is not a count"),
    ],
)
def test_what_cannot_be_searched_is_refused(arguments, words):
    with pytest.raises(ArgumentError, match=words):
        search(**{"placement": 2, "microbatches": 2, **arguments})


@pytest.mark.parametrize("ranks, microbatches, limit", [(2, 9, 2), (4, 17, 4)])
def test_many_microbatches_fit_into_the_least_memory(ranks, microbatches, limit):
    for steps in (1, STEPS):  # without time the first order is taken
        found = search(ranks, microbatches, chunks=2, memory_limit=limit, seconds=PLENTY, steps=steps)
        assert max(simulate(found).peak_activations) <= limit


def test_stages_that_take_no_time_are_searched_too():
    found = search(
        (0, 1, 1, 0, 0, 1), 12, Costs(0, 0, 0, [0, 1, 2, 3, 1, 1]), memory_limit=3, seconds=PLENTY, steps=400
    )
    assert max(simulate(found).peak_activations) <= 3
