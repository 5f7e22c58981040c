"""Schedules as CSV text, both ways."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.random_schedules import runnable_schedules

from mpipipe.errors import ScheduleError
from mpipipe.schedules import Action, check, forward_only, from_csv


def test_empty_cells_are_idle_slots_and_spaces_do_not_count():
    schedule = from_csv("0F0,,,0B0\r\n, 1F0 ,1B0,\r\n\r\n")
    assert schedule.orders == ((Action(0, "F", 0), Action(0, "B", 0)), (Action(1, "F", 0), Action(1, "B", 0)))
    check(schedule)


def test_placement_follows_from_the_cells_also_in_a_v():
    schedule = from_csv("0F0,3F0,3I0,3W0,0I0,0W0\n1F0,2F0,2B0,1B0\n")
    assert schedule.placement == (0, 1, 1, 0)
    assert (schedule.ranks, schedule.stages, schedule.chunks, schedule.microbatches) == (2, 4, 2, 1)
    check(schedule)


def test_a_pair_that_overlaps_in_pytorch_is_two_actions_in_that_order():
    """A cell as torch.distributed.pipelining writes it for DualPipeV."""
    apart = "0F0,0F1,3F0,3F1,3B0,0B0,3B1,0B1\n1F0,2F0,1F1,2F1,2B0,1B0,2B1,1B1\n"
    together = apart.replace("3F1,3B0", "(3F1;3B0)OVERLAP_F_B").replace("2F1,2B0", "(2F1; 2B0)OVERLAP_F_B")
    assert together != apart and from_csv(together) == from_csv(apart)
    check(from_csv(together))


@given(schedule=st.integers(1, 4).flatmap(runnable_schedules))
@example(schedule=forward_only(2, 2, 3))
@example(schedule=forward_only(2, 2, 3, slices=4))
def test_what_was_written_is_read_back(schedule):
    again = from_csv(schedule.to_csv())
    for part in ("placement", "microbatches", "slices", "orders", "fingerprint"):
        assert getattr(again, part) == getattr(schedule, part)
    pairs = {(a.stage, a.microbatch) for order in schedule.orders for a in order if a.op == "R"}
    assert again.recomputed == pairs and ("R" in schedule.to_csv()) == bool(pairs)


@pytest.mark.parametrize(
    "case",
    [
        ("", "the schedule is empty"),
        ("0F0,0B0\n\n1F0,1B0\n", "rank 1: a rank has no stage"),
        ("0F0,0B0\n1F0,1X0\n", "row 2, column 2: not an action"),
        ("0F0,0b0\n", "row 1, column 2: not an action"),
        ("0F0,,0B0 0F1\n", "row 1, column 3: not an action"),
        ("0F0,0SEND_F0\n", "row 1, column 2: not an action", "no computation"),
        ("0UNSHARD,0F0\n", "row 1, column 1: not an action"),
        ("0F0,(0F1;0SEND_F0)OVERLAP_F_B\n", "row 1, column 2: not an action"),
        ("0F0,1B0\n1F0,0B0\n", "row 2: stage 1 is on another rank"),
        ("0F0,0B0\n2F0,2B0\n", "stage 1 has no actions"),
        ("99999999999999999999F0\n", "stage 0 has no actions"),
        ("0F0.0,0F0.1,0B0.1,0B0", "row 1, column 4: no slice", "write 0B0.0"),
        ("0F0,0B0\n1F0.0,1B0.1", "row 1, column 1: no slice", "write 0F0.0"),
        ("0F0.,0B0.1", "row 1, column 1: not an action", "[.<slice>]"),
        ("0F0.0.0", "row 1, column 1: not an action", "[.<slice>]"),
        ("0F0.-1", "row 1, column 1: not an action", "[.<slice>]"),
        ("0F0.1,1B0.0\n1F0.0,0B0.0", "row 2: stage 1 is on another rank", "in one row"),
        ("0F0.99999999999999999999", "most actions of the schedule are missing", "at least 100000000000000000000"),
    ],
)
def test_a_bad_table_is_refused_with_row_and_column(case):
    text, *words = case
    with pytest.raises(ScheduleError) as refusal:
        check(from_csv(text))
    assert all(word in str(refusal.value) for word in words)
    assert refusal.value.expected
