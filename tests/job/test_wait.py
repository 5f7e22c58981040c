"""Waiting: a note of failure ends it, a limit ends it, and the text says what was waited for and who is missing."""

import logging
import math
import threading
import time
from contextlib import suppress

import numpy as np
import pytest

from mpipipe.comm.mailbox import Envelope
from mpipipe.errors import ArgumentError, MismatchError, PeerError, StallError
from mpipipe.job import context, inprocess
from mpipipe.job import wait as waiting
from mpipipe.job.group import RankGroup
from mpipipe.job.wait import wait_for
from mpipipe.job.watch import verdict

NEVER = Envelope(peer=1, edge=2, unit=3, direction=0, header=(0, 8), data=(0, 9))


class Request:
    """A request that is complete after so many looks, or never."""

    def __init__(self, looks=math.inf):
        self.left = looks

    def Test(self):
        self.left -= 1
        return self.left <= 0


def test_a_note_ends_the_waiting_of_all_and_crosses_from_one_group_to_another():
    """Rank 0 fails; rank 1 shares a group with it, rank 2 only with rank 1."""

    def job(comm):
        pair = RankGroup(comm.Split(0 if comm.rank < 2 else 1, comm.rank))
        other = RankGroup(comm.Split(0 if comm.rank > 0 else 1, comm.rank))
        if comm.rank == 0:
            comm.Barrier()  # a note that comes while a communicator is made does not end that
            pair.fail(ValueError("wet paint"), "rank 0 failed: wet paint")
            return "told"
        with pytest.raises(PeerError, match="wet paint") as caught:
            with other.failing("a test"):
                comm.Barrier()
                wait_for(Request())
        assert caught.value.reported_elsewhere
        assert other not in context.current_rank().groups
        return "heard"

    assert inprocess.run(3, job) == ["told", "heard", "heard"]


def test_a_peer_that_left_is_missed_only_in_later_calls():
    def job(comm):
        group = RankGroup(comm)
        for _ in range(3):
            group.begin()
        if comm.rank == 0:
            group.leave()
            comm.Barrier()
            return
        comm.Barrier()
        group.read_messages()
        group.begin()
        with pytest.raises(PeerError, match="left the job after collective call 3"):
            wait_for(Request(), group=group)

    inprocess.run(2, job)


def test_a_rank_that_goes_on_after_its_own_failure_makes_no_communicator_with_peers_that_hear_of_it_there():
    """The cause comes after the others have raised what it told them. It raises that too, as each later try does."""
    seen = {}

    def job(comm):
        known, part = RankGroup(comm), comm.Dup()
        if comm.rank == 1:
            known.fail(ValueError("wet paint"), "wet paint")
            while len(seen) < 3:
                time.sleep(1e-3)
        for _ in range(2):
            with pytest.raises(PeerError) as caught:
                RankGroup(part)
            seen.setdefault(comm.rank, []).append(str(caught.value))

    with suppress(inprocess.InProcessError):  # notes that no rank has read
        inprocess.run(4, job)
    assert sorted(seen) == list(range(4))
    assert all("wet paint" in text for texts in seen.values() for text in texts), seen


def test_a_limit_names_the_message(comm, monkeypatch):
    monkeypatch.setenv("MPIPIPE_TIMEOUT", "0.5")
    box = np.zeros(1)
    request = comm.Irecv(box, comm.rank, 7)
    text = "the activation of micro-batch 3 over edge 2 from rank 1 .channel 0, tag 9."
    with pytest.raises(StallError, match=text):
        wait_for(request, NEVER)
    comm.Send(np.ones(1), comm.rank, 7)
    request.Wait()


def test_at_the_limit_rank_0_says_who_is_missing_and_the_others_hear_it(three, monkeypatch):
    monkeypatch.setenv("MPIPIPE_TIMEOUT", "1.5")
    group = RankGroup(three)
    if three.rank == 1:
        three.Barrier()  # never comes to the agreement
        return
    kind = StallError if three.rank == 0 else PeerError
    with pytest.raises(kind, match=r"waiting for a test \(call 1\); rank 1 on ") as caught:
        group.agree("a test")
    assert caught.value.reported_elsewhere is (three.rank != 0)
    three.Barrier()


def test_at_the_limit_the_others_say_that_rank_0_is_missing(pair, monkeypatch):
    monkeypatch.setenv("MPIPIPE_TIMEOUT", "1.5")
    group = RankGroup(pair)
    if pair.rank == 1:
        with pytest.raises(StallError, match=r"waiting for a test \(call 1\); rank 0 on "):
            group.agree("a test")
    pair.Barrier()


