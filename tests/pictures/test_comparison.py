"""Schedules over the number of micro-batches: the same work for each, and every line with its name."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.svg import texts

from mpipipe import pictures, schedules
from mpipipe.errors import ArgumentError
from mpipipe.schedules import Costs

pytest.importorskip("matplotlib")


def test_every_schedule_has_the_same_work_on_a_rank():
    costs = Costs(3, 2, 1, 0.5)
    found = pictures.simulate_all(2, [2, 4], costs=costs)
    names = {timeline.schedule.name for timeline in found}
    assert {"gpipe", "one_f_one_b", "zero_bubble_v", "interleaved_1f1b", "v_min"} <= names
    assert "forward_only" not in names and len(found) == 2 * len(names)
    for timeline in found:
        busy = [sum(end - start for _, start, end in spans) for spans in timeline.spans]
        assert busy == pytest.approx([6 * timeline.schedule.microbatches] * 2)


def test_names_stand_in_the_order_of_the_ends_of_their_lines(tmp_path):
    names, path = ["gpipe", "one_f_one_b", "interleaved_1f1b", "v_half"], tmp_path / "comparison.svg"
    found = pictures.simulate_all(4, [4, 8, 16], names)
    pictures.draw_comparison(found, path)
    written = [text for text in texts(path) if text.words in names]
    last = {timeline.schedule.name: timeline for timeline in found}
    bubble = {name: timeline.bubble_fraction for name, timeline in last.items()}
    memory = {name: max(timeline.peak_activations) / timeline.schedule.chunks for name, timeline in last.items()}
    for values, panel in ((bubble, written[: len(names)]), (memory, written[len(names) :])):
        down = [values[text.words] for text in sorted(panel, key=lambda text: text.y)]
        assert sorted(text.words for text in panel) == sorted(names) and down == sorted(down, reverse=True)
    words = [text.words for text in texts(path)]
    assert words[0] == "4 schedules on 4 ranks" and words.count("16") >= 2


def test_one_number_of_microbatches_is_a_row_of_points(tmp_path):
    pictures.draw_comparison(pictures.simulate_all(2, [3], ["gpipe"]), tmp_path / "one.svg")
    assert "1 schedule on 2 ranks" in [text.words for text in texts(tmp_path / "one.svg")]


def test_what_cannot_be_compared_is_refused(tmp_path):
    two, three = (schedules.simulate(schedules.gpipe(ranks, 2)) for ranks in (2, 3))
    for timelines, match in (([], "no timeline"), ([two, three], "2, 3 ranks"), ([two, two], "twice")):
        with pytest.raises(ArgumentError, match=match):
            pictures.draw_comparison(timelines, tmp_path / "a.svg")
    other = replace(two, schedule=replace(two.schedule, name="other"))
    pictures.draw_comparison([two, other], tmp_path / "a.svg")


@pytest.mark.parametrize(
    "arguments, match",
    [
        (dict(costs=Costs(forward=[1, 2])), "the cost forward is no number"),
        (dict(costs=Costs(weight_grad=float("nan"))), "the cost weight_grad is no number"),
        (dict(names=["gpip"]), "unknown schedule"),
        (dict(microbatches=[0], names=["gpipe"]), "microbatches"),
    ],
)
def test_wrong_requests_are_refused(arguments, match):
    with pytest.raises(ArgumentError, match=match):
        pictures.simulate_all(**{"ranks": 2, "microbatches": [2], **arguments})
