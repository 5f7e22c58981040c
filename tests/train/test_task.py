"""A task that knows no text is trained, planned, saved and resumed as text is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mpipipe import nn
from mpipipe.errors import ConfigError
from mpipipe.job import inprocess
from mpipipe.train import Task, TrainConfig, run

WIDTH = 6
KEYS = dict(batch=8, steps=6, lr=0.05, warmup=0, log_every=1, eval_every=3, eval_batches=1, device="cpu")


class Field(Task):
    """Learns a smooth map of vectors, four layers deep."""

    unit = "fields"

    def layers(self, shard):
        return [nn.Linear(WIDTH, WIDTH) for _ in range(4)]

    def loss(self, output, target, factor=1.0):
        error = output - target
        return float((error**2).mean()), (2 * factor / error.size * error).astype(output.dtype)

    def batch(self, step, rows, shard):
        inputs = np.random.default_rng(step).normal(size=(64, WIDTH))[rows.start : rows.stop].astype(np.float32)
        return inputs, np.roll(inputs, 1, axis=1)

    def validation(self, index, rows, shard):
        return self.batch(1000 + index, rows, shard)

    def message_shape(self, rows, shard):
        return rows, WIDTH


def trained(ranks, config):
    return inprocess.run(ranks, lambda comm: run(Field(), config, comm))[0]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return trained(1, TrainConfig(**KEYS, out=str(tmp_path_factory.mktemp("alone") / "run")))


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "keys"), [(2, {}), (4, {"pipe": 2}), (2, {"plan": "auto"})])
def test_it_learns_the_same_on_any_mesh(tmp_path, capsys, alone, ranks, keys):
    out = tmp_path / "run"
    record = trained(ranks, TrainConfig(**KEYS, **keys, out=str(out)))
    assert record.loss == pytest.approx(alone.loss, rel=1e-4)
    assert record.validation == pytest.approx(alone.validation, rel=1e-4)
    said = capsys.readouterr().out
    assert "mpipipe: 168 parameters on CPUs" in said and " fields/s" in said and "mpipipe: ok steps=6" in said
    assert (out / "metrics.jsonl").exists() and (out / "config.toml").exists()


def test_it_is_resumed_on_another_mesh_and_not_with_another_seed(tmp_path, alone):
    config = TrainConfig(**KEYS, out=str(tmp_path / "run"), save_every=2, keep=3)
    trained(1, config)
    saved = sorted((tmp_path / "run" / "checkpoints").iterdir())[1]
    again = replace(config, resume=str(saved), out=str(tmp_path / "again"))
    assert trained(2, again).loss == pytest.approx(alone.loss, rel=1e-4)
    with pytest.raises(ConfigError, match=r"another configuration(.|\n)*seed = 1"):
        trained(1, replace(config, resume="auto", seed=1))
