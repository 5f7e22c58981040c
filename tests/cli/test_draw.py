"""`python -m mpipipe draw`: pictures of schedules in one process, and one report where none can be drawn."""

import pytest
from support.command_line import invoke
from support.svg import texts

from mpipipe import schedules

pytest.importorskip("matplotlib")

TWO = ["--ranks", "2", "--microbatches", "3"]
GPIPE = ["--schedule", "gpipe", *TWO]


@pytest.fixture
def draw(alone, monkeypatch, tmp_path):
    """draw(arguments): the outcome of the command, in this process and in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: invoke("draw", *arguments)


def test_a_timeline_has_the_costs_that_were_given(draw):
    times = ["--forward", "0.5,1.5", "--input-grad", "2", "--weight-grad", "0.25", "--transfer", "0.5"]
    done = draw("timeline", "--schedule", "one_f_one_b", *TWO, *times, "--out", "a.svg")
    assert done.code == 0, done.report
    assert texts("a.svg")[1].words == "makespan 15, bubble 35.0%"  # idle 10.5 of 2 x 15, by hand


@pytest.mark.parametrize("what", ["timeline", "memory"])
def test_an_order_is_drawn_from_its_file(draw, tmp_path, what):
    (tmp_path / "order.CSV").write_text(schedules.zero_bubble_h1(2, 3).to_csv())
    done = draw(what, "--schedule", "order.CSV", "--forward", "1,2", "--out", "a.svg")
    assert done.code == 0, done.report
    assert texts("a.svg")[0].words.startswith("csv: 2 ranks, 3 micro-batches")
    assert draw(what, "--schedule", "order.CSV", "--out", "a.png").code == 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["--schedule", "order.csv", "--ranks", "2"], "--ranks does not go with --schedule order.csv"),
        (["--schedule", "order.csv"], "order.csv: slot 0: B before its forward"),
        (["--schedule", "absent.csv"], "the order of the schedule cannot be read: No such file"),
        ([*GPIPE, "--out", "a.pdf"], "ends in .png or .svg"),
        ([*GPIPE, "--out", "absent/a.svg"], "there is no such folder"),
        ([*GPIPE, "--forward", "-1"], "the cost forward does not fit"),
        ([*GPIPE, "--transfer", "1,2,3"], "the cost transfer does not fit"),
        ([*GPIPE, "--weight-grad", "much"], "--weight-grad is no list of numbers"),
    ],
)
def test_what_cannot_be_drawn_is_one_report_and_no_file(draw, tmp_path, words, match):
    (tmp_path / "order.csv").write_text("0B0,0F0")
    done = draw("timeline", "--out", "a.svg", *words)
    assert (done.code, match in done.report) == (2, True), done.report
    assert done.report.startswith("mpipipe: stopped:\n")
    assert [path.name for path in tmp_path.iterdir()] == ["order.csv"]


def test_a_file_that_exists_stays(draw, tmp_path):
    (tmp_path / "a.svg").write_text("mine")
    done = draw("memory", "--schedule", "gpipe", *TWO, "--out", "a.svg")
    assert "there is a file or folder of this name already" in done.report
    assert (tmp_path / "a.svg").read_text() == "mine"
