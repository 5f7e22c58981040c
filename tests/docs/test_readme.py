"""What the README and the pages show is run as it stands there, and their tables are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from support.reference_attention import dense
from support.tolerance import within

from mpipipe import schedules
from mpipipe.errors import ArgumentError

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
SCHEDULES = (ROOT / "docs" / "schedules.md").read_text()
RING = (ROOT / "docs" / "ring-attention.md").read_text()


@pytest.mark.parametrize("ranks", [1, 4])
def test_example_runs_as_written(launch, tmp_path, ranks):
    example = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[0]
    assert len([line for line in example.splitlines() if line.strip()]) <= 25
    script = tmp_path / "example.py"
    script.write_text(example)
    job = launch(ranks, ["-m", "mpipipe", "run", str(script)])
    assert job.returncode == 0, job.stderr
    loss, peak = re.match(r"loss ([\d.]+), at most (\d+) activations", job.stdout).groups()
    assert float(loss) < 4**ranks  # it learns to put out zeros
    assert int(peak) == schedules.simulate(schedules.interleaved_1f1b(ranks, 2, 8)).peak_activations[0]


def test_timeline_is_the_one_that_is_drawn():
    drawn = schedules.timeline(schedules.one_f_one_b(4, 4))
    text = "\n".join(line.rstrip() for line in drawn.splitlines())
    assert text in SCHEDULES and text in README


def test_every_schedule_is_in_the_table():
    with pytest.raises(ArgumentError) as refusal:
        schedules.by_name("", ranks=1, microbatches=1)
    generators = set(re.findall(r"(\w+)\(ranks", refusal.value.expected))
    assert {"gpipe", "one_f_one_b", "interleaved_1f1b", "looped_bfs", "zero_bubble_h1", "forward_only"} <= generators
    for name in generators:
        assert f"| `{name}(" in SCHEDULES


@pytest.mark.parametrize("ranks, microbatches", [(2, 4), (4, 8), (3, 3)])
def test_bubbles_and_peaks_of_the_table(ranks, microbatches):
    f, b, w = 2.0, 3.0, 1.5
    costs = schedules.Costs(forward=f, input_grad=b, weight_grad=w)

    def facts(schedule):
        timeline = schedules.simulate(schedule, costs)
        busy = schedule.chunks * microbatches * (f + b + w)
        return timeline.makespan - busy, list(timeline.peak_activations)  # halves and their sums are exact

    p, m, ranks_ = ranks, microbatches, range(ranks)
    full = (p - 1) * (f + b + w)
    assert facts(schedules.gpipe(p, m)) == (full, [m] * p)
    assert facts(schedules.one_f_one_b(p, m)) == (full, [min(m, p - r) for r in ranks_])
    for v in (2, 3):
        g = -(-m // max(1, m // p))
        peaks = [min(m * v, (v - 1) * g + 2 * (p - 1 - r) + 1) for r in ranks_]
        assert facts(schedules.interleaved_1f1b(p, v, m)) == (full, peaks)
        assert facts(schedules.looped_bfs(p, v, m)) == (full, [m * v] * p)
    assert facts(schedules.zero_bubble_h1(p, m)) == ((p - 1) * (f + b - w), [min(m, p)] * p)


def test_ring_example_runs_as_written(comm, capsys):
    from mpipipe import attention

    example = next(text for text in re.findall(r"```python\n(.*?)```", RING, re.DOTALL) if "# ring.py" in text)
    names = {}
    exec(example, names)  # on COMM_WORLD
    assert f"out {names['out'].shape}" in capsys.readouterr().out
    q, k, v, _ = np.random.default_rng(0).standard_normal((4, 1, names["seq_len"], 2, 16))
    layout = names["layout"]
    whole = attention.Local().forward(q, k, v)[0]
    allowed = dense(q, k, v, np.zeros_like(q)).bounds(q.dtype)[0]
    within(names["out"], layout.shard(whole, comm.rank), layout.shard(allowed, comm.rank), "out")
    assert names["dq"].shape == names["q"].shape
