"""Runs a program so that failure on one rank ends the whole job, in seconds and with one report.

MPI itself has no such thing: a Python process that raises enters MPI_Finalize and waits there, and its peers wait in
whatever they were doing. What happens here instead, under `run_or_abort`:

- a rank whose program ends, well or not, tells its peers, so that none waits for it, and then waits for them;
- once all ranks have come to their end, one of those with a cause reports, all leave with the same exit code, and MPI
  is finalized: this is how errors end that reach all ranks;
- where peers do not come within GRACE seconds of an error, the rank with the cause reports, and MPI_Abort ends the job.

In a program that was started without this, `end_job_with_script` does the least that is needed: a rank that dies of an
exception ends the job by MPI_Abort.
"""

from __future__ import annotations

import faulthandler
import os
import socket
import sys
import threading
import time
import traceback
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np

from mpipipe.comm import communicators, exit_hooks, launcher, runtime, settings
from mpipipe.comm.group import Group, group_of
from mpipipe.comm.process import here, is_rank
from mpipipe.comm.requests import own
from mpipipe.errors import ArgumentError, BackendError, MpipipeError, StageError

GRACE = 3.0  # seconds: for peers to come to their end after an error, and for the rank with the cause to report first
STAGGER = 0.2  # seconds between ranks that report in its place
QUIET = 0.2  # seconds that a rank without an error waits for its peers before it tells them that it has left
FINALIZE = 20.0  # seconds for MPI_Finalize after an error
PAUSE = 2e-3
AGREED = 2  # exit code for an error that all ranks raise alike, and for wrong usage
INTERRUPTED = 130  # shells: 128 + SIGINT
# what a rank has to report: nothing, what another rank reports too, that it has left with a code, or its own error
NOTHING, ECHO, EXITED, CAUSE = range(4)


class End(NamedTuple):
    """How the program of one rank ended."""

    code: int
    says: int = NOTHING
    report: str = ""
    refusal: int = 0  # a number made of the text of an error of this package that is no failure of a computation


class Stop(Exception):
    """Ends a program with an exit code and a text that one rank writes as it is."""

    def __init__(self, text: str, code: int):
        self.text, self.code = text, code
        super().__init__(text)


class World(NamedTuple):
    """All ranks of the job: their group, and a communicator for nothing but their end."""

    group: Group
    end: Any
    rank: int
    size: int


_running: list[World] = []  # while a program runs
_afterwards: list = []  # what it runs next


def run_or_abort(main) -> int:
    """Call `main()` on every rank of COMM_WORLD and return the exit code that all ranks agree on.

    Does not return where ranks fail and others do not come: the job is aborted. Where such a program calls this again,
    as a command line does that runs under it as a whole, the inner `main` runs after the outer one.
    """
    if _running:
        _afterwards.append(main)
        return 0
    try:
        world = _world()
    except MpipipeError as error:
        if launcher.launcher_rank(os.environ) == 0:  # each of the lone processes finds the same
            _write(_describe(error, "mpipipe: cannot start"))
        return 1
    _running.append(world)
    restore = _watch_os_exit(world)
    try:
        end = _run(main, world)
    finally:
        restore()
        _running.clear()
        _afterwards.clear()
    if not is_rank():  # forked by the program: it must not touch MPI
        _write(end.report if end.says == CAUSE else "")
        os._exit(end.code)
    return _leave_together(world, end)


def _world() -> World:
    comm = runtime.world()
    return World(group_of(comm), communicators.duplicate(comm), comm.rank, comm.size)


def _run(main, world) -> End:
    try:
        with world.group.together("the start of the program"):
            settings.check_settings()
        main()
        while _afterwards:
            _afterwards.pop(0)()
        for thread in _threads():  # as the interpreter does: they may still use the other ranks
            thread.join()
        return End(0)
    except SystemExit as leaving:
        code = _exit_code(leaving)
        text = f"{_heading(world)}\n  exited with code {code} while other ranks were still running\n"
        return End(code, EXITED if code else NOTHING, text)
    except Stop as stop:
        return End(stop.code, CAUSE, stop.text)
    except BaseException as error:
        return _end_of(error, world)


def _end_of(error: BaseException, world) -> End:
    code = 1
    if isinstance(error, KeyboardInterrupt):
        code = INTERRUPTED
    elif world.group.agreed_on(error):
        code = AGREED
    says = ECHO if getattr(error, "reported_elsewhere", False) else CAUSE
    return End(code, says, _describe(error, _heading(world)), _number_of(error))


def _number_of(error) -> int:
    if not isinstance(error, (ArgumentError, BackendError)) or error.microbatch is not None:
        return 0
    content = f"{type(error).__name__}: {error}".encode("utf-8", "backslashreplace")
    return int.from_bytes(blake2b(content, digest_size=8).digest(), "big") >> 1


def _exit_code(leaving: SystemExit) -> int:
    """As the interpreter has it, except that a number which the system would cut to 0 stays a failure."""
    if leaving.code is None:
        return 0
    if isinstance(leaving.code, int):
        return leaving.code & 0xFF or int(leaving.code != 0)
    _write(f"{leaving.code}\n")
    return 1


