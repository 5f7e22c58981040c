"""The pool of threads: every piece once, errors, nesting, Ctrl-C, fork, exit; and how many threads a process takes."""

import _thread
import os
import threading
import time
import weakref
from functools import partial

import numpy as np
import pytest
from support.pieces import new_pool

from mpipipe import processor
from mpipipe.attention.kernels.host import on_this_thread
from mpipipe.errors import ArgumentError
from mpipipe.processor import each

PIECES = list(range(40))


@pytest.fixture
def pool(monkeypatch):
    """Makes a new pool with so many threads."""
    return partial(new_pool, monkeypatch)


def napping(done, seconds=0.001):
    def work(piece):
        time.sleep(seconds)  # so that other threads get their turn
        done.append((piece, threading.get_ident()))

    return work


@pytest.mark.parametrize("threads", [1, 2, 3, 4])
def test_each_piece_is_done_once_and_no_more_threads_work_than_there_are(pool, threads):
    pool(threads)
    done = []
    each(napping(done), PIECES)
    assert sorted(piece for piece, _ in done) == PIECES
    workers = {worker for _, worker in done}
    assert threading.get_ident() in workers and len(workers) == threads
    done.clear()
    each(napping(done), PIECES[:2])
    assert len({worker for _, worker in done}) <= 2


def test_one_thread_or_one_piece_needs_no_other_thread(pool):
    for threads, pieces in ((1, PIECES), (4, PIECES[:1]), (4, [])):
        made, done = pool(threads), []
        each(napping(done), pieces)
        assert [piece for piece, _ in done] == pieces and not made.wakes
        assert {worker for _, worker in done} <= {threading.get_ident()}


@pytest.mark.parametrize("bad", [0, 1, 7, 39])
def test_the_first_error_is_raised_when_no_piece_is_at_work_and_none_begins(pool, bad):
    pool(3)
    begun, ended = [], []

    def work(piece):
        begun.append(piece)
        if piece == bad:
            raise ValueError(f"piece {piece}")
        time.sleep(0.002)
        ended.append(piece)

    with pytest.raises(ValueError, match=f"^piece {bad}$"):
        each(work, PIECES)
    seen = len(begun), len(ended)
    assert len(begun) == len(ended) + 1 and max(begun) <= bad + 3
    time.sleep(0.02)
    assert (len(begun), len(ended)) == seen
    done = []
    each(napping(done), PIECES)
    assert len(done) == len(PIECES)


def test_pieces_may_call_each_again(pool):
    pool(3)
    done = []

    def outer(piece):
        here = threading.get_ident()
        each(lambda inner: done.append((piece, inner, here == threading.get_ident())), PIECES[:5])
        time.sleep(0.001)

    each(outer, PIECES)
    assert sorted(done) == [(piece, inner, True) for piece in PIECES for inner in PIECES[:5]]


def test_threads_of_the_user_take_turns_or_work_alone(pool):
    pool(2)
    results = [[] for _ in range(4)]

    def user(mine):
        for _ in range(20):
            each(mine.append, PIECES)

    users = [threading.Thread(target=user, args=(mine,)) for mine in results]
    for thread in users:
        thread.start()
    for thread in users:
        thread.join(30)
    assert all(sorted(mine) == sorted(PIECES * 20) for mine in results)


@pytest.mark.parametrize("again", [False, True])
def test_ctrl_c_waits_for_pieces_that_have_begun(pool, again):
    pool(2)
    main, begun, ended, met = threading.get_ident(), [], [], threading.Event()

    def work(piece):
        begun.append(piece)
        if threading.get_ident() != main and len(ended) < 3:
            met.set()
            _thread.interrupt_main()
            time.sleep(0.02)
            if again:
                _thread.interrupt_main()  # while the main thread waits
            time.sleep(0.02)
        else:
            met.wait(10)  # on a busy machine the other thread wakes up late
            time.sleep(0.001)
        ended.append(piece)

    with pytest.raises(KeyboardInterrupt):
        each(work, PIECES)
        time.sleep(1)
    assert len(begun) - len(ended) <= 1 and len(begun) < len(PIECES)  # the one where the interrupt came
    count = len(begun)
    time.sleep(0.05)
    assert len(begun) == count and processor._POOL.job is None
    done = []
    each(napping(done), PIECES)
    assert len(done) == len(PIECES)


def test_ten_thousand_calls_need_no_more_threads_than_one(pool):
    pool(3)
    each(napping([]), PIECES)
    before = threading.active_count()
    total = []
    for _ in range(10_000):
        each(total.append, (1, 2, 3))
    assert len(total) == 30_000 and threading.active_count() == before


