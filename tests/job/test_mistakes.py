"""Mistakes in a script of a user: each is one report that names the file and the line of the user's call."""

import pytest

SCRIPT = """
import numpy as np
import mpipipe
from mpipipe import nn, schedules

comm = mpipipe.world()

class Own:
    def forward(self, x):
        {forward}
        return 2 * x, x
    def backward(self, dy, saved):
        return 2 * dy

x = np.ones((8, 3), np.float32) if comm.rank == 0 else None
target = np.zeros((8, 3), np.float32) if comm.rank == 1 else None
schedule = schedules.one_f_one_b(2, microbatches=4)
stages = [nn.Stage([nn.Linear(3, 3)], first=comm.rank)]
{build}
pipeline = mpipipe.Pipeline(stages, schedule, comm, loss=nn.mean_squared_error)
result = pipeline.step(x, {targets})
"""
DEFAULTS = {"forward": "pass", "build": "", "targets": "target"}
# what is written in place of what, and a word of the line that the report names
MISTAKES = {
    "targets on the wrong rank": ({"targets": "np.zeros((8, 3), np.float32)"}, "result = "),
    "a write to the input": ({"build": "stages = [Own()]", "forward": "x += 1"}, "x += 1"),
    "a schedule of other ranks": ({"build": "schedule = schedules.gpipe(3, 4)"}, "pipeline = "),
    "too few layers": ({"build": "stages = mpipipe.cut([nn.Gelu()], schedule, comm.rank)"}, "cut"),
}


def with_marks(name):
    return pytest.param(name, marks=() if "write" in name else pytest.mark.long)


@pytest.mark.parametrize("name", map(with_marks, MISTAKES))
def test_the_report_names_the_line_of_the_users_file(launch, tmp_path, name):
    changes, word = MISTAKES[name]
    script = tmp_path / "mine.py"
    script.write_text(SCRIPT.format(**(DEFAULTS | changes)))
    (line,) = [number for number, text in enumerate(script.read_text().splitlines(), 1) if word in text]
    job = launch(2, ["-m", "mpipipe", "run", script], timeout=60)
    assert job.returncode != 0
    assert job.stderr.count("mpipipe: job ended by rank") == 1, job.stderr
    assert f"  at {script}:{line}, in " in job.stderr, job.stderr
