"""Text of commands on the standard output, refusals, and commands that all ranks run together."""

from __future__ import annotations

import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import NoReturn

from mpipipe import files, processor
from mpipipe.errors import ConfigError, MpipipeError
from mpipipe.job import (
    AGREED,
    Stop,
    describe_error,
    fair_shares,
    group_of,
    heading,
    run_or_abort,
    settings,
    single_cores,
    users_frame,
)
from mpipipe.text import counted

PACKAGE = Path(__file__).parents[1]
# Exit codes; the second is that of a program that the signal ends.
UNWRITTEN = 1
READER_LEFT = 128 + signal.SIGPIPE


def show(text: str) -> None:
    """Write text to the standard output, and flush it. Where Python has none, nothing happens.

    Raises Stop where it cannot be written: with one line for a full disk, say, and without a word
    where the reader has left, as `head` does.
    """
    stream = sys.stdout
    if stream is None:
        return
    try:
        files.show(stream, text)
    except BrokenPipeError:
        files.silence(stream)
        raise Stop("", READER_LEFT) from None
    except OSError as error:
        files.silence(stream)
        reason = error.strerror or os.strerror(error.errno or 0)
        raise Stop(
            f"mpipipe: the standard output cannot be written: {reason}\n", UNWRITTEN
        ) from None


def show_lines(lines: Iterable[str]) -> None:
    """Write lines as `show` does."""
    show("".join(f"{line}\n" for line in lines))


# -- How a command is refused: one report, and the exit code of wrong usage ------------------------


# Exit code: all ranks of a job end with the same error.
WRONG_USAGE = AGREED


@contextmanager
def refusing(alone: str | None = None) -> Iterator[None]:
    """Report an error inside the block as that of a training on one rank, and end the program.

    A command that works `alone`, by this name, is refused under mpiexec or srun: each rank would do
    the whole work.
    """
    started = settings.launcher_size(os.environ)
    try:
        if alone is not None and started is not None:
            raise ConfigError(
                f"{alone} is for one process",
                found=counted(started[1], "rank"),
                remedy="start it without mpiexec or srun",
            )
        with naming_exits(), _naming_os_exit():
            yield
    except MpipipeError as error:
        raise Stop(describe_error(error, heading(0, 1)), WRONG_USAGE) from error


@contextmanager
def _naming_os_exit() -> Iterator[None]:
    """Make an error of `os._exit`: its exit code may say that all is well."""
    original = os._exit
    process = os.getpid()

    def refuse(status: int) -> NoReturn:
        if os.getpid() != process:  # a forked child may leave in this way
            original(status)
        caller = sys._getframe(1)
        raise ConfigError(
            f"code of yours ends the program by os._exit({status})",
            found=f"line {caller.f_lineno} of {caller.f_code.co_filename}",
            remedy="raise an error that says what is wrong",
        )

    os._exit = refuse
    try:
        yield
    finally:
        os._exit = original


@contextmanager
def naming_exits() -> Iterator[None]:
    """Make an error of an exit in code of a user: the job would seem to have done its work.

    Raises ConfigError with the line. What the commands themselves raise stays as it is.
    """
    try:
        yield
    except SystemExit as leaving:
        frames = traceback.extract_tb(leaving.__traceback__)
        if Path(frames[-1].filename).is_relative_to(PACKAGE):
            raise
        last = users_frame(frames) or frames[-1]
        raise ConfigError(
            f"code of yours ends the program, with the exit code {leaving.code}",
            found=f"line {last.lineno} of {last.filename}: {last.line}",
            remedy="raise an error that says what is wrong",
        ) from leaving


def share_of_cores() -> int:
    """Return how many threads this rank can take; collective where a launcher gave several."""
    cores = single_cores()
    if settings.launcher_size(os.environ) is None:
        return max(1, len(cores))
    group = group_of()
    places = group.gather("the cores of all ranks", (socket.gethostname(), sorted(cores)))
    return fair_shares(places)[group.rank]


def on_ranks(
    work: Callable[..., object], threads: Callable[[], int] = share_of_cores
) -> Callable[..., int]:
    """Make a command of what all ranks do, with `threads()` threads each.

    An error on one rank ends the job.
    """

    @wraps(work)
    def command(*arguments: object, **options: object) -> int:
        def main() -> None:
            processor.prepare_process(threads())
            with naming_exits():
                work(*arguments, **options)

        return run_or_abort(main)

    return command
