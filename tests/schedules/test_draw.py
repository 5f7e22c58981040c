"""Timelines and tables as text, and trace events."""

from mpipipe import schedules
from mpipipe.schedules import Costs, grid, timeline


def test_a_long_timeline_shows_one_letter_per_unit_of_time():
    first, second = timeline(schedules.zero_bubble_h1(2, 20)).splitlines()
    assert first == "rank 0 FF." + "IWF" * 18 + "IWIW"
    assert second == "rank 1 .FI" + "FIW" * 19 + "W"


def test_recomputations_are_drawn():
    schedule = schedules.with_recompute(schedules.one_f_one_b(2, 2))
    assert timeline(schedule).splitlines() == [
        "rank 0 0F0 0F1 0R0 ........0B0---- 0R1 ....0B1----",
        "rank 1 ....1F0 1R0 1B0---- 1F1 1R1 1B1---- ........",
    ]
    assert ">0R0<" in grid(schedule, mark=(0, 2))
    long = timeline(schedules.with_recompute(schedules.one_f_one_b(2, 50))).splitlines()
    assert set(long[0][7:]) <= set("FRB.") and "R" in long[1]


def test_a_grid_has_a_row_per_rank_and_marks_cells():
    schedule = schedules.one_f_one_b(2, 2)
    assert grid(schedule).splitlines() == [
        "slot    0    1    2    3",
        "rank 0  0F0  0F1  0B0  0B1",
        "rank 1  1F0  1B0  1F1  1B1",
    ]
    assert grid(schedule, mark=(1, 2)).splitlines()[2] == "rank 1  1F0  1B0 >1F1< 1B1"
    assert grid(schedule, mark=[(0, 0), (1, 3)]).count(">") == 2
    assert len(grid(schedules.one_f_one_b(20, 20)).split()) == (1 + 40) + 20 * (2 + 40)  # unmarked, it is whole


def test_a_timeline_fits_the_columns_that_there_are_and_a_terminal():
    schedule = schedules.one_f_one_b(4, 16)
    for columns in (10, 60, 80):
        assert all(len(line) <= columns + len("rank 0 ") for line in timeline(schedule, columns=columns).splitlines())
    lines = timeline(schedules.one_f_one_b(2, 500), Costs(1, 1, 1, transfer=0.25)).splitlines()
    assert all(len(line) == len("rank 0 ") + 120 for line in lines) and set(lines[0][7:]) <= set("FB.")
