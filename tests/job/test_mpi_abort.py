"""The end of a process by MPI_Abort."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from mpipipe.job import report
from tests.support.launch import job_environment

TEXT = """
import time
from mpipipe.job import report
from mpipipe.job.report import abort_job

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
    aborted, read = outcome(report.TAKEN_SECONDS / 2)
    assert aborted > read


def test_a_launcher_that_never_reads_is_not_waited_for():
    aborted, read = outcome(report.TAKEN_SECONDS + 3.0)
    assert aborted < read


def test_nothing_is_waited_for_once_all_is_read(monkeypatch):
    """Other ranks would report meanwhile: they are only some hundredths of a second behind."""
    read, write = os.pipe()
    descriptor = os.dup(2)
    os.dup2(write, 2)
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: os.read(read, 1000))
    monkeypatch.setattr(report, "time", clock)
    try:
        report.wait_for_launcher()
        report.write("wet paint")
        report.wait_for_launcher()
        os.set_blocking(read, False)
        with pytest.raises(BlockingIOError):
            os.read(read, 1)
    finally:
        os.dup2(descriptor, 2)
        for each in (read, write, descriptor):
            os.close(each)


THREAD = """
import os, threading, time
from mpipipe.job import runtime
from mpipipe.job.exit import run_or_abort

def program():
    runtime.world().Barrier()
    if runtime.world().rank == 1:
        threading.Thread(target=os._exit, args=[3]).start()
    time.sleep(0.2)

run_or_abort(program)
"""


def test_a_thread_that_leaves_by_os_exit_ends_the_job_before_the_program_ends(launch):
    job = launch(2, THREAD)
    assert job.returncode != 0 and "os._exit(3) was called" in job.stderr, job


ABORTED = """
import os, time
from mpipipe.job import exit as abort, exit as ending, report, runtime

def abort_job(comm, *rest, real=ending.abort_job):
    report.write(f"aborts COMM_WORLD: {comm == runtime.mpi().COMM_WORLD}\\n")
    real(comm, *rest)

def program():
    if runtime.world().rank == 1:
        END
    time.sleep(60)

abort.abort_job = ending.abort_job = abort_job
abort.run_or_abort(program)
"""


@pytest.mark.parametrize("end", ["raise ValueError('wet paint')", "os._exit(3)"])
def test_what_is_aborted_is_comm_world_and_no_duplicate_of_it(launch, end):
    """MPICH's launcher may return 0 for a job whose duplicate of COMM_WORLD is aborted."""
    job = launch(2, ABORTED.replace("END", end))
    assert "aborts COMM_WORLD: True" in job.stderr, job
