"""The runner of faults: it tells jobs that hang, end wrongly or leave processes behind from one that is right."""

import pytest

from faults.fault import HEADING, RUN, Case, Fault
from faults.play import play

REPORT = f"import sys; sys.stderr.write('{HEADING} rank 0: wet paint')\n"
CHILD = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'])"


@pytest.mark.parametrize(
    ("program", "options", "problems"),
    [
        (REPORT + "sys.exit(3)", {"code": 3, "says": ("wet paint",)}, []),
        (REPORT + "sys.exit(3)", {"says": ("dry",), "never": ("wet",)}, ["code 3", "lacks 'dry'", "'wet' must not"]),
        ("print(1, 1)", {"code": 0, "reports": 0, "by_all": ("1",)}, ["2 times '1' for 1 ranks"]),
        (REPORT * 2, {"code": 0, "quiet": True}, ["2 reports instead of 1", "stderr is not empty"]),
        ("import time; time.sleep(1000)", {"limit": 1.0}, ["still running"]),
        pytest.param(CHILD, {"code": 0, "reports": 0}, ["1 processes outlive the job"], marks=pytest.mark.long),
    ],
)
def test_judgement(program, options, problems):
    found = play(Case(Fault("a name", "a class", program, **options), 0, RUN))[:-1]  # the last is what was printed
    assert all(problem in text for problem, text in zip(problems, found, strict=True)), found
