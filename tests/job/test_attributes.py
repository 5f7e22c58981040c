"""What belongs to a communicator: made once, closed with it, the last one first; the same without MPI."""

from __future__ import annotations

import logging

import pytest
from mpi4py import MPI

from mpipipe.errors import PeerError
from mpipipe.job import inprocess
from mpipipe.job.communicators import attributes, cached


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


def test_made_once_and_closed_in_reverse(comm):
    assert made_once_and_closed_in_reverse(comm) == ["second", "first"]


def test_ranks_in_one_process_keep_attributes_alike():
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


def test_handles_of_one_communicator_share_its_attributes(comm):
    own = comm.Dup()
    attributes(own)["x"] = Item("x", [])
    assert attributes(MPI.Comm.fromint(own.toint()))["x"].name == "x"
    own.Free()


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


def test_an_attribute_that_was_never_set_is_none():
    def job(comm):
        keyval = comm.Create_keyval(delete_fn=lambda *_: pytest.fail("nothing was set"))
        assert comm.Get_attr(keyval) is None
        comm.Dup().Free()

    inprocess.run(2, job)
