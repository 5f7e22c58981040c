"""One dataclass for defaults, TOML file and flags; whatever is unknown or out of range is refused by name."""

from __future__ import annotations

import dataclasses
import math
import sys

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from support import harness

from mpipipe.errors import ConfigError
from mpipipe.options import kinds_of, option_of
from mpipipe.train import TrainConfig
from mpipipe.train.options import INSTEAD

KINDS, OTHER_NAMES = kinds_of(TrainConfig), TrainConfig.other_names
TYPED = ("partition", "memory_limit", "metrics_to", "preempt_signals", "time_limit")  # texts that are parsed

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

WHOLE = """# a training
data = ["a.txt", "b.txt"]
out = "runs/x"
dim = 64
layers = 2
tied = true
dropout = 0.1
schedule = "gpipe"
steps = 100
lr = 3e-3
seed = 7
watchdog = 60
"""
# what somebody may write behind a key, or paste into the file
ODD = st.sampled_from(
    ["", "-1", "0", "9" * 40, "-9223372036854775809", "nan", "inf", "-inf", "1e400", "1e-400", "true", "'x'", "[]",
     "[[[]]]", "[1, 'a']", "{}", "{a = 1}", "1979-05-27", "\"\\u0000\"", '"""x', "0x7f", "1_000", "[" * 2000,
     "3 # but why", '"../../etc/passwd"', '"' + "x" * 5000 + '"'],
)  # fmt: skip
KEYS = st.sampled_from([*KINDS, "step", "Dim", "a.b", '"dim "', "[table]", "\x00", ""])
LINES = st.builds(lambda key, value: f"{key} = {value}", KEYS, ODD)


@st.composite
def configurations(draw):
    """The bytes of a config file in which something is wrong."""
    lines = WHOLE.splitlines()
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, len(lines) - 1))
        kind = draw(st.sampled_from(["value", "value", "line", "twice", "remove"]))
        if kind == "value" and " = " in lines[place]:
            lines[place] = f"{lines[place].split(' = ')[0]} = {draw(ODD)}"
        elif kind == "line":
            lines.insert(place, draw(LINES))
        elif kind == "twice":
            lines.insert(place, lines[-1])
        else:
            lines[place] = ""
    content = "\n".join(lines).encode()
    place = draw(st.integers(0, len(content)))
    return draw(
        st.sampled_from([content, content, content[:place], content[:place] + b"\xff" + content[place:], b"\x00" * 99])
    )


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
        assert option_of(entry).text
        assert KINDS[entry.name] in (int, float, bool, str, tuple)


@pytest.mark.parametrize(
    ("text", "key", "near"),
    [("step = 3", "step", "steps"), ("micro_batches = 3", "micro_batches", "microbatches"), ("xyzzy = 3", "xyzzy", "")],
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


def check_refused_or_as_written(path, content):
    """A config that is taken has what its file says, to the last key and type, and is within all ranges."""
    path.write_bytes(content)
    try:
        config = TrainConfig.load(str(path))
    except ConfigError as error:
        event("refused")
        assert error.found is not None and str(error)
        return
    event("taken")
    written = tomllib.loads(content.decode())
    for key, value in written.items():
        taken = getattr(config, key)
        if key in TYPED:
            continue
        assert taken == (tuple(value) if isinstance(value, list) else value), key
        assert type(taken) is KINDS[key]
    others = [entry for entry in dataclasses.fields(config) if entry.name not in (*written, *TYPED)]
    assert all(getattr(config, entry.name) == entry.default for entry in others)
    assert config.dim > 0 and config.steps > 0 and 0 <= config.dropout < 1 and 0 < config.lr < math.inf
    assert 0 <= config.seed < 2**63 and config.dim < 2**63 and (config.watchdog is None or config.watchdog >= 0)


@settings(max_examples=60)
@given(content=configurations())
def test_a_damaged_config_is_refused_or_means_what_it_says(tmp_path, content):
    check_refused_or_as_written(tmp_path / "job.toml", content)


@harness.only_at_length
@settings(max_examples=300)
@given(content=configurations())
def test_300_damaged_configs_are_refused_or_mean_what_they_say(tmp_path, content):
    check_refused_or_as_written(tmp_path / "job.toml", content)


@pytest.mark.parametrize(("key", "meant"), [("learning_rate", "lr"), ("Batch-Size", "batch"), ("stpes", "steps")])
def test_an_unknown_key_comes_with_what_may_have_been_meant(key, meant):
    with pytest.raises(ConfigError) as caught:
        TrainConfig.load(**{key: 1})
    assert caught.value.expected.split(" or ")[0] == meant


def test_what_others_call_an_option_leads_to_one_that_exists():
    assert set(OTHER_NAMES.values()) <= {name.rstrip("_") for name in KINDS}
    assert not {*OTHER_NAMES, *INSTEAD} & set(KINDS) and not set(OTHER_NAMES) & set(INSTEAD)


def test_what_follows_from_other_options_comes_with_how_and_not_with_a_likely_name():
    with pytest.raises(ConfigError) as caught:
        TrainConfig.load(micro_batch_size=4)
    assert "batch / (replicas x microbatches)" in caught.value.remedy and " or " not in caught.value.expected
