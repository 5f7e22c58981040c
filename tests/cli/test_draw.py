"""`python -m mpipipe draw`: pictures of schedules in one process, and one report where none can be drawn."""

from __future__ import annotations

import json
import shutil
import sys

import pytest
from support.command_line import invoke
from support.launch import ROOT
from support.svg import texts

from mpipipe import schedules
from mpipipe.job import settings

pytest.importorskip("matplotlib")

TWO = ["--ranks", "2", "--microbatches", "3"]


@pytest.fixture
def draw(monkeypatch, tmp_path):
    """draw(arguments): the outcome of the command, in this process and in an empty folder."""
    monkeypatch.setattr(settings, "launcher_size", lambda environment: None)
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


@pytest.mark.parametrize("what", ["timeline", "memory"])
def test_slices_are_drawn(draw, what):
    done = draw(what, "--schedule", "gpipe", "--ranks", "2", "--microbatches", "1", "--slices", "4", "--out", "a.svg")
    assert done.code == 0, done.report
    assert texts("a.svg")[0].words == "gpipe: 2 ranks, 1 micro-batch in 4 slices"


@pytest.mark.parametrize("what", ["timeline", "memory"])
def test_an_order_is_drawn_from_its_file(draw, tmp_path, what):
    (tmp_path / "order.CSV").write_text(schedules.zero_bubble_h1(2, 3).to_csv())
    done = draw(what, "--schedule", "order.CSV", "--forward", "1,2", "--out", "a.svg")
    assert done.code == 0, done.report
    assert texts("a.svg")[0].words.startswith("csv: 2 ranks, 3 micro-batches")


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["order.csv", "--ranks", "2"], "--ranks does not go with a file"),
        (["order.csv"], "order.csv: slot 0: B before its forward"),
        (["absent.csv"], "the order of the schedule cannot be read: No such file"),
        (["gpipe", "--ranks", "2"], "a schedule has no sizes of its own"),
    ],
)
def test_a_file_or_sizes_that_cannot_be_drawn_are_refused(draw, tmp_path, words, match):
    (tmp_path / "order.csv").write_text("0B0,0F0")
    done = draw("timeline", "--out", "a.svg", "--schedule", *words)
    assert done.code == 2 and match in done.report


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


@pytest.fixture
def recorded(tmp_path, draw):
    """The folder of a trace of four ranks, 3 steps, 1F1B and 8 micro-batches."""
    shutil.copytree(ROOT / "docs" / "figures" / "trace", tmp_path / "trace")
    return tmp_path / "trace"


def summary_of(folder):
    return json.loads((folder / "summary.json").read_text())


def test_the_parts_of_a_trace_are_drawn_for_the_mean_step_and_for_any(draw, recorded):
    summary = summary_of(recorded)
    for number, step in enumerate([None, 0, 2]):
        chosen = [] if step is None else ["--step", str(step)]
        done = draw("split", "--trace", "trace", "--out", f"{number}.svg", *chosen)
        assert done.code == 0, done.report
        parts = list(summary["parts"].values())
        if step is not None:
            parts = [steps[step] for steps in summary["parts_of_steps"].values()]
        mean = sum(sum(each.values()) for each in parts) / 4
        words = [text.words for text in texts(f"{number}.svg")]
        assert f"4 ranks, {mean:.4g} s each on average" in words
        share = parts[0]["compute"] / sum(parts[0].values())
        assert f"compute {share:.0%}" in words


def test_a_step_of_a_trace_is_drawn_below_its_prediction(draw, recorded):
    done = draw("trace", "--trace", "trace", "--step", "1", "--out", "a.svg")
    assert done.code == 0, done.report
    words = [text.words for text in texts("a.svg")]
    spans = [event for event in json.loads((recorded / "trace.json").read_text()) if event["args"]["step"] == 1]
    lasted = max(e["ts"] + e["dur"] for e in spans) - min(e["ts"] for e in spans)
    assert any(text.startswith(f"measured: {lasted / 1e3:.4g}, ") for text in words)
    assert words.count("one_f_one_b: 4 ranks, 8 micro-batches") == 1 and "time, in ms" in words


def test_without_a_number_the_step_of_median_time_is_drawn(draw, recorded):
    times = [sum(step.values()) for step in summary_of(recorded)["parts_of_steps"]["0"]]
    middle = sorted(range(3), key=times.__getitem__)[1]
    for name, chosen in (("a.svg", []), ("b.svg", ["--step", str(middle)])):
        assert draw("trace", "--trace", "trace", "--out", name, *chosen).code == 0
    assert texts("a.svg") == texts("b.svg")


@pytest.mark.parametrize("what", ["split", "trace"])
@pytest.mark.parametrize(
    "change, match",
    [
        (["--trace", "absent"], "cannot be read"),
        (["--step", "3"], "no such step"),
        (["--step", "-1"], "no such step"),
        (["--out", "a.pdf"], "ends in .png or .svg"),
    ],
)
def test_a_trace_that_cannot_be_drawn_is_one_report(draw, recorded, tmp_path, what, change, match):
    done = draw(what, "--trace", "trace", "--out", "a.svg", *change)
    assert (done.code, match in done.report) == (2, True), done.report
    assert [path.name for path in tmp_path.iterdir()] == ["trace"]


def test_a_replica_that_was_not_recorded_is_refused(draw, recorded):
    done = draw("trace", "--trace", "trace", "--out", "a.svg", "--replica", "1")
    assert "the trace has no such replica" in done.report


@pytest.mark.parametrize(
    "change",
    [
        dict(order="0F0"),
        dict(order=None),
        dict(costs={"forward": [1, 2]}),
        dict(costs={"forward": "much"}),
        dict(parts={}),
        dict(parts=[1]),
        dict(parts_of_steps={"0": []}),
        dict(places={"0": [0]}),
        dict(trained_from="x"),
    ],
    ids=repr,
)
def test_a_summary_that_was_changed_is_one_report(draw, recorded, change):
    (recorded / "summary.json").write_text(json.dumps({**summary_of(recorded), **change}))
    assert "the folder holds no trace" in draw("trace", "--trace", "trace", "--out", "a.svg").report


@pytest.mark.parametrize("text", ["", "[1]", '[{"ph": "X"}]', "{", "null"], ids=repr)
def test_events_that_are_none_are_one_report(draw, recorded, text):
    (recorded / "trace.json").write_text(text)
    report = draw("trace", "--trace", "trace", "--out", "a.svg").report
    assert "a file of the trace cannot be read" in report or "the folder holds no trace" in report


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
    assert done.report.startswith("mpipipe: stopped:\n")
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
    assert "pip install '.[plot]'" in done.report


def test_several_ranks_are_refused(draw, monkeypatch):
    monkeypatch.setattr(settings, "launcher_size", lambda environment: ("mpiexec", 4))
    done = draw("timeline", "--schedule", "gpipe", *TWO, "--out", "a.svg")
    assert "draw is for one process" in done.report and "4 ranks" in done.report
