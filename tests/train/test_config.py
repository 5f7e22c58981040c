"""One dataclass for defaults, TOML file and flags; whatever is unknown or out of range is refused by name."""

from __future__ import annotations

import dataclasses
import math
import tomllib

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from support import harness

from mpipipe.errors import ConfigError
from mpipipe.options import kinds_of, option_of
from mpipipe.train import TrainConfig
from mpipipe.train.config import INSTEAD
from mpipipe.train.progress import make_scaler

KINDS = kinds_of(TrainConfig)
TYPED = ("partition", "memory_limit", "preempt_signals", "time_limit")  # texts that are parsed

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
    *(({"loss_scale": wrong}, "loss_scale") for wrong in (-1, 0.5, math.inf)),
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
        assert caught.value.expected.split(" or ")[0] == meant or not meant


def test_files_that_are_missing_or_not_toml_are_refused(toml, tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        TrainConfig.load(str(tmp_path / "absent.toml"))
    with pytest.raises(ConfigError, match="not TOML"):
        TrainConfig.load(toml("steps: 3"))


@settings(max_examples=300 if harness.AT_LENGTH else 60)
@given(content=configurations())
def test_a_damaged_config_is_refused_or_means_what_it_says(tmp_path, content):
    """One that is taken has what its file says, to the last key and type, and is within all ranges."""
    path = tmp_path / "job.toml"
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


def test_what_has_no_option_here_is_none():
    assert not set(INSTEAD) & set(KINDS)


def test_what_follows_from_other_options_comes_with_how_and_not_with_a_likely_name():
    with pytest.raises(ConfigError) as caught:
        TrainConfig.load(micro_batch_size=4)
    assert "batch / (replicas x microbatches)" in caught.value.remedy and " or " not in caught.value.expected
