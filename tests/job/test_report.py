"""What a rank writes at the end of a job, and scripts that were started without `run_or_abort`."""

from __future__ import annotations

import os

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
    assert report.describe(own, heading) == f"{heading}\n  ArgumentError: {own}\n"
    text = report.describe(raised(ValueError("wet paint")), heading)
    assert text.startswith(f"{heading}\n  ValueError: wet paint\nTraceback") and "in raised" in text
    text = report.describe(raised(StageError("a stage failed"), KeyError("paint")), heading)
    assert text.startswith(f"{heading}\n  StageError: a stage failed\n") and text.endswith("KeyError: 'paint'\n")


def test_an_interrupt_is_told_in_three_lines_at_most():
    heading = report.heading(2, 4)
    text = report.describe(raised(KeyboardInterrupt("after step 3 of 9")), heading)
    lines = text.splitlines()
    assert lines[:2] == [heading, "  KeyboardInterrupt: after step 3 of 9"]
    assert lines[2].startswith("  in raised (") and f"{__file__}:" in lines[2] and len(lines) == 3
    assert report.describe(KeyboardInterrupt(), heading) == f"{heading}\n  KeyboardInterrupt\n"


def test_any_text_can_be_written(capfd):
    report.write("caf\udce9\n")
    assert capfd.readouterr().err == "caf\\udce9\n"


def test_nobody_needs_to_read(monkeypatch):
    def broken(descriptor, data):
        raise BrokenPipeError

    monkeypatch.setattr(os, "write", broken)
    monkeypatch.setattr("sys.stdout", None)
    report.write("wet paint\n")


SCRIPT = """
import sys
from mpipipe.job import report as excepthook, runtime
runtime.world()
calls = []
sys.excepthook = lambda *error, hook=sys.excepthook: (calls.append(error), hook(*error))
if {suspended}:
    with excepthook.suspended():
        sys.excepthook(ValueError, ValueError("wet paint"), None)
print(len(calls), len(excepthook._deaths), flush=True)
if not {suspended} and runtime.world().rank == 1:
    raise ValueError("wet paint")
runtime.world().Barrier()
"""


def test_an_exception_of_one_rank_ends_a_plain_script(launch):
    job = launch(2, SCRIPT.replace("{suspended}", "False"))
    assert job.returncode != 0
    assert job.stderr.count("ValueError: wet paint") == 1
    assert "mpipipe: rank 1 of 2 died of ValueError: the job ends here" in job.stderr


def test_an_exception_that_others_deal_with_ends_nothing(launch):
    job = launch(2, SCRIPT.replace("{suspended}", "True"))
    assert job.returncode == 0 and job.stdout.splitlines() == ["1 0"] * 2, job.stderr
    assert "the job ends here" not in job.stderr
