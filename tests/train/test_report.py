"""Lines for people and JSON for programs say the same thing."""

from __future__ import annotations

import io
import json

import pytest

from mpipipe.train.report import Record, Reporter


@pytest.mark.parametrize("terminal", [False, True])
def test_a_record_is_one_line_and_one_json_object(tmp_path, terminal):
    stream, path = io.StringIO(), tmp_path / "metrics.jsonl"
    with Reporter(20, path, stream, terminal) as reporter:
        reporter.record(Record(0, validation=5.5))
        for _ in range(10):
            reporter.advance()
        reporter.record(Record(10, 2.0, 2.5, 1e-3, 0.75, 1234.5, 0.25, 0.2))
        reporter.record(Record(11, 2.0, grad_norm=None, loss_scale=32768.0, skipped=3))
        reporter.say("[bold]text[/bold] " + "x" * 200)
    first, second, third = map(json.loads, path.read_text().splitlines())
    assert first == {"step": 0, "validation": 5.5}
    assert list(second) == ["step", "loss", "validation", "lr", "grad_norm", "tokens_per_second", "bubble", "predicted"]
    assert third == {"step": 11, "loss": 2.0, "loss_scale": 32768.0, "skipped": 3}
    lines = stream.getvalue()
    assert ("\x1b" in lines) == terminal
    assert "step  0/20  validation 5.5000\n" in lines
    assert "step 10/20  loss 2.0000  validation 2.5000  lr 1.00e-03  norm 0.750  tokens/s 1234  bubble 0.250" in lines
    assert "step 11/20  loss 2.0000  scale 32768  skipped 3\n" in lines
    assert "[bold]text[/bold] " + "x" * 200 + "\n" in lines


def test_metrics_can_be_read_while_the_training_goes_on(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with Reporter(5, path, io.StringIO()) as reporter:
        reporter.record(Record(1, loss=1.0))
        assert json.loads(path.read_text()) == {"step": 1, "loss": 1.0}


def test_metrics_of_another_run_are_never_overwritten(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("precious")
    with pytest.raises(FileExistsError):
        Reporter(5, path, io.StringIO())
    assert path.read_text() == "precious"


def test_what_the_stream_cannot_show_is_escaped(tmp_path):
    written = io.BytesIO()
    stream = io.TextIOWrapper(written, encoding="ascii")
    with Reporter(5, tmp_path / "metrics.jsonl", stream) as reporter:
        reporter.say("gr\u00fcn")
    assert written.getvalue() == b"gr\\xfcn\n"
