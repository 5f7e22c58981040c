"""bench all: lines of benches become rows of a page, and what cannot be measured is named."""

import subprocess

import pytest

from mpipipe.bench import results
from mpipipe.bench.results import Bench
from mpipipe.bench.timing import report
from mpipipe.errors import BackendError


class Alone:
    rank, size = 0, 1


@pytest.fixture
def jobs(monkeypatch, capsys):
    """Let benches be jobs that print a line of their own, each run a larger ratio; returns their commands."""
    ran = []

    def run(command, **options):
        ran.append(command)
        report(Alone(), f"a  step of {command[-1]}", "2 s,  peer 1 s", len(ran) / 4, "at most 0.9")
        report(Alone(), "a line without a ratio", "3 s")
        return subprocess.CompletedProcess(command, 0, capsys.readouterr().out, "")

    monkeypatch.setattr(subprocess, "run", run)
    return ran


def test_each_line_with_a_ratio_is_a_row_of_all_runs(jobs, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(results, "BENCHES", (Bench("pipeline"), Bench("attention", 1), Bench("gpu", 1, "GPU")))
    monkeypatch.setattr(results.arrays, "device_count", lambda: 0)
    monkeypatch.setattr(results.environment, "gather", lambda comm, gpus: FACTS)
    results.every(3, str(tmp_path / "new"))
    page = (tmp_path / "new" / "results.md").read_text()
    row = "2 s, peer 1 s | `mpiexec -n 2 python -m mpipipe bench pipeline` |"
    assert f"| a step of pipeline | 0.50 | 0.25 | 0.75 | at most 0.9 | {row}" in page
    assert "| a step of attention | 1.25 | 1.00 | 1.50 |" in page and "without a ratio" not in page
    assert "- `python -m mpipipe bench gpu`: no GPU" in page
    assert "on a processor, 2 cores, numpy 2.0. Of each bench 3 runs" in page
    assert "2 rows; this machine cannot show 1 of 3 benches" in capsys.readouterr().out
    assert [command[-1] for command in jobs] == ["pipeline"] * 3 + ["attention"] * 3
    assert "-n" in jobs[0] and "-n" not in jobs[3]


FACTS = {"mpipipe": "0", "packages": {"numpy": "2.0"}, "hosts": [{"processor": "a processor", "cores": 2}]}


def test_a_bench_that_fails_is_named_with_its_error(monkeypatch, tmp_path):
    failed = subprocess.CompletedProcess([], 3, "", "its error")
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: failed)
    with pytest.raises(BackendError, match=r"(?s)bench pipeline did not end well.*exit code 3.*its error"):
        results.every(1, str(tmp_path))
    assert not (tmp_path / "results.md").exists()
