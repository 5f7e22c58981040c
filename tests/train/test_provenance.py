"""A run folder explains itself: what it holds makes the same numbers again."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from support.small_training import records

from mpipipe.errors import ConfigError
from mpipipe.job import inprocess
from mpipipe.language.models import GPT
from mpipipe.train import Task, TrainConfig, output_folder, train
from mpipipe.train.config import read_keys

SMALL = dict(
    dim=8, layers=2, heads=1, seq_len=8, batch=4, steps=4, warmup=2, log_every=1, eval_every=2, eval_batches=1,
    sample_bytes=0,
)  # fmt: skip


@pytest.fixture
def text(tmp_path):
    words = np.random.default_rng(0).choice(["one ", "two ", "three "], 400)
    (tmp_path / "text.txt").write_text("".join(words))
    return tmp_path / "text.txt"


def trained(ranks, config):
    inprocess.run(ranks, lambda comm: train(config, GPT, comm))
    return records(config)


def test_the_saved_configuration_gives_bit_equal_metrics(text, tmp_path, monkeypatch):
    """From another working folder, with all that was left open."""
    monkeypatch.chdir(tmp_path)
    chosen = TrainConfig(**SMALL, data=[text.name], out="first", seed=3, lr=0.1 + 0.2, dropout=0.25)
    first = trained(2, chosen)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    again = TrainConfig.load("../first/config.toml", out="second")
    assert trained(2, again) == first and len(first) == 5
    assert (again.device, again.pipe, again.microbatches, again.vocab) == ("cpu", 2, 4, 256)
    assert again.data == (str(text),)
    assert read_keys(Path("second/config.toml")) == read_keys(tmp_path / "first/config.toml")


def test_the_folder_says_where_it_was_trained_what_was_shown_and_has_the_metrics_that_were_asked_for(
    text, tmp_path, capfd
):
    pytest.importorskip("tensorboardX")
    config = TrainConfig(**SMALL, data=[str(text)], out=str(tmp_path / "out"), device="cpu", tensorboard=True)
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
