"""A way past a launcher that drops what its ranks write: Open MPI's mpiexec, from the signal on by which it is to end.

On Ctrl-C and SIGTERM it sends SIGCONT, after 0.25 s SIGTERM, after 0.2 s more SIGKILL, and what the ranks write
meanwhile is lost. So a rank that has the launcher for its parent writes where the launcher does.
"""

from __future__ import annotations

import os
from pathlib import Path

LAUNCHERS = ("mpiexec", "mpirun", "prterun", "prte")  # prted, which starts ranks on other hosts, shows nothing


def write_past_launcher(text: str) -> bool:
    """Write to the standard error of Open MPI's launcher, where that is this process's parent; whether it was done."""
    if "OMPI_COMM_WORLD_RANK" not in os.environ:
        return False
    parent = Path(f"/proc/{os.getppid()}")
    try:
        if (parent / "comm").read_text().strip() not in LAUNCHERS:
            return False
        descriptor = os.open(parent / "fd/2", os.O_WRONLY | os.O_APPEND | os.O_NOCTTY | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        os.write(descriptor, text.encode("utf-8", "backslashreplace"))
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
