"""Plans and dry runs for ranks that are not there, from measurements on others."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpipipe import schedules
from mpipipe.cli import train
from mpipipe.cli.plan import check_outputs, make_plans, plan
from mpipipe.cli.train import train as command_train
from mpipipe.errors import ConfigError
from mpipipe.job import inprocess, settings
from mpipipe.job.exit import Stop
from mpipipe.planning import SavedProfile, links, probe
from mpipipe.train import TrainConfig
from mpipipe.train.config import read_keys

SMALL = dict(dim=16, layers=2, heads=2, hidden=32, seq_len=8, batch=4, steps=2, sample_bytes=0, device="cpu")


def hasty(monkeypatch):
    """As few measurements as there can be, in one process, even if the tests run under mpiexec."""
    monkeypatch.setattr(settings, "launcher_size", lambda environment: None)
    monkeypatch.setattr(train, "launcher_size", lambda environment: None)
    for module in (probe, links):
        monkeypatch.setattr(module, "REPEATS", (1, 1))
    for module, name, value in ((probe, "TURNS", 1), (probe, "ROUNDS", 1), (links, "MANY", 2), (links, "FIRST", 1)):
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(links, "WARMUP", 0)


def test_measurements_of_two_ranks_plan_for_others(tmp_path, capsys, monkeypatch):
    """The command on paper, and the dry run of what it has written."""
    (tmp_path / "text.txt").write_text("one two three\n" * 200)
    small = {**SMALL, "data": [str(tmp_path / "text.txt")]}

    def on_each_rank(comm):
        found, problem, _ = make_plans(TrainConfig.load(**small, plan="auto"), comm)
        return SavedProfile.of(found.profile, problem.signatures, problem.facts)

    file, out = str(tmp_path / "profile.json"), tmp_path / "plan.toml"
    hasty(monkeypatch)
    inprocess.run(2, on_each_rank)[0].save(Path(file))
    deeper = {**small, "layers": 6, "batch": 8}
    assert plan(profile=file, ranks=4, transfer_model="1e-6,1e9,2", out=str(out), pipe=2, **deeper) == 0
    said = capsys.readouterr().out
    assert (
        "on paper: 4 ranks, from measurements on a pipeline of 2 ranks" in said
        and "not counted: the sums over 2 replicas" in said
    )
    assert read_keys(out)["pipe"] == 2 and len(read_keys(out)["partition"].split(",")) % 2 == 0
    assert command_train(str(out), dry_run=True, ranks=4, profile=file) == 0
    assert f"tokens/s, by {file} (measured on a pipeline of 2 ranks)" in capsys.readouterr().out
    (tmp_path / "order.csv").write_text(schedules.gpipe(2, 2).to_csv())
    with pytest.raises(Stop, match="a profile does not predict an order from a file"):
        command_train(dry_run=True, ranks=2, profile=file, schedule=str(tmp_path / "order.csv"), **small)
    for wrong in ({"seq_len": 16}, {"dim": 32}):
        with pytest.raises(Stop, match=r"expected: seq_len = 16|a layer of this model was not measured"):
            plan(profile=file, ranks=4, **{**deeper, **wrong})


def test_plan_and_measurements_are_two_files(tmp_path):
    check_outputs(str(tmp_path / "plan.toml"), str(tmp_path / "profile.json"))
    with pytest.raises(ConfigError, match="cannot be one file"):
        check_outputs(str(tmp_path / "same"), f"{tmp_path}/./same")
