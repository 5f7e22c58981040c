"""The simulator against closed forms and counts by hand; every action of any schedule is in test_slices.py."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.random_schedules import runnable_schedules
from support.tolerance import close

from mpipipe import schedules
from mpipipe.schedules import peak_memory, simulate, with_recompute


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


def test_stages_without_backwards_hold_nothing():
    assert peak_memory(schedules.forward_only(2, 2, 3), 5) == [0, 0]
    assert simulate(schedules.forward_only(2, 2, 4)).peak_activations == [0, 0]
    assert peak_memory(schedules.with_frozen(schedules.gpipe(3, 4), {0}), 5) == [0, 20, 20]
