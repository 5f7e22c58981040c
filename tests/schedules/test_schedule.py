"""What a schedule knows about itself."""

from __future__ import annotations

import pytest

from mpipipe import schedules
from mpipipe.errors import ArgumentError
from mpipipe.schedules import Action, Schedule, check


def test_sizes_and_stages_follow_from_the_placement():
    schedule = schedules.interleaved_1f1b(3, 2, 4)
    assert (schedule.ranks, schedule.stages, schedule.chunks, schedule.microbatches) == (3, 6, 2, 4)
    assert schedule.placement == (0, 1, 2, 0, 1, 2)
    assert schedule.stages_of(1) == (1, 4)
    assert not schedule.splits_backward
    assert schedules.zero_bubble_h1(2, 2).splits_backward


def test_an_action_reads_as_stage_op_microbatch():
    assert str(Action(12, "I", 30)) == "12I30"


def test_a_schedule_cannot_change_even_if_made_of_lists():
    orders = [[Action(0, "F", 0)]]
    schedule = Schedule("own", [0], 1, orders)
    orders[0].append(Action(0, "F", 0))
    assert schedule.orders == ((Action(0, "F", 0),),)
    with pytest.raises(AttributeError):
        schedule.microbatches = 2


def test_the_fingerprint_depends_on_content_and_not_on_the_name():
    schedule = schedules.one_f_one_b(2, 4)
    renamed = Schedule("another", schedule.placement, 4, schedule.orders)
    assert renamed.fingerprint == schedule.fingerprint
    others = [
        schedules.gpipe(2, 4),
        schedules.one_f_one_b(2, 5),
        schedules.one_f_one_b(3, 4),
        Schedule("x", (1, 0), 4, schedule.orders),
        Schedule("x", schedule.placement, 5, schedule.orders),
        Schedule("x", schedule.placement, 4, schedule.orders[::-1]),
    ]
    prints = {other.fingerprint for other in [schedule, *others]}
    assert len(prints) == 1 + len(others)
    assert all(0 <= value < 2**63 for value in prints)


def test_the_fingerprint_is_the_same_in_every_process():
    assert schedules.one_f_one_b(2, 4).fingerprint == 543501281723927039


def test_recomputations_make_another_schedule_with_the_same_forward_part():
    schedule = schedules.one_f_one_b(2, 4)
    found = schedules.with_recompute(schedule)
    assert found.fingerprint != schedule.fingerprint
    assert found.forward_only_part(3).orders == schedule.forward_only_part(3).orders
    assert found.recomputed == {(stage, m) for stage in range(2) for m in range(4)} and not schedule.recomputed


@pytest.mark.parametrize("schedule", [schedules.interleaved_1f1b(3, 2, 7), schedules.zero_bubble_h1(3, 7)])
def test_the_forward_only_part_keeps_the_order_of_the_forwards(schedule):
    for microbatches in range(1, 8):
        part = schedule.forward_only_part(microbatches)
        check(part)
        assert (part.name, part.placement, part.microbatches) == ("forward", schedule.placement, microbatches)
        for order, whole in zip(part.orders, schedule.orders):
            assert order == tuple(a for a in whole if a.op == "F" and a.microbatch < microbatches)


@pytest.mark.parametrize("microbatches", [0, 8, "2"])
def test_a_part_larger_than_the_whole_is_refused(microbatches):
    with pytest.raises(ArgumentError):
        schedules.one_f_one_b(2, 7).forward_only_part(microbatches)
