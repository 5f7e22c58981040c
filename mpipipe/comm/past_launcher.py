"""A way past a launcher that drops what its ranks write: Open MPI's mpiexec, from the signal on by which it is to end.

On Ctrl-C and SIGTERM it sends SIGCONT, after 0.25 s SIGTERM, after 0.2 s more SIGKILL, and what the ranks write
meanwhile is lost. So a rank that has the launcher for its parent writes where the launcher does.
"""

from __future__ import annotations

import os
from pathlib import Path

LAUNCHERS = ("mpiexec", "mpirun", "prterun", "prte")  # prted, which starts ranks on other hosts, shows nothing


def errors_of_open_mpi() -> Path | None:
    """Return the path of the standard error of Open MPI's launcher, where that is the parent of this process."""
    if "OMPI_COMM_WORLD_RANK" not in os.environ:
        return None
    parent = Path(f"/proc/{os.getppid()}")
    try:
        return parent / "fd/2" if (parent / "comm").read_text().strip() in LAUNCHERS else None
    except OSError:
        return None


def write_past_launcher(errors: Path, text: str) -> None:
    """Write a text there, without waiting. Raises OSError."""
    descriptor = os.open(errors, os.O_WRONLY | os.O_APPEND | os.O_NOCTTY | os.O_NONBLOCK)
    try:
        os.write(descriptor, text.encode("utf-8", "backslashreplace"))
    finally:
        os.close(descriptor)
