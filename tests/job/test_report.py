"""What a rank writes at the end of a job, and scripts that were started without `run_or_abort`."""

import os
import signal
import subprocess
import sys
import time

import pytest
from support.launch import job_environment

from mpipipe import schedules
from mpipipe.errors import ArgumentError, StageError
from mpipipe.job import report


def raised(error, cause=None):
    try:
        raise error from cause
    except type(error) as caught:
        return caught


def test_errors_of_this_package_say_it_all_and_others_bring_their_traceback():
    heading = report.heading(2, 4)
    assert heading.startswith("mpipipe: job ended by rank 2 of 4 on ")
    own = raised(ArgumentError("wet paint", found="wet", expected="dry"))
    line = raised.__code__.co_firstlineno + 2
    here = f"  at {__file__}:{line}, in raised: raise error from cause\n"
    assert report.describe_error(own, heading) == f"{heading}\n  ArgumentError: {own}\n{here}"
    assert report.describe_error(ArgumentError("never raised"), heading).endswith(": never raised\n")
    try:
        schedules.gpipe(0, 4)
    except ArgumentError as error:  # within the package: the line of the call counts
        place = f"\n  at {__file__}:{error.__traceback__.tb_lineno}, in test_errors"
        assert place in report.describe_error(error, heading)
    text = report.describe_error(raised(ValueError("wet paint")), heading)
    assert text.startswith(f"{heading}\n  ValueError: wet paint\n{here}Traceback")
    text = report.describe_error(raised(StageError("a stage failed"), KeyError("paint")), heading)
    assert text.startswith(f"{heading}\n  StageError: a stage failed\n") and text.endswith("KeyError: 'paint'\n")


def test_a_traceback_begins_with_the_users_frame():
    try:
        schedules.partition(map(int, ["1", "paint"]), 1)
    except ValueError as error:
        report_text = report.describe_error(error, "")
    first, second = [line for line in report_text.splitlines() if line.startswith("  File ")][:2]
    assert __file__ in first and "mpipipe" in second.replace(__file__, "")


def test_an_interrupt_is_told_in_three_lines_at_most():
    heading = report.heading(2, 4)
    text = report.describe_error(raised(KeyboardInterrupt("after step 3 of 9")), heading)
    lines = text.splitlines()
    assert lines[:2] == [heading, "  KeyboardInterrupt: after step 3 of 9"]
    assert lines[2].startswith(f"  at {__file__}:") and ", in raised" in lines[2] and len(lines) == 3
    assert report.describe_error(KeyboardInterrupt(), heading) == f"{heading}\n  KeyboardInterrupt\n"


def test_any_text_can_be_written_and_nobody_needs_to_read(capfd, monkeypatch):
    report.write("caf\udce9\n")
    assert capfd.readouterr().err == "caf\\udce9\n"

    def broken(descriptor, data):
        raise BrokenPipeError

    monkeypatch.setattr(os, "write", broken)
    monkeypatch.setattr("sys.stdout", None)
    report.write("wet paint\n")


SCRIPT = """
from mpipipe.job import runtime
runtime.world().Barrier()
if runtime.world().rank == 1:
    raise ValueError("wet paint")
runtime.world().Barrier()
"""


def test_an_exception_of_one_rank_ends_a_plain_script(launch):
    job = launch(2, SCRIPT)
    assert job.returncode != 0, job.stderr
    assert job.stderr.count("ValueError: wet paint") == 1
    assert "mpipipe: rank 1 of 2 died of ValueError: the job ends here" in job.stderr


# -- the end of a process by MPI_Abort ---------------------------------------------------------------------------------

ABORTS = """
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
        command = [sys.executable, "-c", ABORTS]
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


def test_a_report_is_read_before_the_job_ends_and_the_process_ends_where_mpi_abort_returns():
    """A launcher that learns of an abort loses what it has not read: this one comes late."""
    aborted, read = outcome(report.TAKEN_SECONDS / 2)
    assert aborted > read


@pytest.mark.long
def test_a_launcher_that_never_reads_is_not_waited_for():
    aborted, read = outcome(report.TAKEN_SECONDS + 3.0)
    assert aborted < read


THREAD = """
import os, sys, threading, time
from mpipipe.job import runtime
from mpipipe.job.exit import run_or_abort

def program():
    runtime.world().Barrier()
    if runtime.world().rank == 1:
        threading.Thread(target=os._exit, args=[3], daemon=True).start()
    END

run_or_abort(program)
"""


SHOWN = """
import sys
from mpipipe.job import run_or_abort, runtime

def program():
    runtime.world().Barrier()
    sys.excepthook(ValueError, ValueError("dry paint"), None)

sys.exit(run_or_abort(program))
"""


def test_an_exception_that_a_program_only_shows_is_no_end_of_it(launch):
    job = launch(2, SHOWN)
    assert job.returncode == 0 and job.stderr.count("dry paint") == 2, job


@pytest.mark.parametrize("end", ["time.sleep(0.2)", "time.sleep(1e-3); sys.exit(0)"])
def test_a_thread_that_leaves_by_os_exit_ends_the_job_before_the_program_ends(launch, end):
    job = launch(2, THREAD.replace("END", end))
    assert job.returncode != 0 and "os._exit(3) was called" in job.stderr, job
