"""What a rank holds for its backwards, against intervals that are added up slot by slot."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.random_schedules import runnable_schedules
from support.tolerance import close

from mpipipe import schedules
from mpipipe.errors import ArgumentError
from mpipipe.schedules import peak_memory, simulate, with_recompute


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


@given(schedule=runnable_schedules())
def test_without_recomputation_it_counts_activations(schedule):
    plain = schedules.with_recompute(schedule, memory_limit=math.inf)
    assert peak_memory(plain) == simulate(plain).peak_activations


@pytest.mark.parametrize("ranks, microbatches", [(1, 1), (2, 1), (3, 8), (4, 8), (8, 3)])
def test_1f1b_that_recomputes_all_holds_its_inputs_and_one_activation(ranks, microbatches):
    schedule = with_recompute(schedules.one_f_one_b(ranks, microbatches))
    assert simulate(schedule).peak_activations == [1] * ranks
    expected = [100 + min(microbatches, ranks - rank) - 1 for rank in range(ranks)]
    close(peak_memory(schedule, activation=100, kept_input=1), expected, 4)


def test_a_schedule_of_forwards_holds_nothing():
    assert peak_memory(schedules.forward_only(2, 2, 3), 5) == [0, 0]


def test_stages_without_backward_hold_nothing():
    schedule = schedules.with_frozen(schedules.gpipe(3, 4), {0})
    assert peak_memory(schedule, 5) == [0, 20, 20]


@pytest.mark.parametrize("sizes", [(-1, 0), (math.inf, 0), ([1], 0), (1, 2), ("big", 0)])
def test_sizes_that_do_not_fit_are_refused(sizes):
    with pytest.raises(ArgumentError):
        peak_memory(schedules.gpipe(2, 2), *sizes)
