"""The runner of faults: it tells jobs that hang, say nothing, end wrongly or leave something behind."""

import sys

import pytest

from faults.fault import COMMAND, HEADING, Case, Fault
from faults.play import HUNG, PASSED, SILENT, WRONG, play

REPORT = f"import sys; sys.stderr.write('{HEADING} rank 0: wet paint')\n"


def job(program, **options):
    """The case of one lone process of python -c."""
    return Case(Fault("a name", "a class", None, ("-c", program), modes=(COMMAND,), ranks=(0,), **options), 0, COMMAND)


@pytest.mark.parametrize(
    ("program", "options", "status", "problem"),
    [
        (REPORT + "sys.exit(3)", {"code": 3, "says": ("wet paint",)}, PASSED, ""),
        (REPORT + "sys.exit(3)", {}, WRONG, "exit code 3 instead of 1"),
        (REPORT * 2 + "sys.exit(1)", {}, WRONG, "2 reports instead of 1"),
        (REPORT + "sys.exit(1)", {"says": ("dry paint",)}, WRONG, "stderr lacks 'dry paint'"),
        (REPORT + "sys.exit(1)", {"never": ("paint",)}, WRONG, "'paint' must not be printed"),
        ("import sys; sys.exit(1)", {"says": ("wet paint",)}, SILENT, "stderr lacks 'wet paint'"),
        ("print('done')", {"code": 0, "reports": 0, "prints": ("done",), "quiet": True}, PASSED, ""),
        ("print('done, done')", {"code": 0, "reports": 0, "by_all": ("done",)}, WRONG, "2 times 'done' for 1 ranks"),
        (REPORT, {"code": 0, "reports": None, "quiet": True}, WRONG, "stderr is not empty"),
        ("1 / 0", {"after": (("-c", "1 / 0"),), "reports": 0}, WRONG, "ZeroDivisionError"),
        ("", {"before": (("-c", "1 / 0"),)}, WRONG, "ZeroDivisionError"),
    ],
)
def test_judgement(program, options, status, problem):
    verdict = play(job(program, **options))
    assert verdict.status == status, verdict
    assert problem in "; ".join(verdict.problems)


def test_a_job_that_hangs_is_ended():
    verdict = play(job("import time; print('here', flush=True); time.sleep(1000)", limit=1.0))
    assert verdict.status == HUNG and verdict.seconds < 20
    assert "here" in verdict.output


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_what_a_job_leaves_behind_is_found():
    child = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'])"
    verdict = play(job(child, code=0, reports=0))
    assert verdict.problems == ("1 processes outlive the job",)
    shared = """
import time
from multiprocessing import resource_tracker, shared_memory
block = shared_memory.SharedMemory(create=True, size=10000)
resource_tracker.unregister(block._name, "shared_memory")
time.sleep(1)
"""
    verdict = play(job(shared, code=0, reports=0))
    assert verdict.status == WRONG and verdict.problems[0].startswith("left in /dev/shm: ")