def _leave_together(world, end: End) -> int:
    """Wait for all ranks to end; one that ends with an error does not wait for long."""
    if runtime.finalized(world.end):
        if end.report and end.code:
            _write(end.report)
        return end.code
    try:
        table = _all_ends(world, end)
    except KeyboardInterrupt:
        _write(f"{_heading(world)}\n  KeyboardInterrupt while it waited for the other ranks to end\n")
        world.end.Abort(INTERRUPTED)
    codes, says, refusals = (column.tolist() for column in table.T)
    if len(set(codes)) == 1 and says[0] in (NOTHING, EXITED) and len(set(says)) == 1:
        return codes[0]
    speaker = says.index(max(says))
    if max(says) == EXITED and ECHO not in says:
        listing = ", ".join(f"rank {rank}: {each}" for rank, each in enumerate(codes))
        report, code = f"mpipipe: ranks left with different exit codes ({listing})\n", max(codes)
    else:
        alike = refusals[0] != 0 and len(set(refusals)) == 1
        report, code = end.report, AGREED if alike else codes[speaker]
    if world.rank == speaker:
        _write(report)
    _finalize(code)
    return code


def _all_ends(world, end: End):
    """(exit code, what there is to report, refusal) of each rank; aborts where that takes too long after an error."""
    table = np.zeros((world.size, 3), np.int64)
    request = own(world.end.Iallgather(np.array([end.code, end.says, end.refusal], np.int64), table))
    start, told = time.monotonic(), False
    while not request.Test():
        waited = time.monotonic() - start
        if not told and (end.code or waited > QUIET):
            told = True
            exit_hooks.say_farewell()
        if end.code and waited > _patience(world, end):
            _write(end.report)
            world.end.Abort(end.code)
        time.sleep(PAUSE)
    return table


def _patience(world, end: End) -> float:
    """Where several ranks have a cause the lowest reports; where the rank with the cause cannot, the lowest other."""
    if end.says == CAUSE:
        return GRACE + min(2.0, 0.25 * world.rank)
    return 2 * GRACE + STAGGER * world.rank


def _finalize(code: int):
    """Finalize MPI although messages of the broken call are under way; end the process if that hangs.

    MPI libraries write what they think of such messages. The error has been reported, so nobody needs to read that.
    """
    sys.stdout.flush()
    timer = threading.Timer(FINALIZE, os._exit, (code,))
    timer.daemon = True
    timer.start()
    stderr, silence = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 2)
    here().groups.clear()
    try:
        runtime.mpi().Finalize()
    finally:
        os.dup2(stderr, 2)
        timer.cancel()
    if _threads():  # the interpreter would wait for them, and they for other ranks
        os._exit(code)


def _threads():
    """The other threads that the end of the interpreter waits for."""
    return [t for t in threading.enumerate() if t is not threading.current_thread() and not t.daemon]


def _watch_os_exit(world):
    """Make `os._exit` of a rank end the job with a report; returns what takes that back.

    It would leave the other ranks waiting, and some launchers would then call the job a success.
    """
    original = os._exit

    def exit_rank(status):
        if is_rank() and not runtime.finalized(world.end):
            _write(f"{_heading(world)}\n  os._exit({status}) was called: the other ranks cannot go on\n")
            faulthandler.dump_traceback(all_threads=False)
            world.end.Abort(status & 0xFF or 1)
        original(status)

    os._exit = exit_rank

    def restore():
        os._exit = original

    return restore


# -- without run_or_abort ---------------------------------------------------------------------------------------------

_hooked: list = []  # the hook that was there before ours
_deaths: list[BaseException] = []  # what ended the script


def end_job_with_script():
    """From now on an exception that ends this rank's script ends the whole job, some seconds later, by MPI_Abort.

    Nothing happens in an interactive session, and in a program that `run_or_abort` runs.
    """
    if _hooked or runtime.mpi().COMM_WORLD.size == 1:
        return
    previous = sys.excepthook
    _hooked.append(previous)

    def note_and_report(kind, error, trace):
        previous(kind, error, trace)
        if not _running and not sys.flags.interactive and not hasattr(sys, "ps1"):
            _deaths.append(error)

    sys.excepthook = note_and_report
    exit_hooks.call_last(_abort_after_exception)
    # MPI_Finalize, should the script call it, begins with what is attached to COMM_SELF
    MPI = runtime.mpi()
    keyval = MPI.Comm.Create_keyval(delete_fn=lambda *_: exit_hooks.say_farewell())
    MPI.COMM_SELF.Set_attr(keyval, True)


def _abort_after_exception():
    if not _deaths or _finalized():
        return
    MPI, error = runtime.mpi(), _deaths[0]
    rank = MPI.COMM_WORLD.rank
    sys.stdout.flush()
    sys.stderr.flush()
    # peers that hear of it have time to say where they were; one that only heard leaves the end to the one it heard of
    time.sleep(
        2 * GRACE + STAGGER * rank if getattr(error, "reported_elsewhere", False) else 1.0 + min(1.0, 0.05 * rank)
    )
    _write(f"mpipipe: rank {rank} of {MPI.COMM_WORLD.size} died of {type(error).__name__}: the job ends here\n")
    MPI.COMM_WORLD.Abort(INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1)


def _finalized() -> bool:
    from mpi4py import MPI

    return MPI.Is_finalized()


# -- reports ----------------------------------------------------------------------------------------------------------


def _heading(world) -> str:
    return f"mpipipe: job ended by rank {world.rank} of {world.size} on {socket.gethostname()}:"


def _describe(error: BaseException, heading: str) -> str:
    """What went wrong and where; and for what is not an error of this package, its traceback."""
    text = f"{heading}\n  {type(error).__name__}: {error}\n"
    if isinstance(error, MpipipeError) and not isinstance(error, StageError):
        return text  # the message says it all
    cause = error.__cause__ if error.__cause__ is not None else error
    return text + "".join(traceback.format_exception(type(cause), cause, cause.__traceback__))


def _write(text: str):
    """In one piece, so that reports of several ranks do not mix; whatever the text, and even where nobody reads it."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            pass  # closed, or never opened
    try:
        os.write(2, text.encode("utf-8", "backslashreplace"))
    except OSError:
        pass
