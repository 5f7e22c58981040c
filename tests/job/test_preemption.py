"""Preemption: signals are noticed at once, the clock of rank 0 counts, and all ranks find out at the same step."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from mpi4py import MPI

from mpipipe import Preemption
from mpipipe.errors import ArgumentError
from mpipipe.job import inprocess, preemption, stop_signals
from mpipipe.job.preemption import TimeLimit, parse_duration
from mpipipe.job.stop_signals import parse_signals

OPEN_MPI = MPI.get_vendor()[0] == "Open MPI"


# -- what is asked for ------------------------------------------------------------------------------------------------


def test_signals_are_named_with_and_without_sig_and_each_counts_once():
    assert parse_signals("USR2,TERM") == (signal.SIGUSR2, signal.SIGTERM)
    assert parse_signals(" sigusr1 , USR1,xcpu") == (signal.SIGUSR1, signal.SIGXCPU)
    assert parse_signals("none") == parse_signals("") == ()


KEPT, OTHER = r"a signal that cannot be caught\n.*(KILL|STOP)", "no signal that can ask to leave"


@pytest.mark.parametrize(
    ("names", "why"), [(("KILL", "SIGSTOP", "USR2,KILL"), KEPT), (("SEGV", "12", "USR2;TERM", "CHLD", "CONT"), OTHER)]
)
def test_a_signal_that_cannot_be_caught_or_means_something_else_is_refused(names, why):
    for name in names:
        with pytest.raises(ArgumentError, match=why):
            parse_signals(name)


@pytest.mark.parametrize(("text", "seconds"), [(90, 90), ("1.5", 1.5), ("10:30", 630), ("2-03:04:05", 183845)])
def test_a_length_of_time_is_written_as_slurm_writes_it(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "-1", "nan", "1h", "1:2:3:4", "2-03:04", "::"])
def test_what_is_no_length_of_time_is_refused(text):
    with pytest.raises(ArgumentError, match="no length of time"):
        parse_duration(text)


# -- the clock --------------------------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands until it is moved: clock[0] seconds."""
    now = [1000.0]
    monkeypatch.setattr(preemption, "time", SimpleNamespace(monotonic=lambda: now[0], time=time.time))
    monkeypatch.setattr(preemption, "_age", lambda: 0.0)
    return now


def test_a_job_leaves_while_one_step_more_and_a_save_still_fit(clock):
    limit, ends = TimeLimit(100.0, margin=2.0), []
    for seconds in (50, 10, 8):  # the first step is long, and does not count
        clock[0] += seconds
        ends.append(limit.is_over())
        if seconds == 10:
            with limit.saving():  # nor is a save part of a step
                clock[0] += 7
    assert ends == [False, False, False] and (limit.longest_step, limit.save, limit.margin) == (10, 7, 2)
    clock[0] += 6.1  # 81.1 of 100
    assert limit.is_over()


def test_a_save_under_way_beside_the_steps_needs_time_of_its_own_before_the_last_one(clock):
    limit = TimeLimit(100.0, margin=2.0)
    limit.save = 20.0
    clock[0] += 60  # 20 + 2 of the 40 that are left
    assert not limit.is_over() and limit.is_over(saving=True)


def test_slurms_end_of_the_job_counts_where_no_limit_is_given(clock, monkeypatch):
    monkeypatch.delenv(preemption.END_TIME, raising=False)
    for limit in (TimeLimit(None), TimeLimit(0.0)):
        clock[0] += 1e9
        assert not limit.is_over()
    monkeypatch.setenv(preemption.END_TIME, str(int(time.time()) + 500))
    limit = TimeLimit(None)
    assert 498 < limit.end - clock[0] <= 500 and 9 < limit.margin <= 10
    assert TimeLimit(0.0).end is None and TimeLimit(60.0).end == clock[0] + 60
    monkeypatch.setenv(preemption.END_TIME, "UNLIMITED")
    assert TimeLimit(None).end is None


