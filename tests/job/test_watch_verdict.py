"""What dumps mean together, and the watchdog of ranks that are threads."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from mpipipe import Pipeline, nn, schedules
from mpipipe.errors import HangError
from mpipipe.job import inprocess, watching
from mpipipe.job.group import RankGroup
from mpipipe.job.types import Snapshot
from mpipipe.job.watch.dump import BUSY, Dump, RankPlace, Waits
from mpipipe.job.watch.verdict import judge, mismatch, report_lines

CALL = ((0, 1), 7)


def place_of(pid, host=None):
    return RankPlace(host or socket.gethostname(), pid, True)


def state_of(pid):
    return place_of(pid).state


def dump(rank, *waits, snapshots=(), ended=False, reached=()):
    return Dump(rank, "node", 5.0, waits, tuple(snapshots), ended, "job.py:3 in f", dict(reached))


def for_rank(peer, text="a message"):
    return Waits(text, 5.0, (peer,), None)


def for_all(ranks, meeting=CALL, text="step (call 7)"):
    return Waits(text, 5.0, tuple(range(ranks)), meeting)


def verdict(*dumps, silent=None):
    return judge({each.rank: each for each in dumps}, silent, 6.0)


def test_who_has_not_come_to_a_call_is_to_blame_though_others_wait_for_each_other():
    found = verdict(dump(0, for_all(4)), dump(1, for_all(4)), dump(2), dump(3, for_all(4)))
    assert found == ["rank 2 on node has been busy elsewhere for 5 s, at job.py:3 in f"]


def test_blame_follows_those_who_wait_to_the_one_who_does_not():
    snapshot = Snapshot("forward of stage 2, micro-batch 1, in step", computes=True)
    found = verdict(
        dump(0, for_rank(1)), dump(1, for_rank(2)), dump(2, snapshots=[snapshot]), dump(3), dump(4, ended=True)
    )
    assert found == [
        "rank 2 on node has been computing for 5 s: forward of stage 2, micro-batch 1, in step, at job.py:3 in f"
    ]


def test_ranks_that_wait_for_each_other_are_named_as_a_circle():
    found = verdict(dump(0, for_rank(1)), dump(1, for_rank(2, "x")), dump(2, for_rank(1, "y")))
    assert found == [
        "rank 1 on node waits for rank 2, which waits too: x",
        "rank 2 on node waits for rank 1, which waits too: y",
    ]


def test_a_rank_that_waits_for_no_other_is_to_blame_also_where_nobody_waits_for_it():
    disk = Waits("the disk", 7.0, (), None)
    text = "has waited 7 s for the disk, and for no other rank"
    found = verdict(dump(0, for_all(2)), dump(1, disk))
    assert found == [f"rank 1 on node {text}"]
    found = verdict(dump(0, disk), dump(1, disk))
    assert found == [f"rank {rank} on node {text}" for rank in (0, 1)]


def test_ranks_that_wait_for_each_other_in_different_calls_are_found_at_once():
    """A rank that several threads serve, that computes, or that has been to the call, is in no circle."""
    texts = ["one", "two", "three"]
    calls = [((name,), 1) for name in range(3)]
    waits = [for_all(3, call, text) for call, text in zip(calls, texts)]
    dumps = {rank: dump(rank, waits[rank], reached={(rank,): 1}) for rank in range(3)}
    error = mismatch(dumps)
    assert (error.rank, error.found, error.expected) == (0, "one", "two, in which rank 1 waits")
    pair = {rank: dumps[rank] for rank in (0, 1)}
    assert mismatch(pair) is not None
    assert mismatch(pair | {1: dumps[1]._replace(reached=None)}) is None
    assert mismatch(pair | {1: dumps[1]._replace(waits=())}) is None
    assert mismatch(pair | {1: dumps[1]._replace(reached={(0,): 1, (1,): 1})}) is None
    assert mismatch(pair | {1: dump(1, for_rank(0), reached={})}) is None  # its message may be on its way


def test_a_rank_that_waits_for_one_and_in_a_call_for_all_waits_for_both():
    """Whoever has come to the call may still owe a message, in whatever order the waits are told."""
    waits = [for_all(3), for_rank(1, "a message")]
    for order in (waits, waits[::-1]):
        found = verdict(dump(0, *order), dump(1, for_all(3)), dump(2, for_all(3)))
        assert len(found) == 1 and "rank 0 on node waits for rank 1, which waits too" in found[0]


def test_a_rank_that_is_seen_before_its_own_call_is_no_circle():
    assert mismatch({0: dump(0, for_all(2), reached={}), 1: dump(1, reached={(0, 1): 7})}) is None


def test_of_a_silent_rank_on_another_host_nothing_is_known():
    (found,) = verdict(dump(0, for_rank(2)), silent={2: place_of(os.getpid(), "node")})
    assert re.fullmatch(
        r"rank 2 on node \(process \d+\) is silent: it has not answered for 6 s; nothing is known of its process: .*",
        found,
    )


def test_ranks_that_wait_for_the_same_are_one_line():
    found = report_lines({2: dump(2), **{rank: dump(rank, for_all(4)) for rank in (3, 1, 0)}})
    assert found[1:] == ["ranks 0-1, 3 wait for step (call 7)"]


def test_a_report_of_many_ranks_is_short():
    waiting = {rank: dump(rank, for_rank(rank + 100, str(rank))) for rank in range(100)}
    lines = report_lines(waiting | {rank: dump(rank) for rank in range(100, 200)})
    assert len(lines) == 18 and lines[8] == "and 92 ranks more" and lines[-1] == "and 92 waits more"


def test_a_process_that_has_ended_is_told_from_one_that_runs():
    assert state_of(2**22 + 1) == "its process has ended"
    assert state_of(1) != "its process has ended"


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_process_that_is_stopped_is_told_from_one_that_has_died():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])

    def comes_to(text):
        stop = time.monotonic() + 20
        while text not in state_of(child.pid) and time.monotonic() < stop:
            time.sleep(0.01)
        return text in state_of(child.pid)

    try:
        child.send_signal(signal.SIGSTOP)
        assert comes_to("it is stopped by a signal (SIGSTOP)")
        child.send_signal(signal.SIGCONT)
        assert comes_to("it sleeps in a call")
        child.kill()
        assert comes_to("its process has ended")  # a zombie, whose parent has not looked
    finally:
        child.kill()
        child.wait()
    assert state_of(child.pid) == "its process has ended"


def test_the_name_of_a_process_may_be_any_bytes():
    name = Path("/proc/self/comm")
    before = name.read_bytes()
    try:
        name.write_bytes("обучение.py".encode())  # 15 bytes of it are kept
        assert state_of(os.getpid()) in BUSY
    finally:
        name.write_bytes(before)


@pytest.mark.parametrize(
    ("stat", "text"),
    [
        ("77 (a (name) D) D 1 77", "it waits for a disk or a file system"),
        ("77 (python) R 1 77", "it runs, but a call keeps its interpreter busy"),
        ("77 (python) S 1 77", "it sleeps in a call that keeps its interpreter busy"),
    ],
)
def test_a_process_that_runs_sleeps_or_waits_for_a_disk_is_named_as_that(monkeypatch, stat, text):
    monkeypatch.setattr(Path, "read_text", lambda path, **_: stat if path == Path("/proc/77/stat") else 1 / 0)
    assert state_of(77) == text
    (found,) = verdict(dump(0, for_rank(2)), silent={2: place_of(77)})
    assert found.endswith(f"it has not answered for 6 s; {text}") and "ended" not in found


@pytest.mark.parametrize(("skips", "unit"), [(0, 2), (1, 0)])
def test_a_rank_that_skips_a_send_is_named_with_what_it_did_not_send(monkeypatch, skips, unit):
    """Also where all ranks wait for each other then, and where a communicator numbers them in another way."""
    monkeypatch.setenv("MPIPIPE_WATCHDOG", "1")

    def job(comm):
        turned = comm.Split(0, -comm.rank)
        stage = nn.Stage([nn.Linear(4, 4)], first=turned.rank)
        x = np.ones((4, 4), np.float32)
        with Pipeline([stage], schedules.one_f_one_b(2, 4), turned, nn.mean_squared_error) as pipeline:
            mailbox = pipeline.executor.messages.mailbox
            put = mailbox.put
            mailbox.put = lambda message, data: (turned.rank, message.unit) == (skips, unit) or put(message, data)
            pipeline.step(x if turned.rank == 0 else None, x if turned.rank == 1 else None)

    with pytest.raises(HangError) as caught:
        inprocess.run(2, job)
    action, what = [("forward", "activation"), ("backward", "gradient")][skips]
    assert re.search(
        rf"found: rank {1 - skips} on \S+ diverged: it is past {action} of stage {skips}, micro-batch {unit}, but rank "
        rf"{skips} still waits for what this makes, the {what} of micro-batch {unit} over edge 1 from rank {skips} \(",
        str(caught.value),
    ), caught.value
    assert str(caught.value).count("diverged") == 1


@pytest.mark.parametrize(("environment", "limit"), [("600", 1.0), ("1", 0.0)])
def test_the_limit_of_a_job_goes_before_that_of_the_environment(monkeypatch, environment, limit):
    """As in a task of `mpipipe train` with threads: a limit of 0 stands for no watchdog."""
    monkeypatch.setenv("MPIPIPE_WATCHDOG", environment)
    wake = threading.Event()

    def job(comm):
        group = RankGroup(comm)
        with watching(limit):
            if comm.rank == 1:
                wake.wait(1.5 if limit == 0 else 60)
            group.agree("a test")
        group.close()

    if limit == 0:
        inprocess.run(2, job)
        return
    try:
        with pytest.raises(HangError, match="no rank has made progress for") as caught:
            inprocess.run(2, job)
    finally:
        wake.set()
    text = str(caught.value)  # which names the own line of the thread
    assert "rank 1 on" in text and "test_watch_verdict.py" in text and "in job" in text and "inprocess.py" not in text


def test_threads_that_wait_for_longer_than_the_limit_while_one_goes_on_are_left_alone(monkeypatch):
    monkeypatch.setenv("MPIPIPE_WATCHDOG", "1")

    def job(comm):
        group, alone = RankGroup(comm), RankGroup(comm.Split(comm.rank, 0))
        if comm.rank == 0:
            for _ in range(8):
                time.sleep(0.2)
                alone.agree("a call of its own")
        group.agree("a test")
        alone.close()
        group.close()

    inprocess.run(2, job)