def test_no_array_lives_longer_for_the_pool(pool):
    pool(2)
    array = np.zeros(5)
    gone = weakref.ref(array)

    def call(array):
        each(lambda piece: time.sleep(0.001) if array.size else None, PIECES[:6])

    call(array)
    del array
    until = time.monotonic() + 10
    while gone() is not None and time.monotonic() < until:  # a thread lets go a moment after the call
        time.sleep(0.001)
    assert gone() is None


def test_settings_of_numpy_hold_on_all_threads(pool):
    pool(3)
    huge, workers = np.full(2000, 1e300), set()

    def work(_piece):
        time.sleep(0.001)
        workers.add(threading.get_ident())
        huge.astype(np.float32)

    with np.errstate(over="raise"), pytest.raises(FloatingPointError):
        each(work, PIECES)
    with np.errstate(over="ignore"):
        each(work, PIECES)
    assert len(workers) == 3


def test_a_waiting_caller_polls(pool):
    pool(2)
    polls, main = [], threading.get_ident()
    poll = on_this_thread(lambda: polls.append(threading.get_ident()))

    def work(piece):
        while piece == 0 and threading.active_count() and not started:
            time.sleep(0.001)
        started.append(piece)
        poll()
        if threading.get_ident() != main:
            time.sleep(0.03)

    started = []
    each(work, [0, 1], poll)
    assert set(polls) == {main} and len(polls) > 5

    def failing():
        raise RuntimeError("poll")

    started = []
    with pytest.raises(RuntimeError, match="poll"):
        each(work, [0, 1], failing)


FORK = """
import os
os.environ["MPIPIPE_THREADS"] = "3"
import threading, time
from mpipipe.processor import each, thread_count
found = set()
def work(piece):
    time.sleep(0.002)
    found.add(threading.get_ident())
def count():
    found.clear()
    each(work, range(30))
    return len(found)
before = count()
child = os.fork()
if child == 0:
    os._exit(10 * threading.active_count() + count())
print(before, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), count(), thread_count(), flush=True)
{more}
"""


def test_a_forked_process_has_a_pool_of_its_own(launch):
    job = launch(0, FORK.format(more=""))
    assert (job.returncode, job.stdout.split()) == (0, ["3", "13", "3", "3"]), job.stderr


def test_a_process_ends_while_pieces_are_at_work(launch):
    call = "each(lambda piece: time.sleep(60), range(9))"
    more = f"threading.Thread(target=lambda: {call}, daemon=True).start()\ntime.sleep(0.2)\nraise SystemExit(5)"
    job = launch(0, FORK.format(more=more), timeout=30)
    assert job.returncode == 5, job.stderr


# -- How many ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def variables(monkeypatch):
    for name in (processor.VARIABLE, *processor.THREAD_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch.setenv


@pytest.mark.parametrize(
    ("own", "blas", "count"),
    [("3", "", 3), (" 2 ", "8", 2), ("1", "8", 1), ("", "8", 8), ("", "4,2", 4),
     *(("", blas, None) for blas in ("", "x", "0", "-2", "2,", ","))],
)  # fmt: skip
def test_the_number_that_the_user_set(variables, pool, own, blas, count):
    variables(processor.VARIABLE, own)
    variables("OMP_NUM_THREADS", blas)
    pool(None)
    assert processor.chosen_threads() == count
    assert processor.thread_count() == (count or 1)
    processor.set_threads(5)
    assert processor.thread_count() == (count or 5)


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5", "4,2", " "])
def test_a_number_that_is_none_is_refused(variables, pool, text):
    variables(processor.VARIABLE, text)
    pool(None)
    for ask in (processor.chosen_threads, processor.thread_count, processor.set_threads):
        with pytest.raises(ArgumentError, match=r"(?s)MPIPIPE_THREADS.*positive integer"):
            ask()


BLAS = """
import numpy, threadpoolctl
from mpipipe import processor
processor.set_threads(2)
print(processor.thread_count(), {pool["num_threads"] for pool in threadpoolctl.threadpool_info()})
"""


@pytest.mark.parametrize(
    ("own", "blas", "found"), [("", "", "2 {1}"), ("2", "2", "2 {1}"), ("1", "2", "1 {2}"), ("1", "", "1 {1}")]
)
def test_blas_has_one_thread_where_the_pool_has_more(launch, own, blas, found):
    if (os.cpu_count() or 1) < 2:
        pytest.skip("one core has one thread")
    env = {name: "" for name in processor.THREAD_VARIABLES} | {"MPIPIPE_THREADS": own, "OMP_NUM_THREADS": blas}
    job = launch(0, BLAS, env=env)
    assert (job.returncode, job.stdout.strip()) == (0, found), job.stderr
