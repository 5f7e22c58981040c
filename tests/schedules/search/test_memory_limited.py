"""Searched schedules with R: proven, within the limit, and no slower than what `with_recompute` makes of any other."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpipipe import schedules
from mpipipe.errors import ArgumentError
from mpipipe.schedules import Costs, check, peak_memory, search_with_recompute, simulate, with_recompute
from mpipipe.schedules.registry import names
from mpipipe.schedules.search.memory_limited import Annealing

PLENTY = 1000.0  # seconds: what ends the search is the number of steps


@settings(max_examples=4)
@given(
    ranks=st.integers(1, 4),
    chunks=st.integers(1, 2),
    microbatches=st.integers(1, 4),
    limit=st.integers(1, 6),
    kept=st.sampled_from([0.0, 0.1, 0.5]),
    seed=st.integers(0, 1000),
)
def test_it_is_proven_keeps_the_limit_and_is_no_slower_than_any_other(ranks, chunks, microbatches, limit, kept, seed):
    draw = random.Random(seed)
    costs = Costs(*[[draw.randint(1, 4) for _ in range(ranks * chunks)] for _ in range(4)])
    others = []
    for name in names(chunks):
        plain = schedules.by_name(name, ranks=ranks, chunks=chunks, microbatches=microbatches, costs=costs)
        try:
            others.append(simulate(with_recompute(plain, costs, limit, kept_input=kept), costs).makespan)
        except ArgumentError:
            continue
    sizes = dict(memory_limit=limit, kept_input=kept, chunks=chunks, seconds=PLENTY, steps=12, seed=seed)
    if limit < 1 + (chunks - 1) * kept:  # what one micro-batch at a time needs
        with pytest.raises(ArgumentError, match="no choice of forwards"):
            search_with_recompute(ranks, microbatches, costs, **sizes)
        return
    found = search_with_recompute(ranks, microbatches, costs, **sizes)
    check(found)
    assert max(peak_memory(found, kept_input=kept)) <= limit * (1 + 1e-9)
    assert simulate(found, costs).makespan <= min(others, default=float("inf")) + 1e-9


def test_the_same_steps_and_seed_give_the_same_schedule():
    first, again = (search_with_recompute(3, 4, memory_limit=2, seconds=PLENTY, steps=40, seed=3) for _ in range(2))
    assert first == again


def test_nothing_is_run_again_where_memory_is_plenty_and_a_limit_below_the_stages_of_a_rank_may_do():
    found = search_with_recompute(4, 8, memory_limit=8, seconds=PLENTY, steps=100)
    assert not found.recomputed and simulate(found).makespan == schedules.lower_bound(found)
    found = search_with_recompute((0, 1, 1, 0), 4, memory_limit=1, seconds=PLENTY, steps=60)
    assert found.placement == (0, 1, 1, 0) and max(peak_memory(found)) == 1


def test_forwards_that_are_run_again_in_waits_beat_the_search_without_them():
    plain = schedules.search(4, 8, memory_limit=2, seconds=PLENTY, steps=100)
    found = search_with_recompute(4, 8, memory_limit=2, seconds=PLENTY, steps=600)
    assert found.recomputed and simulate(found).makespan < 0.9 * simulate(plain).makespan
    assert found.name == "search" and max(simulate(found).peak_activations) <= 2


@settings(max_examples=25)
@given(seed=st.integers(0, 1000), microbatches=st.integers(1, 5), limit=st.integers(2, 4))
def test_the_times_of_the_annealing_are_those_of_the_simulation(seed, microbatches, limit):
    draw = random.Random(seed)
    costs = Costs(*[[draw.randint(1, 4) for _ in range(6)] for _ in range(4)])
    schedule = with_recompute(schedules.interleaved_1f1b(3, 2, microbatches), costs, limit)
    annealing = Annealing(schedule, costs, limit, 0.0, draw)
    assert annealing.makespan <= simulate(schedule, costs).makespan + 1e-9  # a backward is split: its I is there sooner
    steps = iter(range(100))
    found = annealing.run(0.0, lambda: next(steps, None) is not None)
    check(found)
    assert abs(simulate(found, costs).makespan - annealing.makespan) < 1e-9
    assert max(peak_memory(found)) <= limit


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(memory_limit=0.5), "no choice of forwards"),
        (dict(memory_limit=None), "memory_limit is no number"),
        (dict(memory_limit="2"), "memory_limit is no number"),
        (dict(kept_input=2), "part of its activation"),
        (dict(seconds=0), "no time to search"),
        (dict(steps=0), "steps is not a count"),
    ],
)
def test_what_cannot_be_is_refused(change, words):
    with pytest.raises(ArgumentError, match=words):
        search_with_recompute(2, 4, **{**dict(memory_limit=2, seconds=1), **change})
