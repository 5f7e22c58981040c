"""The end of a process by MPI_Abort."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from tests.support.launch import job_environment

TEXT = """
import time
from mpipipe.comm import report
from mpipipe.comm.mpi_abort import abort_job

class Returns:
    def Abort(self, code):
        print("called with", code, "at", time.monotonic(), flush=True)

report.write("wet paint")
try:
    abort_job(Returns(), 7)
finally:
    print("went on")
"""


def outcome(seconds):
    """When MPI_Abort was called, and when the report was read: `seconds` after the process had written it."""
    read, write = os.pipe()
    with os.fdopen(read) as reports:
        command = [sys.executable, "-c", TEXT]
        job = subprocess.Popen(command, env=job_environment(), stdout=subprocess.PIPE, stderr=write, text=True)
        os.close(write)
        first = os.read(read, 1)
        time.sleep(seconds)
        read_at = time.monotonic()
        text = first.decode() + os.read(read, 1000).decode()
        out, _ = job.communicate(timeout=60)
        assert text == "wet paint" and reports.read() == ""
    assert job.returncode == -signal.SIGKILL
    called, at = out.split(" at ")
    assert called == "called with 7" and "went on" not in at
    return float(at), read_at


def test_a_process_ends_where_mpi_abort_returns():
    outcome(0)


def test_a_report_is_read_before_the_job_ends():
    """A launcher that is told of an abort loses what it has not read: this one comes late."""
    aborted, read = outcome(1.0)
    assert aborted > read


def test_a_launcher_that_never_reads_is_not_waited_for():
    aborted, read = outcome(5.0)
    assert aborted < read
