"""Recomputation put into schedules: what it costs, against all possible choices and places, and what it holds."""

import itertools
import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.random_schedules import runnable_schedules

from mpipipe import schedules
from mpipipe.schedules import Action, Costs, peak_memory, simulate, with_recompute


def without(schedule):
    return [[action for action in order if action.op != "R"] for order in schedule.orders]


def naively(schedule, pairs):
    """The schedule with an R just before the backward of each pair."""
    rows = []
    for order in without(schedule):
        row = []
        for stage, op, microbatch in order:
            if op in "BI" and (stage, microbatch) in pairs:
                row.append(Action(stage, "R", microbatch))
            row.append(Action(stage, op, microbatch))
        rows.append(row)
    return replace(schedule, orders=rows)


def pairs_of(schedule):
    return {(action.stage, action.microbatch) for order in schedule.orders for action in order if action.op in "BI"}


def test_without_a_limit_every_backward_has_its_recomputation():
    text = with_recompute(schedules.zero_bubble_h1(2, 2)).to_csv()
    assert text == "0F0,0F1,0R0,0I0,0W0,0R1,0I1,0W1\n1F0,1R0,1I0,1F1,1R1,1I1,1W0,1W1\n"


def test_a_wait_ahead_hides_recomputations():
    """Five of 64 forwards run again bring 11 activations down to 8, in time in which the ranks would wait anyway."""
    schedule = schedules.interleaved_1f1b(4, 2, 8)
    found = with_recompute(schedule, memory_limit=8)
    assert max(peak_memory(schedule)) == 11 and max(peak_memory(found)) == 8
    assert simulate(found).makespan == simulate(schedule).makespan == 57
    assert simulate(naively(schedule, found.recomputed)).makespan == 59


def test_a_schedule_that_fits_is_left_alone():
    schedule = schedules.one_f_one_b(4, 8)
    assert with_recompute(schedule, memory_limit=4) == schedule
    assert with_recompute(with_recompute(schedule), memory_limit=math.inf) == schedule
    assert with_recompute(schedules.forward_only(2, 2, 3)) == schedules.forward_only(2, 2, 3)


def test_stages_without_a_backward_have_nothing_to_recompute():
    schedule = schedules.with_frozen(schedules.zero_bubble_h1(3, 2), {0, 2})
    found = with_recompute(schedule)
    assert found.recomputed == {(stage, m) for stage in (1, 2) for m in range(2)} and found.trained_from == 1
    frozen_later = schedules.with_frozen(with_recompute(schedules.zero_bubble_h1(3, 2)), {0, 2})
    assert frozen_later == found


@given(schedule=runnable_schedules(), data=st.data())
def test_never_slower_than_just_before_the_backwards_and_within_the_limit(schedule, data):
    times = st.lists(st.integers(0, 6), min_size=schedule.stages, max_size=schedule.stages)
    costs = Costs(data.draw(times), data.draw(times), data.draw(times), data.draw(times))
    activation, kept = data.draw(st.sampled_from([(1, 0), (10, 3), (0.3, 0.1)]))
    everything = naively(schedule, pairs_of(schedule))
    least = max(peak_memory(everything, activation, kept))
    limit = data.draw(st.sampled_from([None, least, least + activation, math.inf]))
    found = with_recompute(schedule, costs, limit, activation=activation, kept_input=kept)
    schedules.check(found)
    assert without(found) == without(schedule)
    assert simulate(found, costs).makespan <= simulate(naively(schedule, found.recomputed), costs).makespan
    assert max(peak_memory(found, activation, kept)) <= (least + activation if limit is None else limit) * (1 + 1e-6)
    assert found.recomputed == pairs_of(schedule) if limit is None else limit < math.inf or not found.recomputed
    assert schedules.lower_bound(found, costs) <= simulate(found, costs).makespan


def all_choices(schedule, rank, limit, kept):
    """Every order of a rank with R's of some of its pairs, anywhere between F and backward, that keeps the limit."""
    order = schedule.orders[rank]
    pairs = [(action.stage, action.microbatch) for action in order if action.op == "F"]
    for count in range(len(pairs) + 1):
        for chosen in itertools.combinations(pairs, count):
            rows = [list(order)]
            for stage, m in chosen:
                begin = Action(stage, "F", m)
                backs = Action(stage, "B", m), Action(stage, "I", m)
                rows = [
                    [*row[:slot], Action(stage, "R", m), *row[slot:]]
                    for row in rows
                    for slot in range(row.index(begin) + 1, [action in backs for action in row].index(True) + 1)
                ]
            for row in rows:
                changed = replace(schedule, orders=[row if r == rank else o for r, o in enumerate(schedule.orders)])
                if peak_memory(changed, 10, kept)[rank] <= limit:
                    yield tuple(row)


@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b", "zero_bubble_h1"])
@pytest.mark.parametrize("seed", range(4))
def test_no_choice_and_no_place_is_faster(name, seed):
    """Of all of them, on small schedules with uneven costs."""
    rng = random.Random(f"{name} {seed}")
    schedule = schedules.by_name(name, ranks=2, microbatches=2 + seed % 2)
    costs = Costs(*([rng.randint(1, 4) for _ in range(2)] for _ in range(3)), rng.choice([0, 1, 3]))
    kept, limit = rng.choice([0, 2]), 20 + 4 * (seed % 2)
    choices = [set(all_choices(schedule, rank, limit, kept)) for rank in range(2)]
    best = min(simulate(replace(schedule, orders=orders), costs).makespan for orders in itertools.product(*choices))
    found = with_recompute(schedule, costs, limit, activation=10, kept_input=kept)
    assert simulate(found, costs).makespan == best


def test_as_few_forwards_run_again_as_a_limit_needs():
    """By search over all sets. Here forwards cost nothing; else more of them may be faster, in waits."""
    schedule = schedules.one_f_one_b(3, 5)
    found = with_recompute(schedule, Costs(forward=0), memory_limit=2)
    pairs = sorted(pairs_of(schedule))
    fitting = (
        count
        for count in range(len(pairs))
        for chosen in itertools.combinations([pair for pair in pairs if pair[0] == 0], count)
        if max(peak_memory(naively(schedule, chosen))) <= 2
    )
    assert len(found.recomputed) == next(fitting) > 0
