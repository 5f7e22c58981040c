"""One dataclass for defaults, TOML file and flags; whatever is unknown or out of range is refused by name."""

from __future__ import annotations

import dataclasses
import math

import pytest

from mpipipe.errors import ConfigError
from mpipipe.train import TrainConfig
from mpipipe.train.config import KINDS


@pytest.fixture
def toml(tmp_path):
    def write(text):
        path = tmp_path / "job.toml"
        path.write_text(text)
        return str(path)

    return write


def test_flags_win_over_the_file_and_the_file_over_defaults(toml):
    config = TrainConfig.load(toml('steps = 7\nlr = 1\ndata = ["a", "b"]\ntied = true\n'), steps=9, heads=2, dim=None)
    assert (config.steps, config.lr, config.data, config.tied, config.heads) == (9, 1.0, ("a", "b"), True, 2)
    assert config.dim == TrainConfig().dim
    assert type(config.lr) is float


def test_every_field_has_a_help_text_and_a_kind():
    for entry in dataclasses.fields(TrainConfig):
        assert entry.metadata["help"]
        assert KINDS[entry.name] in (int, float, bool, str, tuple)


@pytest.mark.parametrize(
    ("text", "key", "near"),
    [
        ("step = 3", "step", "steps"),
        ("micro_batches = 3", "micro_batches", "microbatches"),
        ("[model]\ndim = 3", "model", ""),
    ],
)
def test_unknown_keys_are_refused_with_their_nearest_neighbours(toml, text, key, near):
    with pytest.raises(ConfigError, match="unknown key") as caught:
        TrainConfig.load(toml(text))
    assert caught.value.found == key
    assert near in caught.value.expected


def test_unknown_flags_are_refused():
    with pytest.raises(ConfigError, match="unknown key in the flags"):
        TrainConfig.load(learning_rate=1.0)


@pytest.mark.parametrize(
    "keys",
    [
        {"steps": 3.0}, {"steps": True}, {"steps": "3"}, {"lr": "fast"}, {"tied": 1}, {"data": "a"}, {"data": [1]},
        {"schedule": 1}, {"steps": None},
    ],
)  # fmt: skip
def test_wrong_types_are_refused(keys):
    with pytest.raises(ConfigError, match="type"):
        TrainConfig(**keys)


@pytest.mark.parametrize(
    "keys",
    [
        {"steps": 0}, {"pipe": 0}, {"chunks": 0}, {"microbatches": 0}, {"batch": 0}, {"layers": 0}, {"dim": -1},
        {"dropout": 1.0}, {"dropout": -0.1}, {"lr": 0.0}, {"lr": math.nan}, {"lr": math.inf}, {"clip": 0},
        {"seed": -1}, {"seed": 2**63}, {"momentum": 1.0}, {"log_every": 0}, {"sample_bytes": -1}, {"temperature": -1},
    ],
)  # fmt: skip
def test_values_out_of_range_are_refused_with_the_range(keys):
    (name,) = keys
    with pytest.raises(ConfigError, match="out of range") as caught:
        TrainConfig(**keys)
    assert name in str(caught.value)
    assert "at least" in str(caught.value) or "above" in str(caught.value)


def test_the_loss_scale_is_dynamic_for_float16_unless_it_is_given():
    assert TrainConfig(dtype="float16").scales_dynamically and TrainConfig(loss_scale=0).scales_dynamically
    assert not TrainConfig(dtype="bfloat16").scales_dynamically
    assert not TrainConfig(dtype="float16", loss_scale=1024).scales_dynamically
    for wrong in (-1, 0.5, math.inf):
        with pytest.raises(ConfigError, match="loss_scale"):
            TrainConfig(loss_scale=wrong)


def test_the_watchdog_is_off_or_has_a_second_at_least():
    assert TrainConfig().watchdog is None and TrainConfig(watchdog=0).watchdog == 0.0
    for wrong in (0.5, -1, math.nan):
        with pytest.raises(ConfigError, match="watchdog"):
            TrainConfig(watchdog=wrong)


def test_no_limit_on_the_gradient_norm_is_infinity():
    assert TrainConfig(clip=math.inf).clip == math.inf


@pytest.mark.parametrize(("key", "value"), [("optimizer", "adam"), ("dtype", "int8"), ("device", "gpu")])
def test_unknown_choices_are_refused_with_the_known_ones(key, value):
    with pytest.raises(ConfigError, match=key) as caught:
        TrainConfig(**{key: value})
    assert getattr(TrainConfig(), key) in caught.value.expected


def test_files_that_are_missing_or_not_toml_are_refused(toml, tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        TrainConfig.load(str(tmp_path / "absent.toml"))
    with pytest.raises(ConfigError, match="not TOML"):
        TrainConfig.load(toml("steps: 3"))


def test_a_config_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        TrainConfig().steps = 3
