"""A run folder explains itself: what it holds makes the same numbers again."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from support.small_training import config_in, records

from mpipipe.errors import ConfigError
from mpipipe.job import inprocess
from mpipipe.language.models import GPT
from mpipipe.train import Task, TrainConfig, output_folder, train
from mpipipe.train.config import read_keys


def trained(ranks, config):
    inprocess.run(ranks, lambda comm: train(config, GPT, comm))
    return records(config)


def test_the_saved_configuration_gives_bit_equal_metrics(tmp_path, monkeypatch):
    """From another working folder, with all that was left open."""
    monkeypatch.chdir(tmp_path)
    small = dict(data=["text.txt"], out="first", steps=4, device="auto", microbatches=None)
    first = trained(2, config_in(tmp_path)(**small, seed=3, lr=0.1 + 0.2, dropout=0.25))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    again = TrainConfig.load("../first/config.toml", out="second")
    assert trained(2, again) == first and len(first) == 5
    assert (again.device, again.pipe, again.microbatches, again.vocab) == ("cpu", 2, 8, 256)
    assert again.data == (str(tmp_path / "text.txt"),)
    assert read_keys(Path("second/config.toml")) == read_keys(tmp_path / "first/config.toml")


def test_the_folder_says_where_it_was_trained_what_was_shown_and_has_the_metrics_that_were_asked_for(tmp_path, capfd):
    pytest.importorskip("tensorboardX")
    config = config_in(tmp_path)("out", steps=4, tensorboard=True)
    trained(2, config)
    environment = json.loads((tmp_path / "out/environment.json").read_text())
    assert environment["ranks"] == 2 and environment["packages"]["numpy"] == np.__version__
    assert (tmp_path / "out/train.log").read_text() == capfd.readouterr().out
    assert list((tmp_path / "out/tensorboard").iterdir())


def test_values_come_back_from_the_file_as_they_were(tmp_path):
    odd = 'a "quoted" \\ path\x7f\n\t\u00fc\U0001f600'
    keys = {"text": odd, "list": ("a", odd), "no": False, "count": 2**62, "small": 1e-300, "large": float("inf")}
    output_folder.write(tmp_path, keys, {"ranks": 1}, SimpleNamespace(handed_over="abc\u00fc", file=None))
    found = read_keys(tmp_path / "config.toml")
    assert found == {**keys, "list": list(keys["list"])}
    assert "abc\u00fc" in (tmp_path / "config.toml").read_text()
    # a path that is no text is written as it is
    output_folder.write(tmp_path, {"data": (os.fsdecode(b"/data/\xff"),)}, {"ranks": 1}, Task())
    assert b'data = ["/data/\xff"]' in (tmp_path / "config.toml").read_bytes()
    with pytest.raises(ConfigError, match="not TOML"):
        read_keys(tmp_path / "config.toml")
