"""What launchers promise: sizes, ranks, ranks on one host; a process that was promised others is not left alone."""

from __future__ import annotations

import os

import pytest

from mpipipe.errors import LaunchError
from mpipipe.job import settings


@pytest.mark.parametrize("name", settings.SIZE_VARIABLES)
def test_each_launcher_promises_a_size(name):
    assert settings.launcher_size({name: "4", "HOME": "7"}) == (name, 4)
    for text in ("1", "0", "", "-3", "four"):
        assert settings.launcher_size({name: text}) is None
    with pytest.raises(LaunchError, match=rf"(?s)found: 1 rank\n.*expected: 4 ranks \({name}=4\)"):
        settings.refuse_singleton({name: "4"})


def test_without_a_launcher_a_lone_process_is_fine():
    settings.refuse_singleton({})
    settings.refuse_singleton({"PMI_SIZE": "1"})
    assert settings.launcher_rank({}) == 0


@pytest.mark.parametrize("name", settings.RANK_VARIABLES)
def test_each_launcher_promises_a_rank(name):
    assert settings.launcher_rank({name: "3"}) == 3
    assert settings.launcher_rank({name: "none"}) == 0


@pytest.mark.parametrize("name", settings.LOCAL_SIZE_VARIABLES)
def test_more_ranks_than_cores_on_a_host(monkeypatch, name):
    for other in settings.LOCAL_SIZE_VARIABLES:
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert not settings.oversubscribed()
    for ranks, expected in (("2", False), ("3", True), ("", False), ("x", False)):
        monkeypatch.setenv(name, ranks)
        assert settings.oversubscribed() is expected
