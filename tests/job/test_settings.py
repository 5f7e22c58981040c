"""The environment variables: one table, in which each one that the package reads stands; and what launchers promise."""

import os
import re
from math import inf
from pathlib import Path

import pytest

import mpipipe
from mpipipe.attention import kernels
from mpipipe.errors import ArgumentError, LaunchError
from mpipipe.job import context, settings

NAMES = [variable.name for variable in settings.VARIABLES]


def test_every_variable_that_the_package_names_stands_in_the_table():
    texts = [path.read_text() for path in Path(mpipipe.__file__).parent.rglob("*.py")]
    assert sorted(set(re.findall(r"MPIPIPE_(?!TEST_)[A-Z_]+", "\n".join(texts)))) == sorted(NAMES)


def test_attention_names_its_kernels():
    assert re.findall(r"\w+", settings.ATTENTION.values.replace(" or ", " ")) == list(kernels.NAMES)


@pytest.fixture
def unset(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    "name, values",
    [
        ("MPIPIPE_TIMEOUT", ("0.5", "0", "0.0", "1e3")),
        ("MPIPIPE_WATCHDOG", ("0", "1")),
        ("MPIPIPE_SYNC_SENDS", ("1",)),
        ("MPIPIPE_GPU_DIRECT", ("0",)),
        *((name, ("",)) for name in NAMES),
    ],
)
def test_what_has_a_meaning_is_taken(unset, monkeypatch, name, values):
    for value in values:
        monkeypatch.setenv(name, value)
        settings.check_settings()


@pytest.mark.parametrize(
    "name, value",
    [
        *(("MPIPIPE_TIMEOUT", value) for value in ("abc", "-5", "inf", "nan", "1 s")),
        *(("MPIPIPE_WATCHDOG", value) for value in ("0.5", "-1", "never", "nan", "inf")),
        *((name, value) for name in ("MPIPIPE_SYNC_SENDS", "MPIPIPE_GPU_DIRECT") for value in ("2", "-1", "maybe")),
    ],
)
def test_what_has_none_is_refused_with_both_sides(unset, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(ArgumentError) as caught:
        settings.check_settings()
    (expected,) = [variable.values for variable in settings.VARIABLES if variable.name == name]
    assert str(caught.value).splitlines() == [
        f"environment variable {name}",
        f"  found: {value!r}",
        f"  expected: {expected}",
    ]


@pytest.mark.parametrize(
    "value, wait, watchdog",
    [("", inf, 600.0), ("0", inf, inf), ("abc", inf, inf), ("inf", inf, inf), ("2.5", 2.5, 2.5)],
)
def test_limits_of_a_wait_and_of_the_watchdog(unset, monkeypatch, value, wait, watchdog):
    assert settings.TIMEOUT.limit == inf
    for name in ("MPIPIPE_TIMEOUT", "MPIPIPE_WATCHDOG"):
        monkeypatch.setenv(name, value)
    assert (settings.TIMEOUT.limit, settings.WATCHDOG.limit) == (wait, watchdog)


# -- launchers promise sizes, ranks, ranks on one host; a process that was promised others is not left alone -----------


@pytest.mark.parametrize("name", settings.SIZE_VARIABLES)
def test_each_launcher_promises_a_size(name):
    assert settings.launcher_size({name: "4", "HOME": "7"}) == (name, 4)
    for text in ("1", "0", "", "-3", "four"):
        assert settings.launcher_size({name: text}) is None
    with pytest.raises(LaunchError, match=rf"(?s)found: 1 rank\n.*expected: 4 ranks \({name}=4\)"):
        settings.refuse_singleton({name: "4"})


@pytest.mark.parametrize("name", settings.RANK_VARIABLES)
def test_each_launcher_promises_a_rank(name):
    assert settings.launcher_rank({name: "3"}) == 3
    assert settings.launcher_rank({name: "none"}) == 0


@pytest.mark.parametrize("name", settings.LOCAL_SIZE_VARIABLES)
def test_more_ranks_than_cores_on_a_host_sleep_longer_between_two_polls(monkeypatch, name):
    for other in settings.LOCAL_SIZE_VARIABLES:
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert not settings.oversubscribed()
    for ranks, expected in (("2", False), ("3", True), ("", False), ("x", False)):
        monkeypatch.setenv(name, ranks)
        assert settings.oversubscribed() is expected
        assert context.RankContext().pause == (5e-4 if expected else 5e-5)
