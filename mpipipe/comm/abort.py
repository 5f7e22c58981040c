"""Runs a program so that failure on one rank ends the whole job, in seconds and with one report.

MPI itself has no such thing: a Python process that raises enters MPI_Finalize and waits there, and its peers wait in
whatever they were doing. Under `run_or_abort`:

- a rank whose program ends, well or not, tells its peers, so that none waits for it, and then waits for them;
- once all ranks have come to their end, one of those with a cause reports, all leave with the same exit code, and MPI
  is finalized: this is how errors end that reach all ranks;
- where peers do not come within GRACE seconds of an error, the rank with the cause reports, and MPI_Abort ends the job.

See ending.py for how the ranks come to that one end, and excepthook.py for scripts that were started without this.
"""

from __future__ import annotations

import faulthandler
import os
import time
from collections.abc import Callable
from hashlib import blake2b
from typing import NoReturn

from mpipipe import ended, stop_signals
from mpipipe.comm import communicators, excepthook, launcher, lifeline, runtime, settings
from mpipipe.comm.ending import End, Says, World, leave_together, other_threads
from mpipipe.comm.group import group_of
from mpipipe.comm.mpi_abort import abort_job
from mpipipe.comm.process import here, is_rank
from mpipipe.comm.report import AGREED, GRACE, INTERRUPTED, describe, heading, write
from mpipipe.comm.types import MpiCommunicator
from mpipipe.errors import ArgumentError, BackendError, MpipipeError
from mpipipe.wording import counted

__all__ = ["Stop", "run_or_abort"]


class Stop(Exception):
    """Ends a program with an exit code and a text that one rank writes as it is.

    Parameters
    ----------
    text : str
        What is written to stderr, with its line ends.
    code : int
        The exit code.

    Examples
    --------
    >>> from mpipipe.comm.abort import Stop
    >>> Stop("mpipipe: no such file", code=2).code
    2
    """

    def __init__(self, text: str, code: int) -> None:
        self.text, self.code = text, code
        super().__init__(text)


_running: list[World] = []  # while a program runs
_afterwards: list[Callable[[], object]] = []  # what it runs next


def run_or_abort(main: Callable[[], object]) -> int:
    """Call `main()` on every rank of COMM_WORLD, so that an error on one rank ends the whole job.

    Where such a program calls this again, as a command line does that runs under it as a whole, the inner `main` runs
    after the outer one.

    Parameters
    ----------
    main : callable
        The program of this rank. SystemExit, KeyboardInterrupt and every other exception end the job.

    Returns
    -------
    int
        The exit code that all ranks agree on; 0 where all have ended well. It does not return where one rank fails and
        others do not come: the job is aborted then, with one report on stderr.

    Examples
    --------
    A script ends with `sys.exit(run_or_abort(main))`:

    >>> from mpipipe.comm.abort import run_or_abort
    >>> run_or_abort(lambda: None)
    0
    """
    if _running:
        _afterwards.append(main)
        return 0
    try:
        world = _world()
    except MpipipeError as error:
        if launcher.launcher_rank(os.environ) == 0:  # each of the lone processes finds the same
            write(describe(error, heading(0, 1)))
        else:  # a launcher may end the others as soon as one has left
            time.sleep(GRACE)
        return 1 if runtime.limit_error() is None else AGREED
    _running.append(world)
    lifeline.start()
    restore = _watch_os_exit(world)
    try:
        with excepthook.suspended():
            end = _run(main, world)
    finally:
        restore()
        stop_signals.ignore()
        world = _running[-1]  # that of the survivors, where ranks have died
        _running.clear()
        _afterwards.clear()
    if not is_rank():  # forked by the program: it must not touch MPI
        write(end.report if end.says == Says.CAUSE else "")
        os._exit(end.code)
    return leave_together(world, end)


def outlive(comm: MpiCommunicator) -> None:
    """From now on the job ends together with the ranks of `comm`: all others have died. Collective over it."""
    if _running:
        _running[-1] = _world(comm)


def _world(comm: MpiCommunicator | None = None) -> World:
    comm = runtime.world() if comm is None else comm
    return World(group_of(comm), communicators.duplicate(comm), comm.rank, comm.size)


def _run(main: Callable[[], object], world: World) -> End:
    try:
        with world.group.together("the start of the program"):
            settings.check_settings()
            ended.begin(world.rank == 0, counted(world.size, "rank"))
        _afterwards.insert(0, main)
        while _afterwards:
            try:
                _afterwards.pop(0)()
            except SystemExit as leaving:
                if leaving.code or not _afterwards:  # else it is `sys.exit(run_or_abort(main))` of a script
                    raise
        for thread in other_threads():  # as the interpreter does: they may still use the other ranks
            thread.join()
        return End(1, Says.CAUSE) if here().unwritten else End(0)
    except SystemExit as leaving:
        code = _exit_code(leaving)
        text = f"{heading(world.rank, world.size)}\n  exited with code {code} while other ranks were still running\n"
        return End(code, Says.EXITED if code else Says.NOTHING, text)
    except Stop as stop:
        return End(stop.code, Says.CAUSE, stop.text)
    except BaseException as error:
        return _end_of(error, _running[-1])


def _end_of(error: BaseException, world: World) -> End:
    code = 1
    if isinstance(error, KeyboardInterrupt):
        code = INTERRUPTED
    elif world.group.agreed_on(error):
        code = AGREED
    line = here().lifeline
    elsewhere = getattr(error, "reported_elsewhere", False) or (line is not None and line.explains(error))
    says = Says.REPORTED_ELSEWHERE if elsewhere else Says.CAUSE
    return End(code, says, describe(error, heading(world.rank, world.size)), _refusal_of(error))


def _refusal_of(error: BaseException) -> int:
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
    write(f"{leaving.code}\n")
    return 1


def _watch_os_exit(world: World) -> Callable[[], None]:
    """Make `os._exit` of a rank end the job with a report; returns the function that takes this back.

    Without it the other ranks would wait for ever, and some launchers would call the job a success.
    """
    original = os._exit

    def exit_rank(status: int) -> NoReturn:
        if is_rank() and not runtime.finalized(world.end):
            write(f"{heading(world.rank, world.size)}\n  os._exit({status}) was called: the other ranks cannot go on\n")
            faulthandler.dump_traceback(all_threads=False)
            abort_job(runtime.world(), status & 0xFF or 1)
        original(status)

    os._exit = exit_rank

    def restore() -> None:
        os._exit = original

    return restore
