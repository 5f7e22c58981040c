"""How many BLAS threads a rank takes: all cores of a host busy, none with two threads, for every placement of ranks."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpipipe import processor
from mpipipe.job.cores import cores_of, fair_shares, oversubscribed_threads, own_cores, parse_cores, share_of_cores

SETS = st.frozensets(st.integers(0, 7), min_size=1)


@given(st.lists(st.tuples(st.sampled_from(["n1", "n2"]), SETS), min_size=1, max_size=8))
def test_ranks_that_share_cores_have_no_more_threads_than_cores_unless_they_are_more_themselves(places):
    shares = fair_shares(places)
    assert all(1 <= share <= len(cores) for share, (_, cores) in zip(shares, places))
    for host, cores in places:
        for _ in places:  # all that is reached from this rank by way of others
            cores = cores.union(*(own for name, own in places if name == host and own & cores))
        mates = [share for share, (name, own) in zip(shares, places) if name == host and own & cores]
        assert sum(mates) <= max(len(cores), len(mates))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8, 9])
def test_ranks_that_are_not_pinned_divide_the_cores(ranks):
    assert fair_shares([("n1", range(8))] * ranks) == [max(1, 8 // ranks)] * ranks


def test_ranks_that_are_pinned_take_their_own_cores():
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


def test_all_ranks_of_a_job_count_the_same_cores(comm):
    share = share_of_cores()
    assert 1 <= share <= len(parse_cores(own_cores()))
    assert share * comm.size <= max(comm.size, os.cpu_count())


@pytest.mark.parametrize(("text", "count"), [("3", 3), (" 2 ", 2), ("4,2", 4), ("", None), ("0", None), ("x", None)])
def test_a_number_that_the_user_set_is_known(monkeypatch, text, count):
    for name in processor.THREAD_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", text)
    assert processor.chosen_threads() == count


def placed(cores, counts):
    rows = enumerate(zip(cores, counts))
    return [{"rank": rank, "host": "n1", "cores": own, "threads": count} for rank, (own, count) in rows]


@pytest.mark.parametrize(
    ("cores", "counts", "text"),
    [
        (["0", "1"], [1, 1], None),
        (["0", "0"], [1, 1], None),  # `oversubscribed` says it
        (["0-3", "4-7"], [4, 4], None),
        (["0", "1"], [1, 4], "rank 1 has 4 BLAS threads on 1 core of n1"),
        (["0-7"] * 4, [4] * 4, "ranks 0-3 have 16 BLAS threads on 8 cores of n1"),
        (["0-1", "2-3"], [2, 3], "rank 1 has 3 BLAS threads on 2 cores of n1"),
        (["", ""], [4, 4], None),
    ],
)
def test_threads_that_are_more_than_cores_are_named(cores, counts, text):
    assert oversubscribed_threads(placed(cores, counts)) == text
