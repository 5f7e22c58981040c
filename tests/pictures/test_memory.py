"""Profiles of memory: against counts by hand at random times, and against the simulated peaks."""

from __future__ import annotations

import random
from bisect import bisect_right
from dataclasses import replace

import pytest
from support.svg import texts

from mpipipe import pictures, schedules
from mpipipe.pictures.timeline import profile
from mpipipe.schedules import Costs

pytest.importorskip("matplotlib")

NAMES = {"gpipe": 1, "one_f_one_b": 1, "zero_bubble_h1": 1, "zero_bubble_2p": 1, "interleaved_1f1b": 3, "looped_bfs": 2,
         "interleaved_zero_bubble": 2, "zero_bubble_v": 2, "dualpipe_v": 2, "v_half": 2, "v_min": 2,
         "forward_only": 2}  # fmt: skip


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
    schedule = schedules.by_name(name, ranks=3, microbatches=5, chunks=NAMES[name])
    found = schedules.simulate(schedule, Costs(1.1, 0.9, 0.7, 0.3))
    draw = random.Random(0)
    for rank in range(3):
        times, counts = profile(found, rank)
        assert times == sorted(times) and times[0] == 0 and times[-1] == found.makespan
        assert max(counts) == found.peak_activations[rank]
        for time in (draw.uniform(0, found.makespan) for _ in range(40)):
            expected = held(found.spans[rank], time) if name != "forward_only" else 0
            assert counts[bisect_right(times, time) - 1] == expected


def test_frozen_stages_hold_nothing():
    found = schedules.simulate(schedules.with_frozen(schedules.gpipe(2, 2), {0}))
    assert set(profile(found, 0)[1]) == {0} and max(profile(found, 1)[1]) == 2


def test_an_activation_that_is_recomputed_is_held_from_then_on():
    found = schedules.simulate(schedules.gpipe(1, 2))
    (forward, _, _), (other, _, _), (backward, _, _), (last, _, _) = found.spans[0]
    spans = ((forward, 0, 1), (other, 1, 2), (forward._replace(op="R"), 3, 4), (backward, 4, 6), (last, 6, 8))
    changed = replace(found, makespan=8)
    changed.__dict__["spans"] = (spans,)
    assert profile(changed, 0) == ([0.0, 1, 3, 6, 8, 8], [0, 1, 2, 1, 0, 0])


def test_the_peaks_stand_at_their_rows(tmp_path):
    found, path = schedules.simulate(schedules.interleaved_1f1b(4, 2, 8)), tmp_path / "memory.svg"
    pictures.draw_memory(found, path)
    words = [text.words for text in texts(path)]
    assert [word for word in words if word.startswith("peak")] == [f"peak {peak}" for peak in found.peak_activations]
    assert "largest peak 11, smallest 5" in words
    assert any("each of one chunk of 2" in word for word in words)
