"""Communicators: duplicates, parts, world ranks, places on a host; what stands behind one, and what belongs to one."""

import logging

import numpy as np
import pytest
from mpi4py import MPI

from mpipipe.errors import ArgumentError, PeerError
from mpipipe.job import RankGroup, communicators, inprocess, runtime
from mpipipe.job.communicators import attributes, cached
from mpipipe.job.context import current_rank
from mpipipe.job.requests import own


def test_a_duplicate_has_the_same_ranks_and_other_messages(comm):
    new = communicators.duplicate(comm)
    assert (new.rank, new.size) == (comm.rank, comm.size)
    request = comm.Isend(np.ones(1), comm.rank, 5)
    assert not new.Iprobe(comm.rank, 5)
    comm.Recv(np.empty(1), comm.rank, 5)
    request.Wait()
    new.Free()


def test_a_rank_that_has_come_and_failed_since_does_not_end_the_making_of_a_communicator(pair, monkeypatch):
    """Rank 1 is still in the last exchange of the making when the failure of rank 0 reaches it."""
    group, failures = RankGroup(pair), current_rank().failures
    known, requests = len(failures), []

    class Late:
        def __init__(self, request):
            self.request = request
            requests.append(self)

        def Test(self):
            return self.request.Test() and (len(requests) < 2 or len(failures) > known)

    if pair.rank == 1:
        monkeypatch.setattr(communicators, "own", lambda request: Late(own(request)))
    new = communicators.duplicate(pair)
    if pair.rank == 0:
        group.fail(KeyError("later"), "rank 0 failed later")
    else:
        with pytest.raises(PeerError, match="failed later"):
            group.agree("a test")
    communicators.duplicate(pair).Free()  # ranks that go on can make more of them
    new.Free()


def test_world_ranks_of_parts(comm):
    assert communicators.world_ranks(comm) == tuple(range(comm.size))
    part = comm.Split(comm.rank % 2, -comm.rank)
    mine = [rank for rank in range(comm.size) if rank % 2 == comm.rank % 2]
    assert communicators.world_ranks(part) == tuple(reversed(mine))
    part.Free()


def test_place_on_the_host(comm):
    """All ranks of these tests are on one host."""
    assert communicators.rank_on_host(comm) == comm.rank
    assert inprocess.run(3, communicators.rank_on_host) == [0, 1, 2]


def test_the_largest_tag(comm):
    everything, part = runtime.tag_upper_bound(comm), comm.Split(0, comm.rank)
    assert everything >= 32767 and runtime.tag_upper_bound(part) == everything
    part.Free()
    assert inprocess.run(
        1, lambda one: (runtime.tag_upper_bound(one), runtime.tag_upper_bound(one.Dup())), tag_ub=99
    ) == [(99, 99)]


def test_what_is_no_communicator_is_refused(comm):
    assert runtime.resolve(comm) is comm
    assert runtime.resolve() == MPI.COMM_WORLD
    for wrong in ("world", 0, MPI.COMM_NULL, comm.Split(MPI.UNDEFINED)):
        with pytest.raises(ArgumentError, match="COMM_NULL, or what is no intracommunicator"):
            runtime.resolve(wrong)


# -- what belongs to a communicator ------------------------------------------------------------------------------------


class Item:
    def __init__(self, name, log):
        self.name, self.log = name, log

    def close(self):
        self.log.append(self.name)
        if self.name == "broken":
            raise PeerError("wet paint")


def made_once_and_closed_in_reverse(comm):
    log = []
    own = comm.Dup()
    first = cached(own, "first", lambda: Item("first", log))
    assert cached(own, "first", lambda: Item("another", log)) is first
    cached(own, ("second", 2), lambda: Item("second", log))
    assert list(attributes(own)) == ["first", ("second", 2)]
    other = comm.Dup()
    assert attributes(other) == {}, "each communicator has its own"
    other.Free()
    assert log == []
    own.Free()
    return log


def test_what_belongs_to_a_communicator_is_made_once_and_closed_in_reverse(comm):
    assert made_once_and_closed_in_reverse(comm) == ["second", "first"]
    assert inprocess.run(3, made_once_and_closed_in_reverse) == [["second", "first"]] * 3


def test_what_cannot_be_closed_is_logged_and_the_others_are_closed(comm, caplog):
    log = []
    own = comm.Dup()
    for name in ("first", "broken", "last"):
        attributes(own)[name] = Item(name, log)
    with caplog.at_level(logging.WARNING, logger="mpipipe"):
        own.Free()
    assert log == ["last", "broken", "first"]
    assert ["could not be freed" in record.message for record in caplog.records] == [True]


JOB = """
from mpipipe.job import runtime
from mpipipe.job.communicators import attributes

class Item:
    def close(self):
        print("closed", flush=True)

attributes(runtime.world())["x"] = Item()
print("done", flush=True)
runtime.mpi().Finalize()
"""


def test_nothing_is_closed_by_the_end_of_mpi(launch):
    job = launch(1, JOB)
    assert (job.returncode, job.stdout) == (0, "done\n"), job.stderr
