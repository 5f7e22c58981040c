"""Timelines: each box in its place, with colour and number; memory against counts by hand at random times."""

import random
from bisect import bisect_right
from dataclasses import replace

import pytest
from support.any_schedule import NAMES, build
from support.svg import shapes, texts

from mpipipe import schedules, tracing
from mpipipe.errors import ArgumentError
from mpipipe.schedules import Costs
from mpipipe.tracing.timeline import profile

pytest.importorskip("matplotlib")

# Okabe and Ito's colours; the second chunk has 55 % of white in its own
FIRST = {"F": "#56b4e9", "B": "#009e73", "I": "#cc79a7", "W": "#e69f00"}
SECOND = {"F": "#b3ddf5", "B": "#8cd3c0", "I": "#e8c3d7", "W": "#f4d48c"}
CASES = {
    "uneven": (schedules.one_f_one_b(3, 4), Costs([1, 2, 1.5], 1, [0.5, 1, 1], 0.25)),
    "two chunks": (schedules.interleaved_zero_bubble(2, 2, 3), Costs()),
}


def boxes_of(path, fill):
    """Boxes of rows; those of the key are higher up and as narrow as 6 points."""
    return [shape for shape in shapes(path, fill) if shape.bottom - shape.top > 15]


@pytest.mark.parametrize("case", CASES)
def test_every_action_is_a_box_in_its_place_with_its_number(case, tmp_path):
    schedule, costs = CASES[case]
    found, path = schedules.simulate(schedule, costs), tmp_path / "timeline.svg"
    tracing.draw_timeline(found, path)
    drawn = {fill: boxes_of(path, fill) for fill in (*FIRST.values(), *SECOND.values())}
    left = min(box.left for boxes in drawn.values() for box in boxes)
    unit = (max(box.right for boxes in drawn.values() for box in boxes) - left) / found.makespan
    tops = sorted({box.top for boxes in drawn.values() for box in boxes})
    assert len(tops) == schedule.ranks
    for rank, spans in enumerate(found.spans):
        for action, start, end in spans:
            colours = FIRST if action.stage < schedule.ranks else SECOND
            place = (left + unit * start, tops[rank], left + unit * end)
            same = [box for box in drawn[colours[action.op]] if box[1:4] == pytest.approx(place, abs=0.01)]
            assert len(same) == 1, action
            inside = [text.words for text in texts(path) if same[0].left < text.x < same[0].right
                      and same[0].top < text.y < same[0].bottom]  # fmt: skip
            assert inside == [str(action.microbatch)]
    assert sum(map(len, drawn.values())) == sum(map(len, schedule.orders))


def test_the_words_say_what_was_simulated(tmp_path):
    path = tmp_path / "timeline.svg"
    tracing.draw_timeline(schedules.simulate(schedules.one_f_one_b(4, 8)), path)
    words = [text.words for text in texts(path)]
    assert words[:2] == ["one_f_one_b: 4 ranks, 8 micro-batches", "makespan 33, bubble 27.3%"]
    assert words[2:5] == ["forward", "backward", "white: bubble"]
    assert [word for word in words if word.startswith("rank")] == [f"rank {rank}" for rank in range(4)]


def test_boxes_of_slices_have_micro_batch_and_slice_and_recomputation_its_own_colour(tmp_path):
    path, schedule = tmp_path / "timeline.svg", schedules.one_f_one_b(2, 2, slices=3)
    tracing.draw_timeline(schedules.simulate(schedules.with_recompute(schedule)), path)
    words = [text.words for text in texts(path)]
    assert words[0] == "one_f_one_b: 2 ranks, 2 micro-batches in 3 slices each"
    assert all(words.count(f"{m}.{s}") == 6 for m in range(2) for s in range(3))
    assert len(boxes_of(path, "#8c8c8c")) == 2 * 6 and "recomputation" in words


def test_more_actions_than_a_picture_shows_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("mpipipe.tracing.sheet.MOST_BOXES", 7)
    found = schedules.simulate(schedules.gpipe(2, 2))
    for draw in (tracing.draw_timeline, tracing.draw_memory):
        with pytest.raises(ArgumentError, match="more actions than a picture can show"):
            draw(found, tmp_path / "a.svg")


# -- Activations over time ---------------------------------------------------------------------------------------------


def held(spans, time):
    """Activations whose forward has begun and whose last backward has not ended."""
    alive = set()
    for action, start, end in spans:
        key = (action.stage, action.microbatch)
        if action.op == "F" and start <= time:
            alive.add(key)
        if action.op in "BW" and end <= time:
            alive.remove(key)
    return len(alive)


@pytest.mark.parametrize("name", NAMES)
def test_the_profile_is_what_a_count_by_hand_gives(name):
    schedule = build(name, 3, 2, 5)
    found = schedules.simulate(schedule, Costs(1.1, 0.9, 0.7, 0.3))
    draw = random.Random(0)
    for rank in range(3):
        times, counts = profile(found, rank)
        assert times == sorted(times) and times[0] == 0 and times[-1] == found.makespan
        assert max(counts) == found.peak_activations[rank]
        for time in (draw.uniform(0, found.makespan) for _ in range(40)):
            expected = held(found.spans[rank], time) if name != "forward_only" else 0
            assert counts[bisect_right(times, time) - 1] == expected


def test_an_activation_that_is_recomputed_is_held_from_then_on():
    found = schedules.simulate(schedules.gpipe(1, 2))
    (forward, _, _), (other, _, _), (backward, _, _), (last, _, _) = found.spans[0]
    spans = ((forward, 0, 1), (other, 1, 2), (forward._replace(op="R"), 3, 4), (backward, 4, 6), (last, 6, 8))
    changed = replace(found, makespan=8)
    changed.__dict__["spans"] = (spans,)
    assert profile(changed, 0) == ([0.0, 1, 3, 6, 8, 8], [0, 1, 2, 1, 0, 0])


def test_the_peaks_stand_at_their_rows(tmp_path):
    found, path = schedules.simulate(schedules.interleaved_1f1b(4, 2, 8)), tmp_path / "memory.svg"
    tracing.draw_memory(found, path)
    words = [text.words for text in texts(path)]
    assert [word for word in words if word.startswith("peak")] == [f"peak {peak}" for peak in found.peak_activations]
    assert "largest peak 11, smallest 5" in words
    assert any("each of one chunk of 2" in word for word in words)
