"""Partitions against exhaustive search."""

from fractions import Fraction
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.any_schedule import NAMES, build

from mpipipe import schedules
from mpipipe.errors import ArgumentError, ScheduleError
from mpipipe.schedules import Action, Costs, Schedule, partition, simulate, with_frozen


def sizes(parts):
    return [stop - start for start, stop in parts]


def best_of_all(costs, stages):
    """The best cut by looking at every one: bottleneck, then squares of costs, of sizes, then longer stages first."""

    def badness(cuts):
        parts = list(zip((0, *cuts), (*cuts, len(costs))))
        loads = [sum(map(Fraction, costs[start:stop])) for start, stop in parts]
        lengths = sizes(parts)
        squares = sum(load**2 for load in loads), sum(length**2 for length in lengths)
        return (max(loads), *squares, [-length for length in lengths]), parts

    return min(map(badness, combinations(range(1, len(costs)), stages - 1)))[1]


@pytest.mark.parametrize(
    "costs, stages, expected",
    [
        ([1] * 24, 4, [6, 6, 6, 6]),
        ([1] * 10, 3, [4, 3, 3]),
        ([0] * 10, 3, [4, 3, 3]),
        ([100] * 4 + [400], 2, [4, 1]),
        ([1, 5, 2, 3], 3, [1, 1, 2]),  # 6, 2, 3 is more even and slower
        ([5], 1, [1]),
        ([3, 1, 1, 1, 1, 1, 3], 3, [2, 3, 2]),
        ([4] + [1] * 8 + [4], 4, [1, 4, 4, 1]),  # an embedding and a head
    ],
)
def test_known_partitions(costs, stages, expected):
    assert sizes(partition(costs, stages)) == expected


@given(layers=st.integers(1, 60), stages=st.integers(1, 60))
def test_equal_layers_differ_by_one_with_the_longer_stages_first(layers, stages):
    if layers < stages:
        with pytest.raises(ArgumentError):
            partition([1.5] * layers, stages)
        return
    parts = partition([1.5] * layers, stages)
    size, longer = divmod(layers, stages)
    assert sizes(parts) == [size + 1] * longer + [size] * (stages - longer)
    assert [layer for start, stop in parts for layer in range(start, stop)] == list(range(layers))


cost = st.integers(0, 9) | st.floats(0, 10, allow_nan=False) | st.fractions(0, 10, max_denominator=9)


@given(costs=st.lists(cost, min_size=1, max_size=9), data=st.data())
def test_no_other_cut_is_better(costs, data):
    stages = data.draw(st.integers(1, len(costs)))
    assert partition(costs, stages) == best_of_all(costs, stages)


# -- Schedules without what frozen stages do not need: proven, no longer, and in the order that they had ---------------


@settings(max_examples=120, deadline=None)
@given(
    name=st.sampled_from([name for name in NAMES if name != "forward_only"]),
    ranks=st.integers(1, 4),
    chunks=st.integers(1, 3),
    microbatches=st.integers(1, 6),
    data=st.data(),
)
def test_what_is_left_is_proven_and_takes_no_longer(name, ranks, chunks, microbatches, data):
    schedule = build(name, ranks, chunks, microbatches)
    frozen = data.draw(st.sets(st.integers(0, schedule.stages - 1), max_size=schedule.stages - 1))
    found = with_frozen(schedule, frozen)
    schedules.check(found)
    assert frozen or found == schedule
    first = min(set(range(schedule.stages)) - frozen)
    ops = {stage: {a.op for order in found.orders for a in order if a.stage == stage} for stage in range(found.stages)}
    for stage in range(schedule.stages):
        assert "W" not in ops[stage] or stage not in frozen
        assert (ops[stage] == {"F"}) == (stage < first)
    for before, after in zip(schedule.orders, found.orders):
        places = [(a.stage, "B" if a.stage in frozen and a.op == "I" else a.op, a.microbatch) for a in before]
        rest = iter(places)
        assert all(tuple(action) in rest for action in after), "the order stays"
    weights = [0.0 if stage in frozen else 1.0 for stage in range(schedule.stages)]
    costs = Costs(weight_grad=weights)
    assert simulate(found, costs).makespan <= simulate(schedule, costs).makespan
    assert 0 <= simulate(found, costs).bubble_fraction < 1
    for now, then in zip(simulate(found).peak_activations, simulate(schedule).peak_activations):
        assert now <= then


def test_bubble_counts_only_what_runs():
    found = with_frozen(schedules.gpipe(2, 1), {0})
    timeline = simulate(found)  # F | F B B on two ranks
    assert timeline.makespan == 4 and timeline.bubble_fraction == (2 * 4 - 4) / 8
    assert timeline.peak_activations == [0, 1]


def test_the_proof_refuses_a_backward_before_the_first_trained_stage_and_asks_for_all_others():
    orders = [[Action(0, "F", 0)], [Action(1, "F", 0), Action(1, "B", 0)]]
    schedules.check(Schedule("by hand", (0, 1), 1, orders, trained_from=1))
    with pytest.raises(ScheduleError, match="0B0 is missing"):
        schedules.check(Schedule("by hand", (0, 1), 1, orders))
    with pytest.raises(ScheduleError, match="1B0 is missing"):
        schedules.check(Schedule("by hand", (0, 1, 0), 1, [[*orders[0], Action(2, "F", 0), Action(2, "B", 0)],
                                 [Action(1, "F", 0)]], trained_from=1))  # fmt: skip
    with pytest.raises(ScheduleError, match="stage 0 has nothing to train"):
        schedules.check(Schedule("by hand", (0, 1), 1, [[*orders[0], Action(0, "B", 0)], orders[1]], trained_from=1))
    with pytest.raises(ScheduleError, match="trained_from"):
        schedules.check(Schedule("by hand", (0, 1), 1, orders, trained_from=2))
