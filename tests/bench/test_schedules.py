"""bench gaps: a line for each set of costs, and how many are close to the best."""

from __future__ import annotations

import re

import pytest

from mpipipe.bench import schedules
from mpipipe.bench.schedules import SHAPES, cost_sets, gaps


@pytest.mark.parametrize("shape", [(2, 1, 4, 2), (2, 2, 3, 4)])
def test_every_set_has_its_line(capsys, monkeypatch, shape):
    monkeypatch.setattr(schedules, "SHAPES", [shape])
    gaps(0.1)
    *lines, last = capsys.readouterr().out.splitlines()
    names = [name for name, _ in cost_sets(shape[0] * shape[1])]
    assert len(lines) == len(names)
    for name, line in zip(names, lines):
        assert re.search(
            rf", {re.escape(name)}: \d+\.\d\d% \(makespan \S+, bound \S+, (looped|on a V)\), \d+\.\d s", line
        )
    assert re.fullmatch(rf"gaps: \d+ of {len(names)} sets within 2%, median \d+\.\d\d%, largest \d+\.\d\d%", last)


def test_there_are_more_than_fifty_sets():
    assert sum(len([*cost_sets(shape[0] * shape[1])]) for shape in SHAPES) == 66
