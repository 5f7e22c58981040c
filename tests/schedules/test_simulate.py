"""The simulator against closed forms and against longest paths computed another way."""

import math
from graphlib import TopologicalSorter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.random_schedules import runnable_schedules
from support.tolerance import close

from mpipipe import schedules
from mpipipe.errors import ArgumentError
from mpipipe.schedules import Action, Costs, peak_memory, simulate, with_recompute
from mpipipe.tracing.efficiency import efficiencies
from mpipipe.tracing.segments import PARTS


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
    share = busy / (schedule.ranks * timeline.makespan) if timeline.makespan else 1
    close(1 + timeline.efficiency, 1 + share, 4)  # what is left of 1 is as exact as 1


@pytest.mark.parametrize("ranks, microbatches", [(1, 1), (2, 4), (4, 8), (2, 16), (4, 4), (4, 2)])
def test_efficiency_of_1f1b_is_that_of_the_literature_and_of_a_trace_in_which_ranks_compute_or_wait(
    ranks, microbatches
):
    timeline = simulate(schedules.one_f_one_b(ranks, microbatches), Costs(2, 1, 1))  # F as long as B
    close(1 + timeline.efficiency, 1 + microbatches / (microbatches + ranks - 1), 4)
    busy = [sum(end - start for _, start, end in spans) for spans in timeline.spans]
    parts = {
        rank: {**dict.fromkeys(PARTS, 0.0), "compute": time, "bubble": timeline.makespan - time}
        for rank, time in enumerate(busy)
    }
    close(1 + timeline.efficiency, 1 + efficiencies(parts).parallel, 4)


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


def test_free_actions_make_no_bubble():
    timeline = simulate(schedules.gpipe(2, 2), Costs(0, 0, 0))
    assert (timeline.makespan, timeline.bubble_fraction, timeline.bubble_ratio, timeline.efficiency) == (0, 0, 0, 1)


@pytest.mark.parametrize("cost", [-1, math.nan, math.inf, [1, 2], [1, 2, 3], "fast", ["a", "b", "c", "d"], None])
def test_costs_that_do_not_fit_are_refused(cost):
    with pytest.raises(ArgumentError, match="forward"):
        simulate(schedules.gpipe(4, 2), Costs(forward=cost))


def test_costs_of_stages_have_a_mean_that_fits_any_number_of_them():
    assert Costs([1, 3], 2, [0, 4], [0, 1]).average(2) == Costs(2, 2, 2, 0.5, 2)


def test_large_schedules_are_built_checked_and_simulated():
    timeline = simulate(schedules.interleaved_1f1b(64, 4, 128))
    assert timeline.makespan == (128 * 4 + 63) * 3


# -- Memory for backwards, against intervals that are added up slot by slot --------------------------------------------


@given(schedule=runnable_schedules(), data=st.data())
def test_peak_is_the_largest_sum_of_what_is_held(schedule, data):
    whole = data.draw(st.lists(st.integers(4, 9), min_size=schedule.stages, max_size=schedule.stages))
    kept = data.draw(st.lists(st.integers(0, 4), min_size=schedule.stages, max_size=schedule.stages))
    for order, peak in zip(schedule.orders, peak_memory(schedule, whole, kept)):
        slot_of = {action: slot for slot, action in enumerate(order)}
        sums = [0] * len(order)
        for stage, microbatch in {(action.stage, action.microbatch) for action in order}:
            begin = slot_of[stage, "F", microbatch]
            end = max(slot_of.get((stage, op, microbatch), 0) for op in "BW")
            again = slot_of.get((stage, "R", microbatch), begin)
            for slot in range(begin, end + 1):
                sums[slot] += kept[stage] if begin < slot < again else whole[stage]
        assert peak == max(sums)


@pytest.mark.parametrize("ranks, microbatches", [(1, 1), (2, 1), (3, 8), (4, 8), (8, 3)])
def test_1f1b_that_recomputes_all_holds_its_inputs_and_one_activation(ranks, microbatches):
    schedule = with_recompute(schedules.one_f_one_b(ranks, microbatches))
    assert simulate(schedule).peak_activations == [1] * ranks
    expected = [100 + min(microbatches, ranks - rank) - 1 for rank in range(ranks)]
    close(peak_memory(schedule, activation=100, kept_input=1), expected, 4)


@pytest.mark.parametrize("sizes", [(-1, 0), (math.inf, 0), ([1], 0), (1, 2), ("big", 0)])
def test_sizes_that_do_not_fit_are_refused(sizes):
    with pytest.raises(ArgumentError):
        peak_memory(schedules.gpipe(2, 2), *sizes)


def test_stages_without_backwards_hold_nothing():
    assert peak_memory(schedules.forward_only(2, 2, 3), 5) == [0, 0]
    assert simulate(schedules.forward_only(2, 2, 4)).peak_activations == [0, 0]
    assert peak_memory(schedules.with_frozen(schedules.gpipe(3, 4), {0}), 5) == [0, 20, 20]
