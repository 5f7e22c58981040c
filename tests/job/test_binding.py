"""Which cores ranks share, against all subsets of cores counted one by one."""

from __future__ import annotations

import os
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpipipe.job.cores import cores_text, oversubscribed, own_cores, parse_cores

CORES = 4
SETS = [set(chosen) for count in range(1, CORES + 1) for chosen in combinations(range(CORES), count)]


def placed(allowed, host="n1"):
    return [{"rank": rank, "host": host, "cores": cores_text(own)} for rank, own in enumerate(allowed)]


@given(st.lists(st.sampled_from(SETS), min_size=1, max_size=7))
def test_ranks_are_oversubscribed_where_some_cores_have_more_ranks_than_cores(allowed):
    """Hall's theorem over all sets of cores: each rank has a core of its own if and only if no set is too small."""
    too_small = any(sum(own <= cores for own in allowed) > len(cores) for cores in SETS)
    found = oversubscribed(placed(allowed))
    unions = {frozenset().union(*allowed), *map(frozenset, allowed)}
    if any(sum(own <= cores for own in allowed) > len(cores) for cores in unions):
        assert found is not None
    if found is not None:
        assert too_small


@pytest.mark.parametrize(
    ("cores", "text"),
    [
        (["0-1"] * 4, "4 ranks share 2 cores"),
        (["0", "0"], "2 ranks share 1 core"),
        (["0", "0", "1-7", "0-7"], "ranks 0-1 share 1 core on n1"),
        (["0-1", "0-1"], None),
        (["0", "1"], None),
        (["", ""], None),  # a system that does not say
    ],
)
def test_the_sentence_names_ranks_and_cores(cores, text):
    assert oversubscribed([{"rank": rank, "host": "n1", "cores": own} for rank, own in enumerate(cores)]) == text


def test_cores_of_two_hosts_are_not_the_same_cores():
    there = [{**place, "rank": place["rank"] + 2} for place in placed([{0}, {1}], "n2")]
    assert oversubscribed([*placed([{0}, {1}]), *there]) is None
    assert oversubscribed([*placed([{0}, {1}]), *there, {"rank": 4, "host": "n2", "cores": "0-1"}]) == (
        "ranks 2-4 share 2 cores on n2"
    )


@given(st.sets(st.integers(0, 300)))
def test_what_is_written_of_cores_is_read_back(cores):
    assert parse_cores(cores_text(sorted(cores))) == cores


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="the system does not say")
def test_the_own_cores_are_those_of_the_system():
    assert parse_cores(own_cores()) == os.sched_getaffinity(0)
