"""bench steps: a line for each schedule and way to update."""

from __future__ import annotations

import pytest

from mpipipe.bench import pipeline
from mpipipe.errors import ArgumentError


def test_a_line_for_each_schedule_with_and_without_clipping(comm, capsys, monkeypatch):
    monkeypatch.setattr(pipeline, "STEP_WIDTH", 8)
    monkeypatch.setattr(pipeline, "STEPS", 2)
    if comm.size == 1:
        with pytest.raises(ArgumentError, match="at least 2 ranks"):
            pipeline.steps.__wrapped__(1)
        return
    pipeline.steps.__wrapped__(1, microbatches=2)
    lines = capsys.readouterr().out.splitlines()
    names = ["one_f_one_b", "zero_bubble_h1", "zero_bubble_v"]
    found = [line.split(":")[0] for line in lines]
    assert found == (
        [f"steps {name}, {how}" for name in names for how in ("no clipping", "clipping")] * (not comm.rank)
    )
    assert all(" ms; ratio " in line for line in lines)
