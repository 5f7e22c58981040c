"""Slices of sequences as units of a schedule: every generator, the proof, times, memory and text."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.random_schedules import runnable_schedules
from support.tolerance import close

from mpipipe import schedules
from mpipipe.errors import ScheduleError
from mpipipe.schedules import Action, Costs, Schedule, by_name, check, names, simulate

SLICES = (1, 2, 3, 8)
EVERY = [(name, chunks) for chunks in (1, 2) for name in [*names(chunks), "forward_only"]]
sliced_schedules = st.integers(1, 4).flatmap(runnable_schedules)


@pytest.mark.parametrize("name, chunks", EVERY)
def test_every_generator_runs_each_slice_once_in_the_order_of_its_sequence(name, chunks):
    for ranks in (1, 2, 4):
        for microbatches in (1, 2, 5):
            whole = by_name(name, ranks=ranks, chunks=chunks, microbatches=microbatches)
            for slices in SLICES:
                made = by_name(name, ranks=ranks, chunks=chunks, microbatches=microbatches, slices=slices)
                check(replace(made))  # proven anew
                assert (made.name, made.placement) == (name, whole.placement)
                assert (made.microbatches, made.slices, made.units) == (microbatches, slices, microbatches * slices)
                if slices == 1:
                    assert made == whole and made.fingerprint == whole.fingerprint
                units = by_name(name, ranks=ranks, chunks=chunks, microbatches=microbatches * slices)
                for order, other in zip(made.orders, units.orders):
                    assert [a for a in order if a.op == "F"] == [a for a in other if a.op == "F"]
                    assert [a[:2] for a in order if a.op != "F"] == [a[:2] for a in other if a.op != "F"]


@pytest.mark.parametrize("slices", SLICES)
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("microbatches", [1, 2, 5])
def test_1f1b_and_gpipe_have_their_closed_forms(ranks, microbatches, slices):
    timeline = simulate(schedules.one_f_one_b(ranks, microbatches, slices=slices), Costs(2, 1, 3))
    units = microbatches * slices
    assert timeline.makespan == (units + ranks - 1) * (2 + 4)
    held = [min(units, slices + ranks - 1 - rank) for rank in range(ranks)]
    assert timeline.peak_activations == held
    assert timeline.peak_sequences == [count / slices for count in held]
    if units >= slices + ranks - 1:
        close(timeline.peak_sequences[0], 1 + (ranks - 1) / slices, 2)
    for backward in ("fifo", "lifo"):
        everything = simulate(schedules.gpipe(ranks, microbatches, backward, slices=slices), Costs(2, 1, 3))
        assert everything.makespan == timeline.makespan and everything.peak_activations == [units] * ranks


def test_lifo_falls_as_a_whole():
    made = schedules.gpipe(2, 2, "lifo", slices=2)
    check(made)
    assert made.to_csv().splitlines()[0] == "0F0.0,0F0.1,0F1.0,0F1.1,0B1.1,0B1.0,0B0.1,0B0.0"


# -- The proof ---------------------------------------------------------------------------------------------------------


@given(schedule=st.integers(2, 4).flatmap(runnable_schedules), data=st.data())
def test_two_slices_of_a_sequence_that_change_places_are_refused_by_name(schedule, data):
    n = schedule.slices
    unit, stage = data.draw(st.integers(0, schedule.units - 2)), data.draw(st.integers(0, schedule.stages - 1))
    unit -= unit % n == n - 1
    op = data.draw(st.sampled_from("FB"))
    rank = schedule.placement[stage]
    order = list(schedule.orders[rank])
    slots = [
        slot
        for slot, action in enumerate(order)
        if action.stage == stage and action.op in ("F" if op == "F" else "BI") and action.microbatch in (unit, unit + 1)
    ]
    first, second = slots
    order[first], order[second] = (  # with the ops that stand there, so that I's stay before their W's
        action._replace(op=order[slot].op) for slot, action in ((first, order[second]), (second, order[first]))
    )
    orders = [order if other == rank else row for other, row in enumerate(schedule.orders)]
    with pytest.raises(ScheduleError) as refusal:
        check(replace(schedule, orders=orders))
    assert refusal.value.stage is not None and refusal.value.microbatch is not None
    assert refusal.value.microbatch < schedule.microbatches and ">" in str(refusal.value)


def test_slices_are_a_part_of_what_a_schedule_is():
    orders = [[*(Action(0, "F", unit) for unit in range(4)), *(Action(0, "B", unit) for unit in (3, 2, 1, 0))]]
    same = [Schedule("made", (0,), 4 // slices, orders, slices=slices) for slices in (1, 2, 4)]
    for each in same:
        check(each)
    assert len({each.fingerprint for each in same}) == len({*map(repr, same)}) == 3
    assert repr(same[1]) == "<Schedule made: 1 rank, 1 stage, 2 micro-batches in 2 slices each>"
    assert repr(same[2]) == "<Schedule made: 1 rank, 1 stage, 1 micro-batch in 4 slices>"


# -- Text --------------------------------------------------------------------------------------------------------------


def test_drawings_write_the_slice():
    made = schedules.one_f_one_b(2, 1, slices=2)
    assert schedules.timeline(made).splitlines() == [
        "rank 0 0F0.0 0F0.1 ..................0B0.1------ 0B0.0------",
        "rank 1 ......1F0.0 1F0.1 1B0.1------ 1B0.0------ ............",
    ]
    assert schedules.grid(made, mark=(1, 2)).splitlines()[-1] == "rank 1  1F0.0  1F0.1 >1B0.1< 1B0.0"


# -- Slices that take different times ----------------------------------------------------------------------------------


@given(schedule=sliced_schedules, data=st.data())
def test_every_action_starts_after_the_one_before_it_and_what_it_waits_for_and_slices_take_their_own_times(
    schedule, data
):
    times = st.lists(st.integers(0, 6), min_size=schedule.stages, max_size=schedule.stages)
    costs = Costs(*(data.draw(times) for _ in range(4)), data.draw(st.none() | times))
    slices = data.draw(st.lists(st.integers(1, 5), min_size=schedule.slices, max_size=schedule.slices))
    timeline = simulate(schedule, replace(costs, slices=slices))
    ends = {(a.stage, a.op == "F", a.microbatch): end for row in timeline.spans for a, _, end in row if a.op in "FBI"}
    for spans in timeline.spans:
        before = 0.0
        for (stage, op, unit), start, end in spans:
            awaited = stage - 1 if op == "F" else stage + 1 if op in "BI" else -1
            ready = 0.0
            if 0 <= awaited < schedule.stages:
                there = ends[awaited, op == "F", unit]
                hop = costs.transfer[max(stage, awaited)]
                ready = there + (hop if schedule.placement[awaited] != schedule.placement[stage] else 0)
            close(start, max(before, ready), 200, max(start, 1))
            alone = {"F": costs.forward, "R": costs.recompute or costs.forward}
            alone |= {"I": costs.input_grad, "W": costs.weight_grad}
            cost = costs.input_grad[stage] + costs.weight_grad[stage] if op == "B" else alone[op][stage]
            close(end - start, cost * slices[unit % len(slices)] * len(slices) / sum(slices), 200, max(end, 1))
            before = end
    assert timeline.makespan == max(spans[-1][2] for spans in timeline.spans)
    busy = sum(end - start for spans in timeline.spans for _, start, end in spans)
    share = busy / (schedule.ranks * timeline.makespan) if timeline.makespan else 1
    close(1 + timeline.bubble_fraction, 2 - share, 200)
    close(1 + timeline.efficiency, 1 + share, 200)
    idle = timeline.bubble_ratio / (1 + timeline.bubble_ratio) if timeline.bubble_ratio < math.inf else 1
    close(1 + timeline.bubble_fraction, 1 + idle, 200)
    assert schedules.lower_bound(schedule, replace(costs, slices=slices)) <= timeline.makespan * (1 + 1e-9)


@pytest.mark.parametrize("ranks, slices", [(2, 8), (4, 8), (4, 3), (8, 8), (1, 5)])
def test_the_bound_of_one_sequence_is_reached(ranks, slices):
    """All n forwards, then the way there and back of the last slice, then n of I and W: no order is faster."""
    made = schedules.zero_bubble_h1(ranks, 1, slices=slices)
    least = max(3 * slices + ranks - 1, slices + 2 * (ranks - 1) + 2 * slices)
    assert simulate(made).makespan == schedules.lower_bound(made) == least


def test_only_ratios_of_slices_count_and_equal_ones_change_nothing():
    made = schedules.one_f_one_b(3, 2, slices=4)
    one, ten = (simulate(made, Costs(1, 2, 1, 0.25, slices=[size * k for k in (1, 2, 3, 4)])) for size in (1, 10))
    close(one.makespan, ten.makespan, 100)
    assert simulate(made, Costs(slices=(7, 7, 7, 7))).spans == simulate(made).spans
    assert one.makespan > simulate(made, Costs(1, 2, 1, 0.25)).makespan


def test_long_slices_hold_more_than_short_ones():
    """Lengths 3, 2, 1: short slices go back first, and long ones of the next sequence take their places."""
    for ranks, peak in ((1, 3 + 2 + 3), (2, 3 + 2 + 3 + 2), (3, 3 + 3 + 2 + 1 + 3)):
        made = schedules.one_f_one_b(ranks, 3, slices=3)
        close(schedules.peak_memory(made, 2.0, slices=(3, 2, 1))[0], peak, 20)
    again = schedules.with_recompute(made)
    plain, cut = (schedules.peak_memory(again, 2, 0.5, slices) for slices in ((1, 1, 1), (3, 2, 1)))
    assert plain == schedules.peak_memory(again, 2, 0.5) and cut[0] > plain[0]
    frozen = schedules.with_frozen(made, {0})
    assert schedules.peak_memory(frozen, 2.0, slices=(3, 2, 1))[0] == 0


# -- What else knows slices --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slices, times", [(2, None), (3, (1, 2, 3))])
def test_recomputation_frozen_stages_and_skips_keep_the_slices(slices, times):
    made = schedules.zero_bubble_h1(3, 4, slices=slices)
    costs = Costs(2, 1, 1, 0.5, slices=times)
    peak = max(schedules.peak_memory(made))
    for limit in (None, peak, peak - 1):
        again = schedules.with_recompute(made, costs, limit)
        check(again)
        assert again.slices == slices and (limit is None or max(schedules.peak_memory(again)) <= limit)
        assert again.recomputed or limit == peak
    frozen = schedules.with_skips(schedules.with_frozen(made, {0, 2}), {"far": (0, 2)})
    check(frozen)
    assert (frozen.slices, frozen.trained_from, len(frozen.skips)) == (slices, 1, 1)


def test_advice_counts_slices():
    advice = schedules.advise(4, slices=8)
    assert (advice.microbatches, advice.schedule, advice.peak_activations) == (2, "one_f_one_b", 4 + 7)
    close(advice.bubble_fraction, 3 / 19, 2)
    assert (
        schedules.advise(4, microbatches=1, slices=8).bubble_fraction
        < schedules.advise(4, microbatches=1).bubble_fraction
    )


@pytest.mark.parametrize("slices, limit", [(2, 2), (2, 4), (3, 6.5), (8, 8), (8, 30)])
def test_zero_bubble_2p_keeps_its_limit(slices, limit):
    for costs in (Costs(), Costs(1, [1, 2, 1], 0.5, 0.25)):
        made = by_name("zero_bubble_2p", ranks=3, microbatches=3, slices=slices, costs=costs, memory_limit=limit)
        assert slices <= max(simulate(made, costs).peak_activations) <= limit
