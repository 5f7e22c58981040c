"""What a schedule knows about itself."""

import pickle

import pytest

from mpipipe import schedules
from mpipipe.errors import ScheduleError
from mpipipe.schedules import (
    Action,
    Schedule,
    Skip,
    check,
    from_csv,
    one_f_one_b,
    with_frozen,
    with_recompute,
    with_skips,
)


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
    assert schedule.fingerprint == 543501281723927039  # in every process


@pytest.mark.parametrize("schedule", [schedules.interleaved_1f1b(3, 2, 7), schedules.zero_bubble_h1(3, 7)])
def test_the_forward_only_part_keeps_the_order_of_the_forwards(schedule):
    for microbatches in range(1, 8):
        part = schedule.forward_only_part(microbatches)
        check(part)
        assert (part.name, part.placement, part.microbatches) == ("forward", schedule.placement, microbatches)
        for order, whole in zip(part.orders, schedule.orders):
            assert order == tuple(a for a in whole if a.op == "F" and a.microbatch < microbatches)


# -- Skips: kept by what changes a schedule, part of what it is, and refused where they are wrong ----------------------


PLAIN = one_f_one_b(4, 3)
GIVEN = {"residual": (0, 3), "low": (0, 2), "again": (0, 2)}
SCHEDULE = with_skips(PLAIN, GIVEN)


def test_skips_are_a_part_of_what_a_schedule_is():
    check(SCHEDULE)
    assert SCHEDULE.orders == PLAIN.orders and SCHEDULE != PLAIN
    others = [PLAIN, with_skips(PLAIN, {**GIVEN, "low": (1, 3)}), with_skips(PLAIN, {"first": (0, 3)})]
    assert len({each.fingerprint for each in (SCHEDULE, *others)}) == 4
    assert with_skips(PLAIN, {}).fingerprint == PLAIN.fingerprint
    assert "residual" in repr(SCHEDULE) and pickle.loads(pickle.dumps(SCHEDULE)) == SCHEDULE
    assert SCHEDULE.to_csv() == PLAIN.to_csv() and from_csv(SCHEDULE.to_csv()).skips == ()


def test_what_changes_the_actions_keeps_the_skips():
    frozen, again, part = with_frozen(SCHEDULE, {0}), with_recompute(SCHEDULE), SCHEDULE.forward_only_part(2)
    for changed in (frozen, again, part):
        check(changed)
        assert changed.skips == SCHEDULE.skips


@pytest.mark.parametrize(
    "skips, text",
    [
        ({"a": (0, 4)}, "there is no stage 4"), ({"a": (-1, 2)}, "there is no stage -1"),
        ({"a": (0.0, 2)}, "there is no stage 0.0"), ({"a": (3, 1)}, "to a later stage"),
        ({"a": (2, 1)}, "to a later stage"), ({"a": (1, 1)}, "does not lead to a later"), ({"a": 3}, "no two ends"),
        ({"a": (0, 2, 3)}, "no two ends"), ({1: (0, 2)}, "the name of a skip"), ({"": (0, 2)}, "the name of a skip"),
        ({"a-b": (0, 2)}, "the name of a skip"), ({"from": (0, 2)}, "the name of a skip"),
        ([("a", 0, 2)], "not a mapping"),
    ],
)  # fmt: skip
def test_wrong_skips_are_refused(skips, text):
    with pytest.raises(ScheduleError, match=text):
        with_skips(PLAIN, skips)


def test_a_schedule_made_with_wrong_skips_is_refused_by_the_proof():
    twice = schedules.Schedule("made", PLAIN.placement, 3, PLAIN.orders, skips=[Skip("a", 0, 2), Skip("a", 1, 3)])
    with pytest.raises(ScheduleError, match="two skips are called 'a'"):
        check(twice)


def test_a_schedule_says_in_a_line_what_it_is():
    assert repr(schedules.gpipe(2, 1)) == "<Schedule gpipe: 2 ranks, 2 stages, 1 micro-batch>"
    frozen = with_skips(with_frozen(schedules.interleaved_1f1b(2, 2, 3), {0}), {"low": (0, 2)})
    assert repr(frozen) == (
        "<Schedule interleaved_1f1b: 2 ranks, 4 stages, 3 micro-batches, trained from stage 1, "
        "skip low from stage 0 to 2>"
    )
