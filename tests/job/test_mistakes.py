"""Twelve mistakes in a script of a user: each is one report that names the file and the line of the user's call."""

import pytest

SCRIPT = """
import numpy as np
import mpipipe
from mpipipe import checkpoint, nn, optim, schedules

comm = mpipipe.world()

class Own:
    def forward(self, x):
        {forward}
        return 2 * x, x
    def backward(self, dy, saved):
        return {dx}

def loss(output, target):
    {loss}
    return nn.mean_squared_error(output, target)

x = np.ones((8, 3), np.float32) if comm.rank == 0 else None
target = np.zeros((8, 3), np.float32) if comm.rank == 1 else None
schedule = schedules.one_f_one_b(2, microbatches=4)
stages = [nn.Stage([nn.Linear(3, 3)], first=comm.rank)]
{build}
pipeline = mpipipe.Pipeline(stages, schedule, comm, loss=loss)
{before}
result = pipeline.step({inputs}, {targets})
{after}
"""
DEFAULTS = {
    "forward": "pass", "dx": "2 * dy", "loss": "pass", "build": "", "before": "", "inputs": "x", "targets": "target",
    "after": "",
}  # fmt: skip
# what is written in place of what, and a word of the line that the report names
MISTAKES = {
    "rows of another width": ({"before": "x = x if x is None else x[:, :2].copy()"}, "result = "),
    "targets on the wrong rank": ({"targets": "np.zeros((8, 3), np.float32)"}, "result = "),
    "no inputs": ({"inputs": "None"}, "result = "),
    "float64": ({"before": "x = x if x is None else x.astype(np.float64)"}, "result = "),
    "a loss without a gradient": ({"loss": "return float(output.mean())"}, "result = "),
    "fewer rows than micro-batches": (
        {"before": "x, target = (None if part is None else part[:2] for part in (x, target))"}, "result = ",
    ),
    "a write to the input": ({"build": "stages = [Own()]", "forward": "x += 1"}, "x += 1"),
    "no gradient from backward": ({"build": "stages = [Own()]", "dx": "None"}, "result = "),
    "an unknown schedule": (
        {"build": 'schedule = schedules.by_name("1f2b", ranks=2, microbatches=4)'}, "by_name",
    ),
    "a schedule of other ranks": ({"build": "schedule = schedules.gpipe(3, 4)"}, "pipeline = "),
    "too few layers": ({"build": "stages = mpipipe.cut([nn.Gelu()], schedule, comm.rank)"}, "cut"),
    "a norm below 0": ({"after": "optim.clip_by_global_norm(stages, -1.0, comm)"}, "clip_by"),
}  # fmt: skip


def with_marks(name):
    return pytest.param(name, marks=() if "write" in name or "wrong" in name else pytest.mark.long)


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