def test_a_limit_counts_from_the_start_of_the_process():
    before = time.monotonic()
    assert TimeLimit(3600.0).end < before + 3600 - 0.01  # this process has started, and imported numpy and MPI


# -- ranks ------------------------------------------------------------------------------------------------------------


def test_rank_0_decides_that_time_is_over_for_all():
    def loop(comm):
        with Preemption(comm, time_limit=1e9 if comm.rank == 0 else 0.001) as preemption:
            early = preemption.due()
        with Preemption(comm, time_limit=0.001 if comm.rank == 0 else 1e9) as preemption:
            return early, preemption.due(), preemption.due(), preemption.reason

    assert inprocess.run(3, loop) == [(False, True, True, "the time limit, 0 s ahead")] * 3


def test_wrong_arguments_are_refused_on_all_ranks():
    for keys in ({"signals": "KILL"}, {"time_limit": "soon"}, {"grace": -1.0}, {"margin": float("nan")}):
        with pytest.raises(ArgumentError):
            inprocess.run(2, lambda comm, keys=keys: Preemption(comm, **(keys if comm.rank else {})))


def test_handlers_are_given_back_where_no_signal_has_come(comm):
    watched = (signal.SIGUSR2, signal.SIGTERM)
    before = [signal.getsignal(number) for number in watched]
    with Preemption(comm) as outer:
        caught = [signal.getsignal(number) for number in watched]
        with Preemption(comm, signals="USR2") as inner:
            assert not inner.due()
        assert not outer.due()
        assert [signal.getsignal(number) for number in watched] == caught
        assert all(one != other for one, other in zip(before, caught))
        pid = os.fork()
        if pid == 0:  # no rank: it dies of the signal
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
            os._exit(0)
        assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGTERM
        assert not outer.due()  # nor has this process heard of it
    assert [signal.getsignal(number) for number in watched] == before
    assert signal.set_wakeup_fd(-1) == -1


# -- jobs -------------------------------------------------------------------------------------------------------------

LOOP = """
import os, signal, sys, threading, time
import numpy as np
from mpi4py import MPI
from mpipipe import Preemption
from mpipipe.job import runtime
comm = runtime.world()
rank, last = comm.rank, comm.size - 1

def later(seconds, *numbers):
    def send():
        for number in numbers:
            time.sleep(seconds)
            os.kill(os.getpid(), number)
    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    return sender

def stuck():
    print("stuck", flush=True)
    comm.Recv(np.empty(1), source=rank, tag=9)  # inside MPI, for ever
"""


def test_a_signal_to_one_rank_lets_all_leave_at_the_same_step(launch):
    script = """
with Preemption(comm) as preemption:
    for step in range(1, 10**6):
        time.sleep(0.01)
        if step == 5 and rank == last: os.kill(os.getpid(), signal.SIGUSR2)
        if preemption.due():
            print(f"rank {rank} step {step}", flush=True)
            preemption.leave(f"after step {step}")
"""
    job = launch(2, LOOP + script)
    assert job.returncode == 75, job.stderr
    assert sorted(line for line in job.stdout.splitlines() if line) == ["rank 0 step 5", "rank 1 step 5"]
    assert job.stderr.count("mpipipe:") == 1 and "mpipipe: SIGUSR2 on rank 1: left after step 5\n" in job.stderr


def test_a_signal_is_noticed_while_a_rank_sits_in_mpi(launch):
    script = """
from mpipipe.job import stop_signals
seen = []
with Preemption(comm, say=lambda text: seen.append((time.monotonic(), text))) as preemption:
    if rank == 0:
        later(0.3, signal.SIGTERM)
        comm.Recv(np.empty(1), source=last)  # Python's own handler runs behind it
        back = time.monotonic()
        print("told", back - seen[0][0] > 0.5, seen[0][1].splitlines()[0])
    else:
        time.sleep(1.5)
        comm.Send(np.empty(1), dest=0)
    print(f"rank {rank} due {preemption.due()}")
    sys.stdout.flush()
    preemption._leaving = True
"""
    job = launch(2, LOOP + script)
    assert job.returncode == 0, job.stderr
    assert "told True mpipipe: SIGTERM has come\n" in job.stdout
    assert "rank 0 due True" in job.stdout and "rank 1 due True" in job.stdout


