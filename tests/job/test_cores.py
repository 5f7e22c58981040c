"""Which cores ranks share, against all subsets of cores counted one by one, and how many threads each takes."""

import os
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpipipe.cli.output import share_of_cores
from mpipipe.job import cores as job_cores
from mpipipe.job.cores import cores_of, cores_text, fair_shares, oversubscribed, own_cores, parse_cores

CORES = 4
SETS = [set(chosen) for count in range(1, CORES + 1) for chosen in combinations(range(CORES), count)]


def placed(allowed, host="n1"):
    return [{"rank": rank, "host": host, "cores": cores_text(own), "threads": 1} for rank, own in enumerate(allowed)]


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
    ("cores", "threads", "text"),
    [
        (["0-1"] * 4, [1] * 4, "4 threads of ranks 0-3 share 2 cores of n1"),
        (["0", "0", "1-7", "0-7"], [1] * 4, "2 threads of ranks 0-1 share 1 core of n1"),
        (["0-1", "0-1"], [1, 1], None),
        (["", ""], [4, 4], None),  # a system that does not say
        (["0", "1"], [1, 4], "4 threads of rank 1 share 1 core of n1"),
        (["0-7"] * 4, [4] * 4, "16 threads of ranks 0-3 share 8 cores of n1"),
    ],
)
def test_the_sentence_names_ranks_and_cores(cores, threads, text):
    rows = enumerate(zip(cores, threads))
    binding = [{"rank": rank, "host": "n1", "cores": own, "threads": count} for rank, (own, count) in rows]
    assert oversubscribed(binding) == text


def test_cores_of_two_hosts_are_not_the_same_cores():
    there = [{**place, "rank": place["rank"] + 2} for place in placed([{0}, {1}], "n2")]
    assert oversubscribed([*placed([{0}, {1}]), *there]) is None
    assert oversubscribed([*placed([{0}, {1}]), *there, {"rank": 4, "host": "n2", "cores": "0-1", "threads": 1}]) == (
        "3 threads of ranks 2-4 share 2 cores of n2"
    )


@given(st.sets(st.integers(0, 300)))
def test_what_is_written_of_cores_is_read_back(cores):
    assert parse_cores(cores_text(sorted(cores))) == cores


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="the system does not say")
def test_the_own_cores_are_those_of_the_system():
    assert parse_cores(own_cores()) == os.sched_getaffinity(0)


# -- Threads: all cores of a host busy, none with two threads, for every placement of ranks ---------------------------

HARDWARE_THREADS = st.frozensets(st.integers(0, 7), min_size=1)


@given(st.lists(st.tuples(st.sampled_from(["n1", "n2"]), HARDWARE_THREADS), min_size=1, max_size=8))
def test_ranks_that_share_cores_have_no_more_threads_than_cores_unless_they_are_more_themselves(places):
    shares = fair_shares(places)
    assert all(1 <= share <= len(cores) for share, (_, cores) in zip(shares, places))
    for host, cores in places:
        for _ in places:  # all that is reached from this rank by way of others
            cores = cores.union(*(own for name, own in places if name == host and own & cores))
        mates = [share for share, (name, own) in zip(shares, places) if name == host and own & cores]
        assert sum(mates) <= max(len(cores), len(mates))


def test_ranks_divide_the_cores_or_take_those_that_they_are_pinned_to():
    for ranks in (1, 2, 3, 4, 8, 9):
        assert fair_shares([("n1", range(8))] * ranks) == [max(1, 8 // ranks)] * ranks
    assert fair_shares([("n1", [0]), ("n1", [0]), ("n1", [1, 2])]) == [1, 1, 2]
    assert fair_shares([("n1", [0, 1]), ("n1", [2, 3, 4]), ("n2", [0, 1])]) == [2, 3, 2]
    assert fair_shares([("n1", []), ("n1", [1])]) == [1, 1]  # a system that does not say


def test_two_hardware_threads_of_a_core_are_one(tmp_path):
    for thread, siblings in enumerate(["0,2", "1,3", "0,2", "1,3"]):
        folder = tmp_path / f"cpu{thread}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{siblings}\n")
    assert cores_of(range(4), tmp_path) == {0, 1}
    assert cores_of([2, 3], tmp_path) == {0, 1}
    assert cores_of([4, 5], tmp_path) == {4, 5}  # nobody says


@pytest.mark.parametrize(
    ("text", "most"), [("max 100000", None), ("150000 100000", 1), ("200000 100000", 2), ("9 9", 1)]
)
def test_a_container_may_have_less_than_its_cores(monkeypatch, tmp_path, text, most):
    before = sorted(cores_of(parse_cores(own_cores())))
    (tmp_path / "cpu.max").write_text(f"{text}\n")
    monkeypatch.setattr(job_cores, "QUOTA", tmp_path / "cpu.max")
    assert job_cores.single_cores() == before[:most]
    monkeypatch.setattr(job_cores, "QUOTA", tmp_path / "missing")
    assert job_cores.single_cores() == before


def test_all_ranks_of_a_job_count_the_same_cores(comm):
    share = share_of_cores()
    assert 1 <= share <= len(parse_cores(own_cores()))
    assert share * comm.size <= max(comm.size, os.cpu_count())
