"""The simulator against closed forms and against longest paths computed another way."""

from __future__ import annotations

import math
from graphlib import TopologicalSorter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.random_schedules import runnable_schedules
from support.tolerance import close

from mpipipe import schedules
from mpipipe.errors import ArgumentError, ScheduleError
from mpipipe.schedules import Action, Costs, simulate


def longest_path(schedule, costs):
    """End of every action: the longest path through order and data edges; costs are plain sequences."""
    rank_of, last = schedule.placement, schedule.stages - 1
    backward_of = {(a.stage, a.microbatch): a for order in schedule.orders for a in order if a.op in "BI"}
    duration = {
        "F": lambda stage: costs.forward[stage],
        "I": lambda stage: costs.input_grad[stage],
        "W": lambda stage: costs.weight_grad[stage],
        "R": lambda stage: (costs.recompute or costs.forward)[stage],
        "B": lambda stage: costs.input_grad[stage] + costs.weight_grad[stage],
    }
    edges = {}  # action -> {predecessor: time on the way}
    for order in schedule.orders:
        for before, action in zip((None, *order), order):
            edges[action] = {before: 0} if before else {}
            stage, op, microbatch = action
            source = None
            if op == "F" and stage > 0:
                source, edge = Action(stage - 1, "F", microbatch), stage
            elif op in "BI" and stage < last:
                source, edge = backward_of[stage + 1, microbatch], stage + 1
            if source:
                edges[action][source] = costs.transfer[edge] if rank_of[source.stage] != rank_of[stage] else 0
    ends = {}
    for action in TopologicalSorter(edges).static_order():
        start = max((ends[before] + way for before, way in edges[action].items()), default=0)
        ends[action] = start + duration[action.op](action.stage)
    return ends


@given(schedule=runnable_schedules(), data=st.data())
def test_every_action_ends_at_its_longest_path(schedule, data):
    times = st.lists(st.integers(0, 6), min_size=schedule.stages, max_size=schedule.stages)
    costs = Costs(*(data.draw(times) for _ in range(4)), data.draw(st.none() | times))
    timeline = simulate(schedule, costs)
    expected = longest_path(schedule, costs)
    assert {action: end for spans in timeline.spans for action, _, end in spans} == expected
    assert timeline.makespan == max(expected.values())
    busy = sum(end - start for spans in timeline.spans for _, start, end in spans)
    idle = schedule.ranks * timeline.makespan - busy
    close(timeline.bubble_fraction, idle / (schedule.ranks * timeline.makespan or 1), 4)
    close(timeline.bubble_ratio, idle / busy if busy else math.inf if idle else 0, 4)


@given(schedule=runnable_schedules())
def test_peak_is_the_largest_number_of_open_intervals(schedule):
    expected = []
    for order in schedule.orders:
        slot_of = {action: slot for slot, action in enumerate(order)}
        opens = {(a.stage, a.microbatch): slot_of[a] for a in order if a.op in "FR"}  # an R comes after its F
        opened = [(slot, stage, microbatch) for (stage, microbatch), slot in opens.items()]
        closes = {(a.stage, a.microbatch): slot_of[a] for a in order if a.op in "BW"}
        spans = [(start, closes[stage, microbatch]) for start, stage, microbatch in opened]
        expected.append(max(sum(start <= slot <= end for start, end in spans) for slot in range(len(order))))
    assert simulate(schedule).peak_activations == expected


@pytest.mark.parametrize("ranks, microbatches, fraction", [(2, 4, 0.2), (4, 8, 3 / 11), (2, 16, 1 / 17)])
def test_bubble_of_1f1b_is_the_published_one(ranks, microbatches, fraction):
    timeline = simulate(schedules.one_f_one_b(ranks, microbatches))
    close(timeline.bubble_fraction, fraction, 4)
    close(timeline.bubble_ratio, (ranks - 1) / microbatches, 4)


def test_bubble_of_interleaving_is_a_share_of_the_chunks():
    timeline = simulate(schedules.interleaved_1f1b(4, 2, 8))
    close(timeline.bubble_fraction, 3 / (2 * 8 + 3), 4)


def test_full_backward_costs_input_and_weight_gradient():
    timeline = simulate(schedules.one_f_one_b(1, 1), Costs(forward=1, input_grad=2, weight_grad=4))
    assert timeline.spans == (((Action(0, "F", 0), 0, 1), (Action(0, "B", 0), 1, 7)),)


def test_transfer_counts_between_ranks_and_not_within_one():
    apart = schedules.gpipe(2, 1)
    together = schedules.interleaved_1f1b(1, 2, 1)
    costs = Costs(transfer=10)
    assert simulate(apart, costs).makespan == 6 + 20
    assert simulate(together, costs).makespan == 6


def test_costs_may_differ_by_stage_and_hop():
    costs = Costs(forward=[1, 2, 3], input_grad=[0, 0, 0], weight_grad=0, transfer=[99, 10, 100])
    timeline = simulate(schedules.gpipe(3, 1), costs)
    assert timeline.makespan == (1 + 10 + 2 + 100 + 3) + (100 + 10)


def test_a_schedule_of_forwards_keeps_nothing():
    assert simulate(schedules.forward_only(2, 2, 4)).peak_activations == [0, 0]


def test_free_actions_make_no_bubble():
    timeline = simulate(schedules.gpipe(2, 2), Costs(0, 0, 0))
    assert (timeline.makespan, timeline.bubble_fraction, timeline.bubble_ratio) == (0, 0, 0)


def test_a_schedule_that_cannot_run_is_refused():
    with pytest.raises(ScheduleError):
        simulate(schedules.from_csv("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n"))


@pytest.mark.parametrize("cost", [-1, math.nan, math.inf, [1, 2], [1, 2, 3], "fast", ["a", "b", "c", "d"], None])
def test_costs_that_do_not_fit_are_refused(cost):
    with pytest.raises(ArgumentError, match="forward"):
        simulate(schedules.gpipe(4, 2), Costs(forward=cost))


def test_large_schedules_are_built_checked_and_simulated():
    timeline = simulate(schedules.interleaved_1f1b(64, 4, 128))
    assert timeline.makespan == (128 * 4 + 63) * 3
