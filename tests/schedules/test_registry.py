"""Schedules by name, and how many micro-batches to take."""

import pytest
from support.any_schedule import NAMES
from support.tolerance import close

from mpipipe.errors import ArgumentError
from mpipipe.schedules import Advice, Costs, advise, by_name, registry, simulate


@pytest.mark.parametrize("ranks, chunks", [(1, 1), (2, 1), (8, 1), (8, 2), (4, 3)])
def test_advice_is_four_microbatches_per_rank_with_the_bubble_that_simulation_finds(ranks, chunks):
    advice = advise(ranks, chunks)
    assert advice.microbatches == 4 * ranks
    schedule = by_name(advice.schedule, ranks=ranks, chunks=chunks, microbatches=advice.microbatches)
    timeline = simulate(schedule)
    close(advice.bubble_fraction, timeline.bubble_fraction, 4)
    assert advice.peak_activations == max(timeline.peak_activations)
    assert advice.schedule == ("one_f_one_b" if chunks == 1 else "interleaved_1f1b")


@pytest.mark.parametrize("ranks, chunks, microbatches", [(1, 1, 3), (2, 1, 1), (4, 1, 8), (3, 2, 5), (2, 4, 6)])
def test_no_schedule_is_faster_than_the_advised_one_nor_as_fast_in_less_memory(ranks, chunks, microbatches):
    costs = Costs(2, [1 + stage % 3 for stage in range(ranks * chunks)], 1, 0.25)
    for given in (Costs(), costs):
        sizes = dict(ranks=ranks, chunks=chunks, microbatches=microbatches, costs=given)
        advice = advise(**sizes)
        best = simulate(by_name(advice.schedule, **sizes), given)
        assert advice == Advice(microbatches, best.bubble_fraction, advice.schedule, max(best.peak_activations))
        for name in NAMES:
            if name in registry.names(chunks):
                other = simulate(by_name(name, **sizes), given)
                slower = other.makespan > best.makespan * (1 + 1e-9)
                close(max(best.makespan, other.makespan), other.makespan, 8)
                assert slower or max(other.peak_activations) >= advice.peak_activations
    assert advise(4, 1, 8) == Advice(8, 1 / 9, "zero_bubble_h1", 4)  # ZB-H1 of equal times: (P-1) / (3M + P-1)


def test_an_unknown_name_is_refused_with_what_may_have_been_meant_or_with_all_names():
    for name, meant in (("One-F-One-B", "one_f_one_b"), ("ScheduleGPipe", "gpipe"), ("gpip", "gpipe")):
        with pytest.raises(ArgumentError, match="unknown schedule") as refusal:
            by_name(name, ranks=2, microbatches=4)
        assert refusal.value.expected == meant
    with pytest.raises(ArgumentError) as refusal:
        by_name("any", ranks=2, microbatches=4)
    assert all(name in str(refusal.value) for name in NAMES)


def test_one_name_of_1f1b_is_as_good_as_the_other_and_a_v_has_two_stages_on_a_rank_by_itself():
    assert by_name("1f1b", ranks=3, microbatches=4) == by_name("one_f_one_b", ranks=3, microbatches=4)
    assert by_name("v_half", ranks=3, microbatches=4) == by_name("v_half", ranks=3, chunks=2, microbatches=4)
