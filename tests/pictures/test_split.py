"""Bars of measured time: lengths, names, shares, and labels that do not touch."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from support.svg import shapes, texts

from mpipipe import pictures
from mpipipe.errors import ArgumentError
from mpipipe.pictures.sheet import spread

pytest.importorskip("matplotlib")

ROWS = [{"compute": 3.0, "bubble": 1.0, "sums": 0.02}, {"compute": 2.0, "bubble": 1.5, "transfer": 0.1}]


def test_bars_are_as_long_as_their_parts_and_follow_each_other(tmp_path):
    pictures.draw_split(ROWS, tmp_path / "split.svg")
    path = tmp_path / "split.svg"
    compute, bubble, sums = (shapes(path, fill) for fill in ("#009e73", "#56b4e9", "#e69f00"))
    assert (len(compute), len(bubble), len(sums)) == (2, 2, 1)
    unit = (compute[0].right - compute[0].left) / 3
    lengths = [bar.right - bar.left for bar in (*compute, *bubble, *sums)]
    assert lengths == pytest.approx([3 * unit, 2 * unit, unit, 1.5 * unit, 0.02 * unit], abs=0.01)
    assert bubble[0].left == pytest.approx(compute[0].right) and bubble[1].left == pytest.approx(compute[1].right)


def test_every_part_is_named_where_it_fits_or_above(tmp_path):
    pictures.draw_split(ROWS, tmp_path / "split.svg")
    words = [text.words for text in texts(tmp_path / "split.svg")]
    assert {"compute 75%", "bubble 25%", "compute 56%", "bubble 42%"} <= set(words)
    assert {"sums 0.5%", "transfer 2.8%"} <= set(words)  # too narrow for a name
    assert "2 ranks, 3.81 s each on average" in words


@pytest.mark.parametrize(
    "rows, match",
    [
        ([], "no time to divide"),
        ([{}, {}], "no time to divide"),
        ([{"compute": -1.0}], "no duration"),
        ([{"compute": 1.0}, {"compute": float("inf")}], "rank 1: a part of the time is no duration"),
        ([{"compute": None}], "no duration"),
    ],
)
def test_what_is_no_time_is_refused(rows, match, tmp_path):
    with pytest.raises(ArgumentError, match=match):
        pictures.draw_split(rows, tmp_path / "split.svg")


def test_labels_that_are_spread_do_not_touch_and_stay_near():
    draw = random.Random(1)
    for _ in range(200):
        count = draw.randint(1, 9)
        wanted = [draw.uniform(0, 100) for _ in range(count)]
        sizes = [draw.uniform(1, 11) for _ in range(count)]
        places = spread(wanted, sizes, 0, 100)
        order = sorted(range(count), key=lambda label: wanted[label])
        for first, second in pairwise(order):
            assert places[second] - places[first] >= (sizes[first] + sizes[second]) / 2 - 1e-9
        assert all(size / 2 - 1e-9 <= place <= 100 - size / 2 + 1e-9 for place, size in zip(places, sizes))
    assert spread([20, 50], [10, 10], 0, 100) == [20, 50]  # nothing moves without need
    assert spread([50, 50], [10, 10], 0, 100) == [45, 55]


def test_names_that_have_no_room_stand_in_a_key_and_are_no_formulas(tmp_path):
    def words(rows):
        pictures.draw_split(rows, tmp_path / "split.svg")
        return [text.words for text in texts(tmp_path / "split.svg")]

    low = words([{"compute": 3.0, "bubble": 1.0}] * 30)
    assert low.count("compute") == low.count("bubble") == 1
    assert len(shapes(tmp_path / "split.svg", "#009e73")) == 31  # with that of the key
    names = [f"part number {place}" for place in range(20)]
    assert [word for word in words([dict.fromkeys(names, 1.0)]) if word.startswith("part")] == names
    assert "a$_{b}$ 100%" in words([{"a$_{b}$": 1.0}])
