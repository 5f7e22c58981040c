"""Agreement: values of all when all is well; else one error on all ranks, which names fact, ranks and both values."""

import numpy as np
import pytest

from mpipipe.errors import ArgumentError, MismatchError, MpipipeError, PeerError
from mpipipe.job import inprocess
from mpipipe.job.consensus import Ballot
from mpipipe.job.group import RankGroup, group_of


def everyone_raises(comm, kind, call):
    """The texts of all ranks, which are all alike; exactly one rank is left to report."""
    with pytest.raises(kind) as caught:
        call()
    assert caught.value.agreed
    assert comm.allgather(caught.value.reported_elsewhere).count(False) == 1
    texts = comm.allgather(str(caught.value))
    assert len(set(texts)) == 1
    return texts[0]


def test_values_of_all_ranks_come_back_in_rank_order(comm):
    group = RankGroup(comm)
    table = group.agree("a call", (("colour", "red"),), [comm.rank, -7])
    assert table.tolist() == [[rank, -7] for rank in range(comm.size)]
    group.close()


@pytest.mark.mpi(min_size=2)
def test_a_fact_that_differs_is_named_with_its_ranks_and_both_values(comm):
    group = RankGroup(comm)
    last = comm.size - 1
    facts = (("colour", "red"), ("size", 3 if comm.rank == last else 2), ("name", "x"))
    text = everyone_raises(comm, MismatchError, lambda: group.agree("a call", facts))
    assert text.splitlines() == [f"rank {last}: ranks differ in size", "  found: 3", "  expected: 2, as on rank 0"]
    text = everyone_raises(comm, MismatchError, lambda: group.agree("call", facts, message="no", remedy="do"))
    assert text.splitlines() == [
        f"rank {last}: no",
        "  found: size 3",
        "  expected: size 2, as on rank 0",
        "  remedy: do",
    ]
    assert group.agree("a call", values=[1]).tolist() == [[1]] * comm.size, "the ranks are in step afterwards"
    group.close()


@pytest.mark.mpi(min_size=2)
def test_calls_that_differ_are_named(comm):
    group = RankGroup(comm)
    text = everyone_raises(comm, MismatchError, lambda: group.agree("paint" if comm.rank == 1 else "dry"))
    assert "rank 1: ranks make different calls" in text
    assert "found: paint (call 1)" in text and "expected: dry (call 1), as on rank 0" in text
    group.close()


def test_an_error_of_one_rank_is_raised_on_all(comm):
    group = RankGroup(comm)
    last = comm.size - 1

    def call():
        with group.raise_together("a call"):
            if comm.rank == last:
                raise OSError("caf\udce9.txt is gone")  # a file name that is not UTF-8

    text = everyone_raises(comm, ArgumentError, call)
    assert text == ("" if comm.size == 1 else f"rank {last}: ") + "OSError: caf\udce9.txt is gone"
    group.close()


def test_errors_with_any_content_can_be_told(comm):
    group = RankGroup(comm)

    class Odd:
        def __reduce__(self):
            raise TypeError("cannot be pickled")

        def __str__(self):
            return "an odd thing"

    class Own(MpipipeError):
        """A class within a function, which nothing can pickle: it comes as its text."""

    class Half(MpipipeError):
        """Can be pickled, and is refused where it is read."""

        def __reduce__(self):
            return int, ("no number",)

    error = ArgumentError("wet paint", found=Odd()) if comm.rank == 0 else None
    assert "an odd thing" in everyone_raises(comm, ArgumentError, lambda: group.agree("a call", error=error))
    for kind in (Own, Half):
        error = kind("wet paint") if comm.rank == 0 else None
        assert "wet paint" in everyone_raises(
            comm, ArgumentError, lambda error=error: group.agree("a call", error=error)
        )
    group.agree("all go on")
    group.close()


def test_objects_of_any_size_are_gathered_and_broadcast(comm):
    group = RankGroup(comm)
    mine = {"rank": comm.rank, "bytes": b"x" * (70_000 * comm.rank)}
    assert group.gather("a call", mine) == [
        {"rank": rank, "bytes": b"x" * (70_000 * rank)} for rank in range(comm.size)
    ]
    root = comm.size - 1
    big = np.arange(30_000) if comm.rank == root else None
    np.testing.assert_array_equal(group.broadcast("a call", big, root), np.arange(30_000))
    group.close()


def test_what_cannot_be_pickled_on_one_rank_is_an_error_on_all(comm):
    group, root = RankGroup(comm), comm.size - 1
    for call in (group.gather, lambda name, value: group.broadcast(name, value, root)):
        odd = (lambda: None) if comm.rank == root else None
        everyone_raises(comm, ArgumentError, lambda call=call, odd=odd: call("a call", odd))
    group.close()


def test_two_axes_of_a_grid_agree_together():
    """Rank 3 of a 2 x 2 grid has an error: its row and its column know of it, and the fourth rank hears it too."""

    def job(comm):
        row = RankGroup(comm.Split(comm.rank // 2, comm.rank))
        column = RankGroup(comm.Split(comm.rank % 2, comm.rank))
        ballot = Ballot("a call", error=ArgumentError("wet paint") if comm.rank == 3 else None)
        seen = ballot.cast(row, [comm.rank]).tolist(), ballot.cast(column, [comm.rank]).tolist()
        with pytest.raises(ArgumentError, match="wet paint") as caught:
            ballot.decide()
        return seen, caught.value.reported_elsewhere

    found = inprocess.run(4, job)
    assert [echo for _, echo in found] == [True, True, True, False]
    assert found[0][0] == ([[0], [1]], [[0], [2]])


@pytest.mark.mpi(min_size=2)
def test_a_rank_that_raises_on_its_own_is_told_to_those_in_the_agreement(comm):
    group = RankGroup(comm)
    if comm.rank == 0:
        with pytest.raises(ValueError):
            with group.failing("a test"):
                raise ValueError("wet paint")
    else:
        with pytest.raises(PeerError, match="failed in a test: ValueError: wet paint"):
            group.agree("a call")
    with pytest.raises(PeerError, match="start the job anew"):
        group.agree("a call")


def test_one_group_for_all_calls_on_a_communicator_and_none_after_a_failure(comm):
    first = group_of(comm)
    assert group_of(comm) is first
    first.fail(ValueError("wet paint"), "a test")
    assert group_of(comm) is first
    with pytest.raises(PeerError, match="start the job anew"):
        first.agree("a call")
