"""bench gaps: a line for each set of costs, and how many are close to the best."""

from __future__ import annotations

import re

import pytest

from mpipipe.bench.schedules import SHAPES, Shape, cost_sets, run_gaps


@pytest.mark.parametrize("shape", [Shape(2, 1, 4, 2), Shape(2, 2, 3, 4)])
def test_every_set_has_its_line(capsys, shape):
    run_gaps(0.1, (shape,))
    *lines, last = capsys.readouterr().out.splitlines()
    names = [name for name, _ in cost_sets(shape.ranks * shape.chunks)]
    assert len(lines) == len(names)
    for name, line in zip(names, lines):
        assert re.search(
            rf", {re.escape(name)}: \d+\.\d\d% \(makespan \S+, bound \S+, (looped|on a V)\), \d+\.\d s", line
        )
    assert re.fullmatch(rf"gaps: \d+ of {len(names)} sets within 2%, median \d+\.\d\d%, largest \d+\.\d\d%", last)


def test_there_are_more_than_fifty_sets():
    assert sum(len([*cost_sets(shape.ranks * shape.chunks)]) for shape in SHAPES) == 66
