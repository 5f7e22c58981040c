"""What a run of the tests leaves for later ones: how long each test took, and a verdict on what was skipped.

`tests/durations.json` has the seconds of every test that took a second or more; the ranks begin with the longest.
MPIPIPE_TEST_DURATIONS=1 brings it up to date. MPIPIPE_TEST_SKIPS=strict lets a run fail in which a test was skipped for
a reason that is not in `EXPECTED`: where everything is installed, a library that is not must not turn its tests off
unseen.
"""

import json
import os
import re
from pathlib import Path

FILE = Path(__file__).parents[1] / "durations.json"
LEAST = 1.0  # seconds that are worth a line
EXPECTED = (
    r"needs \d+ ranks",
    r"MPIPIPE_TEST_LONG=1",
    r"No module named '(torch|transformers|peft|jax|tensorboard)'",  # of the extra [judges], or judges of sinks
    r"CuPy is not installed|nvidia-cudnn-frontend is not installed|no hipRTC",
    r"needs SLURM",
    r"no SimGrid for",
    r"(NPY_DISABLE_CPU_FEATURES|OPENBLAS_CORETYPE) is not set",
    r"for one rank|one SLURM on a machine",
    r"more than two replicas add in another order",
    r"the backward may come before the next forward",
)


def seconds() -> dict[str, float]:
    """{node id: seconds} of the tests that take long."""
    return json.loads(FILE.read_text()) if FILE.exists() else {}


class Ledger:
    """The pytest plugin of rank 0, which is shown the reports of all ranks."""

    def __init__(self) -> None:
        self.took: dict[str, float] = {}
        self.unexpected: dict[str, str] = {}

    def pytest_runtest_logreport(self, report):
        self.took[report.nodeid] = self.took.get(report.nodeid, 0.0) + report.duration
        self.pytest_collectreport(report)

    def pytest_collectreport(self, report):
        if report.skipped and not hasattr(report, "wasxfail"):
            reason = report.longrepr[-1].removeprefix("Skipped: ")
            if not any(re.search(pattern, reason) for pattern in EXPECTED):
                self.unexpected[report.nodeid] = reason

    def pytest_sessionfinish(self, session):
        if os.environ.get("MPIPIPE_TEST_DURATIONS") == "1":
            kept = {name: value for name, value in seconds().items() if name not in self.took}
            new = {name: round(value, 1) for name, value in self.took.items() if value >= LEAST}
            FILE.write_text(json.dumps(dict(sorted({**kept, **new}.items())), indent=0) + "\n")
        if os.environ.get("MPIPIPE_TEST_SKIPS") == "strict" and self.unexpected and session.exitstatus == 0:
            session.exitstatus = 1

    def pytest_terminal_summary(self, terminalreporter):
        if os.environ.get("MPIPIPE_TEST_SKIPS") == "strict":
            for name, reason in sorted(self.unexpected.items()):
                terminalreporter.write_line(f"SKIPPED unexpectedly: {name}: {reason}")
