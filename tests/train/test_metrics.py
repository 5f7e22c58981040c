"""TensorBoard gets each number and cannot end a training; metrics.jsonl is cut off at a resume."""

import io
import json
import struct
import sys

import pytest

from mpipipe.errors import BackendError, ConfigError
from mpipipe.train import report
from mpipipe.train.report import Record, Reporter

RECORDS = [Record(0, validation=5.5), Record(1, 0.1 + 0.2), Record(2, 2.0, 2.5)]


def write_all(folder, done=None, records=RECORDS):
    with Reporter(9, folder, io.StringIO(), done=done, tensorboard=True) as reporter:
        for record in records:
            reporter.record(record)


def events_of(folder):
    """Yield each event of the event files, by the definition of TFRecord files."""
    event_pb2 = pytest.importorskip("tensorboardX.proto.event_pb2")
    for path in sorted(folder.glob("tensorboard/events.*")):
        content, at = path.read_bytes(), 0
        while at < len(content):
            (size,) = struct.unpack_from("<Q", content, at)
            yield event_pb2.Event.FromString(content[at + 12 : at + 12 + size])
            at += 16 + size


def test_tensorboard_gets_each_number_with_its_step_and_time(tmp_path, capsys):
    pytest.importorskip("tensorboardX")
    write_all(tmp_path)
    expected = [
        (record["step"], record["time"], name, pytest.approx(value, rel=1e-6))  # its floats have 32 bits
        for record in map(json.loads, (tmp_path / report.METRICS).read_text().splitlines())
        for name, value in record.items()
        if name not in ("step", "time")
    ]
    events = list(events_of(tmp_path))
    found = [
        (event.step, event.wall_time, value.tag, value.simple_value)
        for event in events
        for value in event.summary.value
    ]
    assert [name for *_, name, _ in found] == [
        "validation",
        "seconds",
        "loss",
        "seconds",
        "loss",
        "validation",
        "seconds",
    ]
    assert found == expected and not any(event.HasField("session_log") for event in events)
    assert not capsys.readouterr().err


def test_a_resumed_training_tells_tensorboard_to_hide_what_came_before_from_its_next_step_on(tmp_path):
    pytest.importorskip("tensorboardX")
    write_all(tmp_path)
    write_all(tmp_path, done=1, records=RECORDS[2:])  # into a file of its own
    starts = [event for event in events_of(tmp_path) if event.HasField("session_log")]
    assert [(event.step, event.session_log.status) for event in starts] == [(2, 1)]  # 1: START


@pytest.mark.parametrize("at", ["__init__", "add_scalar", "close"])
def test_a_library_that_fails_is_left_out_with_one_warning(tmp_path, monkeypatch, capsys, at):
    library = pytest.importorskip("tensorboardX")

    def fail(*_, **__):
        raise RuntimeError("no room\nand many lines more")

    monkeypatch.setattr(library.SummaryWriter, at, fail)
    write_all(tmp_path)
    warning = "mpipipe: no more metrics go to TensorBoard: no room; the training goes on\n"
    assert capsys.readouterr().err == warning
    assert (tmp_path / report.LOG).read_text().count(warning) == 1


def test_a_missing_library_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(BackendError, match="tensorboardX") as caught:
        report.check_tensorboard()
    assert "'.[tensorboard]'" in caught.value.remedy


# -- metrics.jsonl over a resume: cut off after the checkpoint, as a whole, and never another program's file ----------


LINES = [json.dumps({"step": step, "loss": 1.0}) + "\n" for step in range(5)]


@pytest.mark.parametrize("tail", ["", '{"step": 9, "lo', "{"])
@pytest.mark.parametrize("step", [0, 1, 3, 4, 7])
def test_records_behind_a_step_and_a_torn_line_are_cut_off_and_nothing_else_is_touched(tmp_path, step, tail):
    path = tmp_path / report.METRICS
    path.write_text("".join(LINES) + tail)
    before = path.stat().st_ino
    report.cut(tmp_path, step)
    assert path.read_text() == "".join(LINES[: step + 1] if step else [])
    assert [file.name for file in tmp_path.iterdir()] == [report.METRICS]
    if not tail and step >= 4:
        assert path.stat().st_ino == before  # what needs no cut is not written anew
    report.cut(tmp_path / "absent", step)
    assert not (tmp_path / "absent").exists()


@pytest.mark.parametrize(
    "text", ["precious", "precious\n", "[]\n", '{"loss": 1}\n', '{"step": "1"}\n', '{"step": 1}\n\n', "\xff\n"]
)
def test_what_is_no_record_is_refused_with_the_file(tmp_path, text):
    path = tmp_path / report.METRICS
    path.write_bytes(text.encode("latin1"))
    with pytest.raises(ConfigError, match="cannot be used") as caught:
        report.cut(tmp_path, 3)
    assert caught.value.found == str(path) and path.read_bytes() == text.encode("latin1")
