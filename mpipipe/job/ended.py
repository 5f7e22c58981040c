"""The proof that all ranks of a job have come to their end: a file of lines, whose name MPIPIPE_ENDED gives.

    mpipipe launch     chooses a fresh name, and starts the job
    rank 0             begun 4 ranks on node7            at its start: the file must not be there yet
    rank 0             ended 0f3c5a...                   after all ranks have ended with 0
    mpipipe launch     believes an exit code 0 with that last line alone

An exit code alone is no proof: the launcher of MPICH returns 0 where one rank is ended by `exit(0)` of a library in C.
This module is imported by a launcher that has to start at once, so it imports next to nothing.
"""

from __future__ import annotations

import os

VARIABLE = "MPIPIPE_ENDED"
PREFIX = ".mpipipe-ended-"  # of the name of such a file
MOST = 4096  # bytes of a file that are read
_taken: list[tuple[int, str]] = []  # process and path, between `begin` and `end`


def begin(writes: bool, who: str) -> None:
    """Take the variable out of the environment, so that no child ends in place of this process; write the first line.

    `writes` says whether this process is the one that writes, and `who` what begins, as in "4 ranks"; the others may
    have to end in its place, after a death. Raises BackendError where the file cannot be made, or is there.
    """
    path = os.environ.pop(VARIABLE, None)
    if not path:
        return
    path = os.path.abspath(path)
    problem = remedy = ""
    try:
        if writes:
            _write(path, f"begun {who} on {os.uname().nodename}", os.O_CREAT | os.O_EXCL)
    except FileExistsError:
        problem = "another job has begun under the same `mpipipe launch`, which can prove the end of one alone"
        remedy = "start each job by a `mpipipe launch` of its own"
    except OSError as error:
        problem = f"{error.strerror}: the proof of this job's end cannot be written on {os.uname().nodename}"
        remedy = "mpipipe launch --marker-folder DIR, with a folder that the node of rank 0 sees, too"
    if problem:
        from mpipipe.errors import BackendError  # `mpipipe launch` needs it in this case alone

        raise BackendError(problem, found=path, remedy=remedy)
    _taken.append((os.getpid(), path))


def end() -> None:
    """Write the last line: all ranks have ended well. Once, and never in a forked child. Raises OSError."""
    while _taken:
        context, path = _taken.pop()
        if context == os.getpid():
            _write(path, last_line(path), 0)


def last_line(path: str) -> str:
    """Return the line that proves the end of a job; a copy under another name proves nothing."""
    return f"ended {os.path.basename(path).removeprefix(PREFIX)}"


def read(path: str) -> list[str]:
    """Return the lines of the file, without a last one that is not whole; empty where there is no file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return []
    try:
        return os.read(descriptor, MOST).decode(errors="replace").split("\n")[:-1]
    finally:
        os.close(descriptor)


def _write(path: str, line: str, flags: int) -> None:
    descriptor = os.open(path, flags | os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, f"{line}\n".encode(errors="replace"))
    finally:
        os.close(descriptor)
