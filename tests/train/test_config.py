"""One dataclass for defaults, TOML file and flags; whatever is unknown or out of range is refused by name."""

import dataclasses
import math

import pytest

from mpipipe.errors import ConfigError
from mpipipe.text import INSTEAD
from mpipipe.train import TrainConfig
from mpipipe.train.config_fields import kinds_of, option_of
from mpipipe.train.task_calls import make_scaler

KINDS = kinds_of(TrainConfig)


@pytest.fixture
def toml(tmp_path):
    def write(text):
        path = tmp_path / "job.toml"
        path.write_text(text)
        return str(path)

    return write


def test_flags_win_over_the_file_and_the_file_over_defaults_and_nothing_changes_then(toml):
    config = TrainConfig.load(toml('steps = 7\nlr = 1\ndata = ["a", "b"]\ntied = true\n'), steps=9, heads=2, dim=None)
    assert (config.steps, config.lr, config.data, config.tied, config.heads) == (9, 1.0, ("a", "b"), True, 2)
    assert config.dim == TrainConfig().dim
    assert type(config.lr) is float
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.steps = 3
    for entry in dataclasses.fields(TrainConfig):
        assert option_of(entry).text
        assert KINDS[entry.name] in (int, float, bool, str, tuple)


REFUSED = [  # (keys, words of the error)
    *(
        (keys, "type of")
        for keys in (
            {"steps": 3.0}, {"steps": True}, {"steps": "3"}, {"lr": "fast"}, {"tied": 1}, {"data": "a"}, {"data": [1]},
            {"schedule": 1}, {"steps": None},
        )
    ),
    *(
        (keys, "is out of range(.|\\n)*(at least|above)")
        for keys in (
            {"steps": 0}, {"pipe": 0}, {"chunks": 0}, {"microbatches": 0}, {"batch": 0}, {"layers": 0}, {"dim": -1},
            {"dropout": 1.0}, {"dropout": -0.1}, {"lr": 0.0}, {"lr": math.nan}, {"lr": math.inf}, {"clip": 0},
            {"seed": -1}, {"seed": 2**63}, {"momentum": 1.0}, {"log_every": 0}, {"sample_bytes": -1},
            {"preempt_grace": -1.0}, {"keep": 0}, {"save_every": -1},
        )
    ),
    *(({"loss_scale": wrong}, "loss_scale") for wrong in (-1, math.inf)),
    *(({"watchdog": wrong}, "watchdog") for wrong in (0.5, -1, math.nan)),
    ({"optimizer": "adam"}, "optimizer(.|\\n)*adamw"),
    ({"dtype": "int8"}, "dtype(.|\\n)*float32"),
    ({"device": "gpu"}, "device(.|\\n)*auto"),
    ({"preempt_signals": "USR2,KILL"}, "preempt_signals: a signal that cannot be caught\n.*'KILL'"),
    ({"preempt_signals": "STOP"}, "preempt_signals: a signal that cannot be caught"),
    ({"time_limit": "an hour"}, "time_limit: no length of time\n.*'an hour'"),
    ({"resume": "auto"}, "resume = auto without out"),
]  # fmt: skip


@pytest.mark.parametrize(("keys", "match"), REFUSED)
def test_wrong_types_and_values_out_of_range_are_refused_by_name(keys, match):
    with pytest.raises(ConfigError, match=match) as caught:
        TrainConfig(**keys)
    assert next(iter(keys)) in str(caught.value)


def test_what_is_at_the_end_of_a_range_is_taken():
    assert TrainConfig(clip=math.inf).clip == math.inf
    assert TrainConfig().watchdog is None and TrainConfig(watchdog=0).watchdog == 0.0
    kinds = dict(dtype="float16"), dict(loss_scale=0), dict(dtype="bfloat16"), dict(dtype="float16", loss_scale=1024)
    assert [make_scaler(TrainConfig(**keys)).dynamic for keys in kinds] == [True, True, False, False]


@pytest.mark.parametrize(
    ("text", "meant"),
    [("step", "steps"), ("stpes", "steps"), ("micro_batches", "microbatches"),
     ("Batch-Size", "batch"), ("xyzzy", "")],
)  # fmt: skip
def test_an_unknown_key_or_flag_comes_with_what_may_have_been_meant(toml, text, meant):
    for keys, source in ((dict(path=toml(f"{text} = 3")), "job.toml"), ({text: 3}, "the flags")):
        with pytest.raises(ConfigError, match=f"unknown key in .*{source}") as caught:
            TrainConfig.load(**keys)
        assert caught.value.found == text
        assert caught.value.expected.split(" or ")[0] == meant or (not meant and "from_" not in caught.value.expected)


def test_files_that_are_missing_or_not_toml_are_refused(toml, tmp_path):
    for path, match in ((str(tmp_path / "absent.toml"), "cannot be read"), (toml("steps: 3"), "not TOML")):
        with pytest.raises(ConfigError, match=match):
            TrainConfig.load(path)


def test_a_key_of_another_program_comes_with_what_to_use():
    with pytest.raises(ConfigError, match="unknown key in the flags") as caught:
        TrainConfig.load(tensor_parallel_size=4)
    assert "give pipe for large models" in caught.value.remedy
    for names in INSTEAD:
        assert not set(names.split()) & set(KINDS)
