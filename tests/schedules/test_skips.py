"""Skips of schedules: kept by what changes a schedule, part of what it is, and refused where they are wrong."""

from __future__ import annotations

import pickle

import pytest

from mpipipe import schedules
from mpipipe.errors import ScheduleError
from mpipipe.schedules import Skip, check, from_csv, one_f_one_b, with_frozen, with_recompute, with_skips
from mpipipe.schedules.proof import WHOLE, check_part, digest

PLAIN = one_f_one_b(4, 3)
GIVEN = {"residual": (0, 3), "low": (0, 2), "again": (0, 2)}
SCHEDULE = with_skips(PLAIN, GIVEN)


def test_skips_are_sorted_by_name_whatever_the_order_of_the_dict():
    assert SCHEDULE.skips == (Skip("again", 0, 2), Skip("low", 0, 2), Skip("residual", 0, 3))
    assert with_skips(PLAIN, dict(reversed(GIVEN.items()))) == SCHEDULE
    assert with_skips(with_skips(PLAIN, {"other": (1, 3)}), GIVEN) == SCHEDULE, "they stand in place of others"


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


def test_simulations_count_nothing_for_skips():
    costs = schedules.Costs(transfer=0.5)
    assert schedules.simulate(SCHEDULE, costs).spans == schedules.simulate(PLAIN, costs).spans
    assert schedules.peak_memory(SCHEDULE, 2.0) == schedules.peak_memory(PLAIN, 2.0)


@pytest.mark.parametrize(
    "skips, text",
    [
        ({"a": (0, 4)}, "there is no stage 4"), ({"a": (-1, 2)}, "there is no stage -1"),
        ({"a": (0.0, 2)}, "there is no stage 0.0"), ({"a": (3, 1)}, "does not lead past"),
        ({"a": (1, 2)}, "does not lead past"), ({"a": (1, 1)}, "does not lead past"), ({"a": 3}, "no two ends"),
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


def test_ranks_of_a_large_schedule_prove_and_compare_its_skips():
    large = one_f_one_b(64, WHOLE // 64 + 1)
    for skips in ({}, {"a": (0, 63)}, {"a": (0, 62)}):
        schedule = with_skips(large, skips)
        check_part(schedule, 7)
    assert len({digest(with_skips(large, {"a": (0, last)})) for last in (61, 62, 63)} | {digest(large)}) == 4
    wrong = schedules.Schedule("made", large.placement, large.microbatches, large.orders, skips=[Skip("a", 3, 4)])
    with pytest.raises(ScheduleError, match="does not lead past"):
        check_part(wrong, 7)
