"""Minutes of work with random delays and random stops: no memory, request, communicator, file or thread is left."""

from __future__ import annotations

import pytest
from support import harness

from faults.soak import SCRIPT, leaks, soak

STEADY = {"memory": 1e8, "descriptors": 9, "threads": 3, "python threads": 2, "communicators": 5, "requests": 0}
STEADY |= {"objects": 50000}


@harness.only_at_length
def test_a_soak_of_two_minutes_leaks_nothing(allow_seconds, tmp_path):
    allow_seconds(600)
    problems, samples = soak(120, 2, tmp_path)
    assert not problems, problems
    assert all(len(found) > 20 for found in samples.values())


@pytest.mark.parametrize(("name", "step"), [("memory", 1e6), ("descriptors", 0.1), ("requests", 1), ("objects", 100)])
def test_what_grows_is_told(name, step):
    steady = [dict(STEADY) for _ in range(30)]
    assert list(leaks(steady)) == []
    growing = [{**STEADY, name: STEADY[name] + step * number} for number in range(30)]
    assert [text.split(" grew")[0] for text in leaks(growing)] == [name]
    warming = [{**STEADY, name: STEADY[name] + step * min(number, 5)} for number in range(30)]
    assert list(leaks(warming)) == []
    assert list(leaks(steady[:3])) == ["only 3 samples"]


def test_the_script_compiles():
    compile(SCRIPT.read_text(), str(SCRIPT), "exec")
