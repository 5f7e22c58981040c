"""Lines for people and JSON for programs say the same thing; neither a full disk nor a library ends a training."""

import io
import json
import os
import re
import struct
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpipipe.errors import BackendError, ConfigError
from mpipipe.train import report, screen
from mpipipe.train.report import Record, Reporter, bubble_explained
from mpipipe.train.screen import JsonLines, folded


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
    assert re.search(
        r"step 10/20  loss 2.0000  lr 1.0e-03  norm 0.750  1234 bytes/s  0:00:\d\d, 0:00:\d\d left\n", shown
    )
    assert "step 10/20  validation 2.5000\n" in shown
    assert re.search(r"step 11/20  loss 2.0000  scale 32768  skipped 3  0:00:\d\d, 0:00:\d\d left\n", shown)
    assert "[bold]text[/bold] " + "x" * 200 + "\n" in shown
    assert (tmp_path / "train.log").read_text() == shown


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
    assert lines == ["0:00:00", "0:00:20, 0:01:00 left", "0:00:20, 0:01:00 left", "0:00:20"]
    seconds = [clocked(line)[1][1] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert seconds == [0.0, 20.0, 0.0, 0.0]


# -- TensorBoard gets each number, and cannot end a training ----------------------------------------------------------


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


def test_tensorboard_gets_each_number_with_its_step_and_time(tmp_path, capfd):
    pytest.importorskip("tensorboardX")
    write_all(tmp_path)
    expected = []
    for record in map(json.loads, (tmp_path / report.METRICS).read_text().splitlines()):
        step, time = record.pop("step"), record.pop("time")
        # its floats have 32 bits
        expected += [(step, time, name, pytest.approx(value, rel=1e-6)) for name, value in record.items()]
    events = list(events_of(tmp_path))
    found = [(event.step, event.wall_time, e.tag, e.simple_value) for event in events for e in event.summary.value]
    assert len(found) == 7 and found == expected and not any(event.HasField("session_log") for event in events)
    assert not capfd.readouterr().err


def test_a_resumed_training_tells_tensorboard_to_hide_what_came_before_from_its_next_step_on(tmp_path):
    pytest.importorskip("tensorboardX")
    write_all(tmp_path)
    write_all(tmp_path, done=1, records=RECORDS[2:])  # into a file of its own
    starts = [event for event in events_of(tmp_path) if event.HasField("session_log")]
    assert [(event.step, event.session_log.status) for event in starts] == [(2, 1)]  # 1: START


@pytest.mark.parametrize("at", ["__init__", "add_scalar", "close"])
def test_a_library_that_fails_is_left_out_with_one_warning(tmp_path, monkeypatch, capfd, at):
    library = pytest.importorskip("tensorboardX")

    def fail(*_, **__):
        raise RuntimeError("no room\nand many lines more")

    monkeypatch.setattr(library.SummaryWriter, at, fail)
    write_all(tmp_path)
    warning = "mpipipe: no more metrics go to TensorBoard: no room; the training goes on\n"
    assert capfd.readouterr().err == warning
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


# -- streams and files that cannot be written, and names that are no text ----------------------------------------------


def test_lines_that_find_no_room_are_left_out_whole(tmp_path, room, monkeypatch):
    path, said = tmp_path / "lines", []
    monkeypatch.setattr(screen, "write", said.append)
    path.write_text("first\n")
    with pytest.raises(FileExistsError):
        JsonLines(path)
    lines = JsonLines(path, goes_on=True)
    room(10)
    for line in ("second", "third"):
        lines.append(line)
        assert path.read_text() == "first\n"  # "seco" would be a torn line
    room(None)
    lines.append("fourth")
    assert path.read_text() == "first\nfourth\n"
    lines.close()
    assert len(said) == 1 and "cannot be written" in said[0]


def test_a_reporter_without_an_output_still_writes_metrics(tmp_path, monkeypatch, capfd):
    reader, writer = os.pipe()
    os.close(reader)
    closed = io.StringIO()
    closed.close()
    for number, stream in enumerate((None, open(writer, "w"), closed)):
        monkeypatch.setattr(sys, "stdout", stream)
        (tmp_path / str(number)).mkdir()
        with Reporter(5, tmp_path / str(number), stream) as reporter:
            reporter.record(Record(1, loss=1.0))
            reporter.say("text")
        record = json.loads((tmp_path / str(number) / "metrics.jsonl").read_text())
        assert (record["step"], record["loss"]) == (1, 1.0)
    assert capfd.readouterr().err == ""


C_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.mark.long
def test_names_that_are_no_text_do_not_end_a_training(launch, tmp_path):
    """In the C locale no letter outside of ASCII is text."""
    text, out, plan = (
        tmp_path / os.fsdecode(name) for name in (b"l\xe4uft.txt", b"\xe4\xff", b"gr\xc3\xb6\xc3\x9fe.toml")
    )
    text.write_text("one two three four\n" * 200)
    plan.write_bytes(b"dim = 16\nlayers = 2\nheads = 2\nhidden = 32\nseq_len = 16\nbatch = 8\n")
    options = ["--data", text, "--sample-bytes", 4, "--eval-batches", 1, "--log-every", 1, "--save-every", 1]
    command = ["-m", "mpipipe", "train", "--config", plan, *options, "--out", out]
    for steps, more in ((2, ["--trace", tmp_path / "spür"]), (3, ["--resume", "auto"])):
        job = launch(2, [*command, "--steps", steps, *more], env=C_LOCALE)
        assert job.returncode == 0, job.stderr
        assert f"mpipipe: ok steps={steps}" in job.stdout and not job.stderr
        assert any((out / "weights").glob("step-*/manifest.json"))
