"""Training with a trace: which steps are in it, what is said, and what is refused before anything runs."""

import json
from functools import partial
from pathlib import Path

import pytest
from support.small_training import config_in

from mpipipe.errors import ArgumentError
from mpipipe.job import inprocess
from mpipipe.job.preemption import Preemption
from mpipipe.language.models import GPT
from mpipipe.train import train, trainer


@pytest.fixture
def small(tmp_path):
    """small(**keys): a small training in the folder `run`, with a trace in the folder `trace`."""
    return partial(config_in(tmp_path), trace=str(tmp_path / "trace"), steps=4, eval_every=2)


def run(config, ranks=2):
    return inprocess.run(ranks, lambda comm: train(config, GPT, comm))


def summary(config):
    return json.loads(Path(config.trace, "summary.json").read_text())


@pytest.mark.parametrize("steps, recorded", [(1, 1), (7, 4)])
def test_the_steps_behind_the_first_one_are_recorded(small, capsys, monkeypatch, steps, recorded):
    monkeypatch.setattr(trainer, "RECORDED", 4)
    config = small(steps=steps)
    plain = run(small(steps=steps, trace=None, out=config.out + "2"))
    assert run(config)[0].loss == plain[0].loss
    found = summary(config)
    assert found["steps"] == recorded and found["schedule"] == "one_f_one_b"
    for parts in found["parts"].values():
        assert parts["compute"] > 0 and parts["optimizer"] > 0
    said = capsys.readouterr().out
    assert f"mpipipe: where the time of {recorded} step{'s' * (recorded > 1)} went\n" in said
    assert "\nparallel efficiency 0." in said and found["advice"] in said
    assert f"mpipipe: the trace is in {config.trace}\n" in said


def test_replicas_and_rings_and_recomputation_are_in_one_trace(small):
    config = small(pipe=2, seq=2, chunks=1, recompute=True)
    run(config, ranks=8)
    found = summary(config)
    assert sorted(map(int, found["parts"])) == list(range(8))
    assert all(parts["sums"] > 0 for parts in found["parts"].values())
    names = [each["name"] for each in json.loads(Path(config.trace, "trace.json").read_text())]
    assert names.count("0R0") == 8 // 2 * 2 * 3  # of ranks with the first stage, in each step: as it was, and predicted


def test_a_training_that_has_to_leave_writes_what_it_has(small, monkeypatch):
    asked = []
    monkeypatch.setattr(Preemption, "due", lambda *_: len(asked.append(1) or asked) == 3)
    config = small(steps=50)
    with pytest.raises(SystemExit) as left:
        run(config, ranks=1)
    assert left.value.code == 75
    assert summary(config)["steps"] == 2


def test_a_folder_in_the_way_is_refused_before_anything_runs(small):
    Path(small().trace).mkdir()
    with pytest.raises(ArgumentError, match="the folder for a trace exists"):
        run(small())
    assert not Path(small().out).exists()


def test_a_training_that_goes_on_leaves_the_trace_that_is_there(small):
    run(small(steps=4, save_every=2))
    before = summary(small())
    assert run(small(steps=8, save_every=2, resume="auto"))[0].step == 8
    assert summary(small()) == before


def test_a_trace_that_cannot_be_written_ends_no_training(small, capsys, tmp_path):
    (tmp_path / "file").write_text("")
    config = small(trace=str(tmp_path / "file" / "trace"))
    assert run(config)[0].step == 4
    assert "mpipipe: the trace cannot be written: " in capsys.readouterr().out