@pytest.mark.long
@pytest.mark.parametrize(
    ("body", "code", "says"),
    [
        ("later(2.2, signal.SIGTERM, signal.SIGTERM)", 143, "SIGTERM: a second signal ends the job at once"),
        ("later(0.1, signal.SIGUSR2)", 140, "SIGUSR2: the job had 1 s to leave, which are over"),
    ],
    ids=["second", "grace"],
)
def test_a_job_that_cannot_leave_is_ended_at_once(launch, body, code, says):
    grace = 1 if "which are over" in says else 600
    start = time.monotonic()
    script = f"preemption = Preemption(comm, grace={grace})\nif rank == 0: {body}\nstuck()"
    job = launch(2, LOOP + script)
    assert job.returncode == code or (OPEN_MPI and job.returncode != 0), job.stderr
    assert says in job.stderr and job.stderr.count("mpipipe: job ended by") == 1
    assert time.monotonic() - start < 20


def test_a_signal_twice_at_once_is_one_request_which_counts_for_what_catches_signals_later(launch):
    """A launcher hands on what the ranks of its process group have got themselves. A training goes on with fewer."""
    script = """
with Preemption(comm) as first:
    later(0.2, signal.SIGTERM, signal.SIGTERM).join()
    comm.Barrier()  # both have got theirs
    while not first.due(): time.sleep(0.01)
with Preemption(comm, signals="USR2") as other:
    assert not other.due()  # it does not catch that one
with Preemption(comm) as second:
    assert second.due()
    second.leave("in order")
"""
    job = launch(2, LOOP + script)
    assert job.returncode == 75 and "SIGTERM on all 2 ranks: left in order" in job.stderr, job.stderr


@pytest.mark.long
def test_a_rank_whose_neighbour_has_died_does_not_wait_for_the_end_of_grace(launch):
    """As under srun, which tells the others of it by SIGTERM."""
    script = """
import os, signal, socket, subprocess, time
from mpipipe.job.context import RankContext
from mpipipe.job.stop_signals import StopSignals
from mpipipe.job.watch.dump import RankPlace
from mpipipe.job.watch.watchdog import WatchChannel, Watchdog
child = subprocess.Popen(["sleep", "60"])
here = socket.gethostname()
hosts = (here, os.getpid()), (here, child.pid), ("there", 2**22 + 1)
watchdog = Watchdog(RankContext())
places = {4 + index: RankPlace(host, pid, True) for index, (host, pid) in enumerate(hosts)}
watchdog.channels.append(WatchChannel(None, places))
ends = []
class Stops(StopSignals):
    def _tell(self, name): print(name)
    def _hopeless(self): return watchdog.neighbour_has_ended
    def _end(self, *end): ends.append(end)
Stops([signal.SIGTERM], 600)
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(1.2)
print(ends)
child.kill()  # and nobody has asked for its exit code yet
time.sleep(1.2)
print(ends)
"""
    job = launch(0, script)
    assert job.stdout == "SIGTERM\n[]\n[('', 143)]\n", job.stderr


def test_signals_that_were_held_may_be_given_up(launch):
    """As by `preempt_signals = "none"` in a file: afterwards they do what they did before."""
    script = """
import os, signal
from mpipipe.job import stop_signals
stop_signals.hold("USR2,TERM")
stop_signals.change(())
print("changed", flush=True)
os.kill(os.getpid(), signal.SIGTERM)
"""
    job = launch(0, script)
    assert (job.returncode, job.stdout) in {(-signal.SIGTERM, "changed\n"), (128 + signal.SIGTERM, "changed\n")}, job


def test_a_thread_cannot_catch_signals():
    with ThreadPoolExecutor() as pool, pytest.raises(ArgumentError, match="in the main thread only"):
        pool.submit(stop_signals.StopSignals, [signal.SIGUSR2], 600).result()