def test_ranks_that_wait_for_each_other_in_different_groups_are_told(three, monkeypatch):
    monkeypatch.setattr(verdict, "TELL_SECONDS", 0.2)
    one, two = RankGroup(three), RankGroup(three)
    mine = two if three.rank == 2 else one
    with pytest.raises((MismatchError, PeerError)) as caught:
        mine.agree("a call of one" if mine is one else "a call of two")
    kinds = three.allgather((type(caught.value).__name__, str(caught.value)))
    assert [kind for kind, _ in kinds].count("MismatchError") == 1
    assert all("a call of one" in text and "a call of two" in text for _, text in kinds), kinds


@pytest.mark.parametrize("elsewhere", ["a call of a group", "a communicator of other ranks"])
def test_the_first_call_on_a_new_communicator_is_compared(elsewhere, monkeypatch):
    """Before a communicator has a group, its ranks learn of each other by the groups that they share."""
    monkeypatch.setattr(verdict, "TELL_SECONDS", 0.2)
    monkeypatch.setenv("MPIPIPE_TIMEOUT", "20")

    def job(comm):
        shared, new = RankGroup(comm), comm.Dup()
        pair = comm.Split(int(comm.rank > 1), comm.rank)
        if comm.rank != 1:
            RankGroup(new)
        elif elsewhere == "a call of a group":
            shared.agree(elsewhere)
        else:
            RankGroup(pair)

    # The other rank of the pair waits for the new one: no call ends by itself.
    with pytest.raises(MismatchError, match="ranks wait for each other in different calls") as caught:
        inprocess.run(2 if elsewhere != "a communicator of other ranks" else 3, job)
    texts = caught.value.found, caught.value.expected
    assert any("ranks of a communicator to make one like it" in text for text in texts), texts


def test_a_rank_that_comes_late_to_new_communicators_ends_nothing(monkeypatch):
    """What was said of the making of one is no more true once it is made."""
    monkeypatch.setattr(verdict, "TELL_SECONDS", 0.05)

    def job(comm):
        shared = RankGroup(comm)
        for turn in range(4):
            own = comm.Dup()
            if comm.rank == turn % 2:
                time.sleep(0.2)
            new = RankGroup(own)
            if comm.rank != turn % 2:
                time.sleep(0.2)
            shared.agree("a call of a group")
            new.close()
        shared.close()
        return "done"

    assert inprocess.run(2, job) == ["done", "done"]


def test_groups_used_by_two_threads_of_a_rank_in_different_orders_are_no_circle(pair, monkeypatch):
    """What looks like a circle for a while is none where a second thread will come."""
    monkeypatch.setattr(verdict, "TELL_SECONDS", 0.05)
    groups = [RankGroup(pair), RankGroup(pair)]
    found = []

    def use(group, pause):
        time.sleep(pause)
        for _ in range(3):
            found.append(group.agree("a test", values=[pair.rank])[:, 0].tolist())

    pauses = [0, 0.5] if pair.rank == 0 else [0.5, 0]
    threads = [threading.Thread(target=use, args=pair) for pair in zip(groups, pauses)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[0, 1]] * 6
    for group in groups:
        group.close()


def test_a_failure_in_one_thread_leaves_the_calls_of_another_alone(pair):
    bad, good = RankGroup(pair), RankGroup(pair)
    found = []

    def work():
        if pair.rank == 0:
            time.sleep(0.5)
        found.append(good.agree("a test", values=[pair.rank])[:, 0].tolist())

    thread = threading.Thread(target=work)
    thread.start()
    if pair.rank == 0:
        bad.fail(ValueError("wet paint"), "rank 0 failed: wet paint")
    else:
        with pytest.raises(PeerError, match="wet paint"):
            bad.agree("a test")
    thread.join()
    assert found == [[0, 1]]
    good.close()


def test_a_group_whose_communicator_was_freed_takes_no_call(comm):
    group = RankGroup(comm)
    group.close()
    group.close()
    with pytest.raises(ArgumentError, match="the communicator is gone"):
        group.agree("a test")


def test_a_long_wait_is_warned_of_once(comm, monkeypatch, caplog):
    monkeypatch.setattr(waiting, "WARNING_SECONDS", 0)
    monkeypatch.setattr(context.current_rank(), "patience", 0.0)
    with caplog.at_level(logging.WARNING, logger="mpipipe"):
        wait_for(Request(waiting.SPIN_POLLS + 100), "a friend")
    assert [record.message.endswith("for a friend") for record in caplog.records] == [True]


def test_a_wait_drives_what_its_own_thread_uses_and_nothing_else():
    class Engine:
        calls = 0

        def progress(self):
            self.calls += 1

    engine = Engine()
    context.register_progress(engine)

    def wait(thread):
        with context.in_place_of(thread):
            wait_for(Request(11))

    for caller, calls in ((None, 0), (threading.get_ident(), 11)):  # in its own place, and in that of this thread
        engine.calls = 0
        thread = threading.Thread(target=wait, args=(caller,))
        thread.start()
        thread.join()
        assert engine.calls == calls
    engine.calls = 0
    wait_for(Request(11))
    context.unregister_progress(engine)
    assert engine.calls == 11
