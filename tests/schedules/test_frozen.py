"""Schedules without what frozen stages do not need: proven, no longer, and in the order that they had."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpipipe import schedules
from mpipipe.errors import ArgumentError, ScheduleError
from mpipipe.schedules import Action, Costs, Schedule, simulate, with_frozen

CHUNKS = {  # of each schedule; None: any number
    "gpipe": 1, "one_f_one_b": 1, "zero_bubble_h1": 1, "zero_bubble_2p": 1, "interleaved_1f1b": None,
    "looped_bfs": None, "interleaved_zero_bubble": None, "zero_bubble_v": 2, "dualpipe_v": 2, "v_half": 2, "v_min": 2,
}  # fmt: skip


def build(name, ranks, chunks, microbatches):
    return schedules.by_name(name, ranks=ranks, chunks=CHUNKS[name] or chunks, microbatches=microbatches)


@settings(max_examples=120, deadline=None)
@given(
    name=st.sampled_from([*CHUNKS]), ranks=st.integers(1, 4), chunks=st.integers(1, 3), microbatches=st.integers(1, 6),
    data=st.data(),
)  # fmt: skip
def test_what_is_left_is_proven_and_takes_no_longer(name, ranks, chunks, microbatches, data):
    schedule = build(name, ranks, chunks, microbatches)
    frozen = data.draw(st.sets(st.integers(0, schedule.stages - 1), max_size=schedule.stages - 1))
    found = with_frozen(schedule, frozen)
    schedules.check(found)
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


def test_nothing_frozen_changes_nothing():
    schedule = schedules.zero_bubble_h1(3, 4)
    assert with_frozen(schedule, ()) == schedule


def test_bubble_counts_only_what_runs():
    found = with_frozen(schedules.gpipe(2, 1), {0})
    timeline = simulate(found)  # F | F B B on two ranks
    assert timeline.makespan == 4 and timeline.bubble_fraction == (2 * 4 - 4) / 8
    assert timeline.peak_activations == [0, 1]


def test_wrong_stages_are_refused():
    for frozen in ({0, 1}, {2}, {-1}):
        with pytest.raises(ArgumentError, match="do not fit the schedule"):
            with_frozen(schedules.gpipe(2, 1), frozen)


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
