"""The picture of the losses has each of them in its place."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpipipe.train.report import HEIGHT, LEAST, WIDTH, draw_png, in_characters, read_points

values = st.floats(-1e3, 1e3)


@given(st.dictionaries(st.integers(1, 10_000), values, min_size=2, max_size=40))
def test_each_loss_has_a_mark_at_the_nearest_character(losses):
    points = {"loss": sorted(losses.items()), "validation": []}
    title, *lines = in_characters(points).splitlines()
    assert len(lines) == HEIGHT and max(map(len, [title, *lines])) < 100
    marks = {
        (row, column)
        for row, line in enumerate(lines)
        for column, mark in enumerate(line.partition("|")[2])
        if mark == "*"
    }
    first, last, low, high = min(losses), max(losses), min(losses.values()), max(losses.values())
    for step, loss in losses.items():
        across = (step - first) / (last - first) * (WIDTH - 1)
        down = (high - loss) / (high - low) * (HEIGHT - 1) if high > low else 0.0
        assert any(abs(row - down) <= 0.5001 and abs(column - across) <= 0.5001 for row, column in marks)
    assert len(marks) <= len(losses)


def test_the_axis_says_the_highest_and_the_lowest(tmp_path):
    text = in_characters({"loss": [(1, 4.0), (100, 2.5)], "validation": [(0, 6.25), (100, 2.0)]})
    lines = text.splitlines()
    assert lines[0] == "--- loss of training (*) and of validation (o) over 100 steps"
    assert lines[1] == " 6.2500 |o" and lines[-1].startswith(" 2.0000 |") and lines[-1].endswith("o")
    assert text.isascii()


def records(path, losses):
    lines = [{"step": step, "loss": loss} for step, loss in enumerate(losses, 1)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_few_losses_make_no_curve_and_one_that_is_not_finite_is_left_out(tmp_path):
    records(tmp_path, [1.0] * (LEAST - 1))
    assert read_points(tmp_path, 100) is None
    records(tmp_path, [1.0] * LEAST + [float("inf"), float("nan")])
    assert read_points(tmp_path, 100)["loss"] == [(step, 1.0) for step in range(1, LEAST + 1)]


def test_a_png_is_left_where_matplotlib_is(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    points = {"loss": [(1, 4.0), (100, 2.5)], "validation": []}
    assert draw_png(points, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG\r\n")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert not draw_png(points, tmp_path / "other.png")
    assert not (tmp_path / "other.png").exists()
