"""The runner of faults: it tells jobs that hang, say nothing, end wrongly or leave processes behind."""

import pytest

from faults.fault import HEADING, PLAIN, RUN, Case, Fault
from faults.play import play

REPORT = f"import sys; sys.stderr.write('{HEADING} rank 0: wet paint')\n"
CHILD = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'])"


@pytest.mark.parametrize(
    ("program", "options", "problem"),
    [
        (
            REPORT + "sys.exit(3)",
            {"says": ("dry",), "never": ("wet",)},
            "exit code 3 instead|lacks 'dry'|'wet' must not",
        ),
        ("print(1, 1)", {"code": 0, "plain_code": 0, "by_all": ("1",)}, "2 times '1' for 1 ranks"),
        (REPORT * 2, {"code": 0, "quiet": True}, "2 reports instead of 1|stderr is not empty"),
        ("import time; time.sleep(1000)", {"limit": 1.0}, "still running"),
        pytest.param(CHILD, {"code": 0, "reports": 0}, "1 processes outlive the job", marks=pytest.mark.long),
    ],
)
def test_what_differs_is_found(program, options, problem):
    found = play(Case(Fault("a name", "a class", program, **options), 0, RUN))
    for text in problem.split("|"):
        assert any(text in each for each in found), found


def test_a_job_as_it_should_be_passes():
    assert (
        play(Case(Fault("a name", "a class", REPORT + "sys.exit(3)", plain_code=3, says=("wet paint",)), 0, PLAIN))
        == []
    )
