"""The runner of faults: it tells jobs that hang, say nothing, end wrongly or leave processes behind."""

import pytest

from faults.fault import HEADING, PLAIN, RUN, Case, Fault
from faults.play import play

REPORT = f"import sys; sys.stderr.write('{HEADING} rank 0: wet paint')\n"
CHILD = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'])"


@pytest.mark.parametrize(
    ("program", "options", "problem"),
    [
        (REPORT + "sys.exit(3)", {"code": 3, "says": ("wet paint",)}, None),
        (REPORT + "sys.exit(3)", {}, "exit code 3 instead of 1"),
        (REPORT + "sys.exit(1)", {"says": ("dry paint",)}, "stderr lacks 'dry paint'"),
        (REPORT + "sys.exit(1)", {"never": ("paint",)}, "'paint' must not be printed"),
        ("print('done, done')", {"code": 0, "by_all": ("done",)}, "2 times 'done' for 1 ranks"),
        (REPORT, {"code": 0, "quiet": True}, "stderr is not empty"),
        ("import time; print('here', flush=True); time.sleep(1000)", {"limit": 1.0}, "still running"),
        pytest.param(CHILD, {"code": 0}, "1 processes outlive the job", marks=pytest.mark.long),
    ],
)
def test_judgement(program, options, problem):
    fault = Fault("a name", "a class", program, plain_code=options.get("code", 1), **options)
    found = play(Case(fault, 0, PLAIN))
    assert found == [] if problem is None else problem in found[0], found


def test_reports_are_counted_where_all_ranks_are_known():
    fault = Fault("a name", "a class", REPORT * 2 + "sys.exit(1)")
    assert "2 reports instead of 1" in play(Case(fault, 0, RUN))
