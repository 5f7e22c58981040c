"""The end of a process by MPI_Abort."""

from __future__ import annotations

import signal
import subprocess
import sys

TEXT = """
from mpipipe.comm.mpi_abort import abort_job

class Returns:
    def Abort(self, code):
        print("called with", code, flush=True)

try:
    abort_job(Returns(), 7)
finally:
    print("went on")
"""


def test_a_process_ends_where_mpi_abort_returns():
    job = subprocess.run([sys.executable, "-c", TEXT], capture_output=True, text=True, timeout=60)
    assert job.returncode == -signal.SIGKILL
    assert job.stdout == "called with 7\n"
