"""The tasks of docs/tasks: the same numbers on any mesh, and models that learn what they are to learn."""

from __future__ import annotations

import json

import pytest
from support.launch import ROOT

from mpipipe.job import inprocess
from mpipipe.train import run
from mpipipe.train.task_file import TaskFileConfig, load_task

TASKS = ROOT / "docs" / "tasks"
KEYS = dict(steps=3, batch=8, microbatches=2, warmup=0, log_every=1, eval_batches=1, device="cpu")
SMALL = {"darcy": ("samples=48", "blocks=2", "width=8", "modes=4")}


def trained(name, ranks, out, values, **keys):
    def on_each_rank(comm):
        task = load_task(str(TASKS / f"{name}.py"), values, comm)
        return run(task, TaskFileConfig(**(KEYS | keys), out=str(out)), comm)

    inprocess.run(ranks, on_each_rank)
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", sorted(SMALL))
def test_any_mesh_gives_the_numbers_of_one_rank(tmp_path, name):
    meshes = {"alone": (1, {}), "pipe": (2, {"pipe": 2}), "both": (4, {"pipe": 2, "schedule": "zero_bubble_h1"})}
    losses = {}
    for mesh, (ranks, keys) in meshes.items():
        records = trained(name, ranks, tmp_path / mesh, SMALL[name], dtype="float64", **keys)
        losses[mesh] = [record.get("loss", record.get("validation")) for record in records]
    assert losses["pipe"] == pytest.approx(losses["alone"], rel=1e-10)
    assert losses["both"] == pytest.approx(losses["alone"], rel=1e-10)


@pytest.mark.long
def test_pressures_are_better_than_half_as_wrong_as_their_mean(tmp_path):
    """The mean of all pressures has a relative error of 0.23."""
    records = trained("darcy", 2, tmp_path / "run", (), pipe=2, steps=300, batch=16, lr=4e-3, warmup=10, eval_batches=2)
    assert records[-1]["relative_error"] < 0.115
