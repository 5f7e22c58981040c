"""The simulator against closed forms and counts by hand; every action of any schedule is in test_slices.py."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.random_schedules import runnable_schedules
from support.tolerance import close

from mpipipe import schedules
from mpipipe.schedules import peak_memory, simulate, with_recompute


def test_large_schedules_are_built_checked_and_simulated():
    timeline = simulate(schedules.interleaved_1f1b(64, 4, 128))
    assert timeline.makespan == (128 * 4 + 63) * 3


# -- Memory for backwards, against intervals that are added up slot by slot --------------------------------------------


@given(schedule=runnable_schedules(), data=st.data())
def test_peak_is_the_largest_sum_of_what_is_held(schedule, data):
    whole = data.draw(st.lists(st.integers(4, 9), min_size=schedule.stages, max_size=schedule.stages))
    kept = data.draw(st.lists(st.integers(0, 4), min_size=schedule.stages, max_size=schedule.stages))
    peaks = peak_memory(schedule, whole, kept), simulate(schedule).peak_activations
    for rank, order in enumerate(schedule.orders):
        slot_of = {action: slot for slot, action in enumerate(order)}
        sums, counts = [0] * len(order), [0] * len(order)
        for stage, microbatch in {(action.stage, action.microbatch) for action in order}:
            begin = slot_of[stage, "F", microbatch]
            end = max(slot_of.get((stage, op, microbatch), 0) for op in "BW")
            again = slot_of.get((stage, "R", microbatch), begin)
            for slot in range(begin, end + 1):
                sums[slot] += kept[stage] if begin < slot < again else whole[stage]
                counts[slot] += slot >= again
        assert (max(sums), max(counts)) == (peaks[0][rank], peaks[1][rank])


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
