"""`python -m mpipipe draw`: pictures of schedules in one process, and one report where none can be drawn."""

from __future__ import annotations

import sys

import pytest
from support.command_line import invoke
from support.svg import texts

from mpipipe.comm import launcher

TWO = ["--ranks", "2", "--microbatches", "3"]


@pytest.fixture
def draw(monkeypatch, tmp_path):
    """draw(arguments): the outcome of the command, in this process and in an empty folder."""
    monkeypatch.setattr(launcher, "launcher_size", lambda environment: None)
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: invoke("draw", *arguments)


def test_a_job_of_one_process_draws(launch, tmp_path):
    out = tmp_path / "a.png"
    command = ["-m", "mpipipe", "draw", "timeline", "--schedule", "gpipe", *TWO, "--out", str(out)]
    job = launch(0, command, env={"MPI4PY_LIBMPI": "/nonexistent/libmpi.so"})
    assert (job.returncode, job.stdout) == (0, f"mpipipe: drawn into {out}\n"), job.stderr
    assert out.read_bytes().startswith(b"\x89PNG")


def test_a_timeline_has_the_costs_that_were_given(draw):
    times = ["--forward", "0.5,1.5", "--input-grad", "2", "--weight-grad", "0.25", "--transfer", "0.5"]
    done = draw("timeline", "--schedule", "one_f_one_b", *TWO, *times, "--out", "a.svg")
    assert done.code == 0, done.report
    assert texts("a.svg")[1].words == "makespan 15, bubble 35.0%"  # idle 10.5 of 2 x 15, by hand


def test_memory_of_a_schedule_with_chunks(draw):
    done = draw("memory", "--schedule", "zero_bubble_v", "--chunks", "2", *TWO, "--out", "a.svg")
    assert done.code == 0, done.report
    assert [text.words for text in texts("a.svg") if text.words.startswith("peak")] == ["peak 4", "peak 4"]


def test_chosen_schedules_are_compared(draw):
    chosen = ["--schedule", "gpipe", "--schedule", "v_half"]
    done = draw("compare", "--ranks", "2", "--microbatches", "2,4", *chosen, "--out", "a.svg")
    assert done.code == 0, done.report
    words = [text.words for text in texts("a.svg")]
    assert words.count("gpipe") == words.count("v_half") == 2 and "one_f_one_b" not in words


@pytest.mark.parametrize(
    "change, match",
    [
        (["--out", "a.pdf"], "ends in .png or .svg"),
        (["--out", "absent/a.svg"], "there is no such folder"),
        (["--schedule", "gpip"], "unknown schedule"),
        (["--chunks", "2"], "one stage per rank"),
        (["--ranks", "0"], "ranks is not a count"),
        (["--forward", "-1"], "the cost forward does not fit"),
        (["--forward", "nan"], "the cost forward does not fit"),
        (["--transfer", "1,2,3"], "the cost transfer does not fit"),
        (["--weight-grad", "much"], "--weight-grad is no list of numbers"),
    ],
)
def test_what_cannot_be_drawn_is_one_report_and_no_file(draw, change, match, tmp_path):
    done = draw("timeline", "--schedule", "gpipe", *TWO, "--out", "a.svg", *change)
    assert (done.code, match in done.report) == (2, True), done.report
    assert done.report.startswith("mpipipe: nothing is drawn\n")
    assert not list(tmp_path.iterdir())


def test_a_file_that_exists_stays(draw, tmp_path):
    (tmp_path / "a.svg").write_text("mine")
    done = draw("memory", "--schedule", "gpipe", *TWO, "--out", "a.svg")
    assert "there is a file or folder of this name already" in done.report
    assert (tmp_path / "a.svg").read_text() == "mine"


def test_without_matplotlib_nothing_is_simulated(draw, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("mpipipe.pictures.simulate_all", None)
    done = draw("compare", "--ranks", "2", "--microbatches", "2", "--out", "a.svg")
    assert "pip install 'mpipipe[plot]'" in done.report


def test_several_ranks_are_refused(draw, monkeypatch):
    monkeypatch.setattr(launcher, "launcher_size", lambda environment: ("mpiexec", 4))
    done = draw("timeline", "--schedule", "gpipe", *TWO, "--out", "a.svg")
    assert "draw is for one process" in done.report and "4 ranks" in done.report
