"""Lines for people and JSON for programs say the same thing."""

import io
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpipipe.train.report import Record, Reporter, bubble_explained, duration, lines_of
from mpipipe.train.screen import folded

FULL = Record(
    100_000, 12.3456, 12.5, 1e-3, 1234.567, 1_234_567.8, 0.25, 0.2, loss_scale=2.0**40, skipped=123,
    bits_per_byte=17.8111, validation_bits_per_byte=18.0337,
)  # fmt: skip


def clocked(line):
    """A record without the clock, and the clock."""
    record = json.loads(line)
    return record, (record.pop("time"), record.pop("seconds"))


def test_a_record_is_one_json_object_and_a_line_for_the_step_and_the_validation(tmp_path):
    stream = io.StringIO()
    with Reporter(20, tmp_path, stream, unit="bytes") as reporter:
        reporter.record(Record(0, validation=5.5))
        reporter.record(Record(10, 2.0, 2.5, 1e-3, 0.75, 1234.5, 0.25, 0.2))
        reporter.record(Record(11, 2.0, grad_norm=None, loss_scale=32768.0, skipped=3))
        reporter.say("[bold]text[/bold] " + "x" * 200)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    (first, _), (second, (time, seconds)), (third, (later, _)) = map(clocked, lines)
    assert first == {"step": 0, "validation": 5.5}
    assert list(second) == ["step", "loss", "validation", "lr", "grad_norm", "tokens_per_second", "bubble", "predicted"]
    assert third == {"step": 11, "loss": 2.0, "loss_scale": 32768.0, "skipped": 3}
    assert later >= time > 1.6e9 and seconds >= 0  # seconds since 1970, and since the record before
    shown = stream.getvalue()
    assert "step  0/20  validation 5.5000\n" in shown
    assert re.search(r"step 10/20  loss 2.0000  lr 1.0e-03  norm 0.750  1234 bytes/s  \d+s, \d+s left\n", shown)
    assert "step 10/20  validation 2.5000\n" in shown
    assert re.search(r"step 11/20  loss 2.0000  scale 32768  skipped 3  \d+s, \d+s left\n", shown)
    assert "[bold]text[/bold] " + "x" * 200 + "\n" in shown
    assert (tmp_path / "train.log").read_text() == shown


def test_the_lines_of_a_record_say_all_that_is_known():
    step, validation = lines_of(FULL, 300_000, "tokens", "12d03h, 120d04h left")
    assert step == (
        "step 100000/300000  loss 12.3456  bits/byte 17.8111  lr 1.0e-03  norm 1234.567  1234568 tokens/s  "
        "scale 1.09951e+12  skipped 123  12d03h, 120d04h left"
    )
    assert validation == "step 100000/300000  validation 12.5000  bits/byte 18.0337"


@pytest.mark.parametrize(
    ("bubble", "predicted", "oversubscribed", "text"),
    [
        (0.64, 0.3, "4 ranks share 2 cores", ": 30% by the schedule, 34% mostly since 4 ranks share 2 cores"),
        (0.2, 0.19, "4 ranks share 2 cores", ", by schedule and stages; more micro-batches or evener stages help"),
        (0.3, 0.19, None, ": 19% by the schedule, 11% by waiting for messages or batches"),
        (0.3, 0.0, None, None),  # one stage: what makes it is not the pipeline
        (0.01, 0.005, "4 ranks share 2 cores", None),
    ],
)  # fmt: skip
def test_the_bubble_is_explained_by_what_makes_it(bubble, predicted, oversubscribed, text):
    found = bubble_explained(Record(1, bubble=bubble, predicted=predicted), oversubscribed)
    assert found == ("" if text is None else f"mpipipe: bubble {bubble:.0%} (ranks idle){text}")
    assert len(found) <= 100


def test_the_bubble_is_explained_once_and_not_by_the_first_step(tmp_path):
    stream = io.StringIO()
    with Reporter(9, tmp_path, stream) as reporter:
        for step in range(5):
            reporter.record(Record(step, loss=1.0, bubble=0.9 if step == 1 else 0.5, predicted=0.5 if step else None))
    assert stream.getvalue().count("bubble") == 1
    assert "bubble 50%" in stream.getvalue().partition("step 2/9")[2].partition("step 3/9")[0]


def test_metrics_can_be_read_while_the_training_goes_on_and_those_of_another_run_are_never_overwritten(tmp_path):
    written = io.BytesIO()
    with Reporter(5, tmp_path, io.TextIOWrapper(written, encoding="ascii")) as reporter:
        reporter.record(Record(1, loss=1.0))
        before = (tmp_path / "metrics.jsonl").read_text()
        assert clocked(before)[0] == {"step": 1, "loss": 1.0}
        reporter.say("gr\u00fcn")  # what the stream cannot show is escaped
    assert written.getvalue().endswith(b"\ngr\\xfcn\n")
    assert (tmp_path / "train.log").read_text().endswith("\ngr\u00fcn\n")
    with pytest.raises(FileExistsError):
        Reporter(5, tmp_path, io.StringIO())
    assert (tmp_path / "metrics.jsonl").read_text() == before


@given(st.text(st.sampled_from("ab -\t\n"), max_size=400))
def test_folding_breaks_lines_and_changes_nothing_else(text):
    found = folded(text)
    assert max(map(len, found.split("\n"))) <= 100
    assert found.replace("\n", "") == text.replace("\n", "")
    if max(map(len, text.split("\n"))) <= 100:
        assert found == text


def test_times_are_short():
    seconds = (0, 59.9, 60, 3599, 3600, 86_399, 90_000)
    assert [*map(duration, seconds)] == ["0s", "59s", "1m00s", "59m59s", "1h00m", "23h59m", "1d01h"]


def test_the_time_left_counts_only_the_steps_of_this_start(tmp_path, monkeypatch):
    now = 1000.0
    monkeypatch.setattr("mpipipe.train.report.time.monotonic", lambda: now)
    stream = io.StringIO()
    with Reporter(100, tmp_path, stream, done=60) as reporter:
        reporter.record(Record(60, 1.0))
        now += 20.0
        for step in (70, 70, 100):
            reporter.record(Record(step, 1.0))
    lines = [line.partition("loss 1.0000  ")[2] for line in stream.getvalue().splitlines()]
    assert lines == ["0s", "20s, 1m00s left", "20s, 1m00s left", "20s"]
    seconds = [clocked(line)[1][1] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert seconds == [0.0, 20.0, 0.0, 0.0]
