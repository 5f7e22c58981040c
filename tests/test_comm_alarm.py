"""Waiting: a note of failure ends it and is passed on, a limit ends it, and the text says what was waited for."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from mpipipe.comm import alarm as alarms
from mpipipe.comm import inprocess
from mpipipe.comm.alarm import Alarm, wait
from mpipipe.comm.mailbox import Envelope
from mpipipe.errors import PeerError, StallError

NEVER = Envelope(peer=1, edge=2, microbatch=3, direction=0, header=(0, 8), data=(0, 9))


def test_a_note_ends_the_waiting_of_all_and_crosses_from_one_communicator_to_another():
    """Rank 0 fails; rank 1 shares a communicator with it, rank 2 only with rank 1."""

    def job(comm):
        pair = comm.Split(0 if comm.rank < 2 else 1, comm.rank)
        other = comm.Split(0 if comm.rank > 0 else 1, comm.rank)
        alarm = Alarm([pair, other])
        if comm.rank == 0:
            alarm.sound("rank 0 failed: wet paint")
            return "told"
        with pytest.raises(PeerError, match="wet paint") as caught:
            wait(comm.Irecv(np.zeros(1), 0, 5))
        assert caught.value.echo
        alarm.silence()
        return "heard"

    with pytest.raises(inprocess.InProcessError, match="never received|nothing came"):  # what the failure left behind
        assert inprocess.run(3, job) == ["told", "heard", "heard"]


def test_a_peer_that_left_is_missed_only_in_later_calls():
    def job(comm):
        alarm = Alarm([comm])
        alarm.call = 3
        if comm.rank == 0:
            alarm.leave("rank 0 left after call 3")
            comm.Barrier()
            return
        comm.Barrier()
        alarm.listen()
        alarm.call = 4
        with pytest.raises(PeerError, match="left after call 3"):
            alarm.listen()

    with pytest.raises(inprocess.InProcessError, match="never received"):  # the note that rank 1 passes on
        inprocess.run(2, job)


def test_a_limit_names_the_message(comm, monkeypatch):
    monkeypatch.setenv("MPIPIPE_TIMEOUT", "1")
    box = np.zeros(1)
    request = comm.Irecv(box, comm.rank, 7)
    text = "the activation of micro-batch 3 over edge 2 from rank 1 .channel 0, tag 9."
    with pytest.raises(StallError, match=text):
        wait(request, NEVER)
    comm.Send(np.ones(1), comm.rank, 7)
    request.Wait()


def test_a_long_wait_is_warned_of_once(comm, monkeypatch, caplog):
    monkeypatch.setattr(alarms, "WARNING_SECONDS", 0)

    class Slow:
        polls = 0

        def Test(self):
            self.polls += 1
            return self.polls > 100_000

    with caplog.at_level(logging.WARNING, logger="mpipipe"):
        alarms._open()
        monkeypatch.setattr(alarms._local, "patience", 0.0)
        Slow.polls = 99_900 - alarms.SPIN_POLLS
        wait(Slow(), "a friend")
    assert [record.message.endswith("for a friend") for record in caplog.records] == [True]


def test_a_wait_drives_what_asked_for_it_until_it_rests():
    class Engine:
        calls = 0

        def progress(self):
            self.calls += 1
            if self.calls == 3:
                alarms.rest(self)

        def Test(self):
            return self.calls == 3

    engine, other = Engine(), Engine()
    alarms.drive(engine)
    alarms.drive(engine)
    alarms.drive(other)
    wait(engine)
    assert (engine.calls, other.calls) == (3, 3)
    alarms.rest(other)
    other.calls = 3
    wait(other)
    assert (engine.calls, other.calls) == (3, 3)
