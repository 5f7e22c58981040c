"""Metrics go to several places at once, and none of these can end a training."""

from __future__ import annotations

import csv
import json
import os
import struct
import subprocess
import sys

import pytest

from mpipipe.errors import ArgumentError, BackendError, ConfigError
from mpipipe.train import sinks
from mpipipe.train.sinks import SinkContext, Sinks, parse_names

COLUMNS = ("step", "loss", "validation", "time", "seconds")
RECORDS = [
    {"step": 0, "validation": 5.5, "time": 1e9, "seconds": 0.5},
    {"step": 1, "loss": 0.1 + 0.2, "time": 1e9 + 1, "seconds": 1.0},
    {"step": 2, "loss": 2.0, "validation": 2.5, "time": 1e9 + 3, "seconds": 2.0},
]


def run_in(folder, done=0):
    return SinkContext(folder, done, COLUMNS, {"steps": 2})


def write_all(names, run, records=RECORDS):
    told = []
    opened = Sinks(names, run, told.append)
    for record in records:
        opened.write(record)
    opened.close()
    opened.close()
    return told


def rows_of(folder):
    with open(folder / "metrics.csv", newline="") as file:
        return [
            {name: float(cell) if name != "step" else int(cell) for name, cell in row.items() if cell}
            for row in csv.DictReader(file)
        ]


def events_of(folder):
    """(step, wall time, {tag: value}) of each scalar in the event files, by the definition of TFRecord files."""
    event_pb2 = pytest.importorskip("tensorboardX.proto.event_pb2")
    found = []
    for path in sorted(folder.glob("tensorboard/events.*")):
        content, at = path.read_bytes(), 0
        while at < len(content):
            (size,) = struct.unpack_from("<Q", content, at)
            event = event_pb2.Event.FromString(content[at + 12 : at + 12 + size])
            found += [(event.step, event.wall_time, value.tag, value.simple_value) for value in event.summary.value]
            at += 16 + size
    return found


def test_csv_has_each_record_to_the_bit_and_can_be_read_while_the_training_goes_on(tmp_path):
    opened = Sinks(["csv"], run_in(tmp_path), pytest.fail)
    for number, record in enumerate(RECORDS, 1):
        opened.write(record)
        assert rows_of(tmp_path) == RECORDS[:number]
    opened.close()
    assert (tmp_path / "metrics.csv").read_text().splitlines()[0] == ",".join(COLUMNS)


def test_csv_of_a_resumed_training_has_the_records_before_it_and_none_behind(tmp_path):
    """Whatever the table held: metrics.jsonl tells what is true."""
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in RECORDS[:2]))
    (tmp_path / "metrics.csv").write_text("step,loss\n7,8\n")
    assert write_all(["csv"], run_in(tmp_path, done=1), RECORDS[2:]) == []
    assert rows_of(tmp_path) == RECORDS


def test_tensorboard_gets_each_number_with_its_step_and_time(tmp_path):
    pytest.importorskip("tensorboardX")
    assert write_all(["tensorboard"], run_in(tmp_path)) == []
    expected = [
        (record["step"], record["time"], name, pytest.approx(value, rel=1e-6))  # its floats have 32 bits
        for record in RECORDS
        for name, value in record.items()
        if name not in ("step", "time")
    ]
    assert events_of(tmp_path) == expected


def test_the_reader_of_tensorboard_opens_it_and_hides_what_was_resumed_before(tmp_path):
    pytest.importorskip("tensorboardX")
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    assert write_all(["tensorboard"], run_in(tmp_path)) == []
    assert write_all(["tensorboard"], run_in(tmp_path, done=1), [{**RECORDS[2], "loss": 1.5}]) == []
    found = reader.EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert [(event.step, event.value) for event in found.Scalars("validation")] == [(0, 5.5), (2, 2.5)]
    assert [(event.step, event.value) for event in found.Scalars("loss")] == [(1, pytest.approx(0.3)), (2, 1.5)]


OFFLINE = """
import json, sys
from pathlib import Path
from mpipipe.train.sinks import SinkContext, Sinks
opened = Sinks(["wandb"], SinkContext(Path(sys.argv[1]), 0, ("step", "loss"), {"steps": 2}), sys.exit)
for record in json.loads(sys.argv[2]):
    opened.write(record)
opened.close()
"""


@pytest.mark.long
def test_wandb_writes_offline_without_network_and_account(tmp_path):
    """In a process of its own, with nothing of the user's, and a proxy that would refuse whatever it sends."""
    pytest.importorskip("wandb")
    nowhere = {"HOME": str(tmp_path / "home"), "https_proxy": "http://127.0.0.1:9", "http_proxy": "http://127.0.0.1:9"}
    names = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH")
    kept = {name: os.environ[name] for name in names if name in os.environ}
    command = [sys.executable, "-c", OFFLINE, str(tmp_path), json.dumps(RECORDS)]
    job = subprocess.run(command, env={**kept, **nowhere}, capture_output=True, text=True, timeout=100)
    assert (job.returncode, job.stderr) == (0, "")
    (written,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    content = written.read_bytes()
    assert b"validation" in content and b"loss" in content


class Broken:
    """A sink that fails at one of its calls."""

    def __init__(self, at):
        self.at = at
        self.fail("open")

    def fail(self, call):
        if call == self.at:
            raise RuntimeError(f"no {call}\nand many lines more")

    def write(self, facts):
        self.fail("write")

    def close(self):
        self.fail("close")


@pytest.mark.parametrize("at", ["open", "write", "close"])
def test_a_sink_that_fails_is_left_out_with_one_warning_and_the_others_go_on(tmp_path, monkeypatch, at):
    monkeypatch.setitem(sinks.KINDS, "tensorboard", lambda run: Broken(at))
    told = write_all(["tensorboard", "csv"], run_in(tmp_path))
    assert told == [f"mpipipe: no more metrics go to tensorboard: no {at}; the training goes on"]
    assert rows_of(tmp_path) == RECORDS


def test_names_stand_between_commas_and_what_names_no_sink_is_refused():
    for text, names in (("none", ()), ("csv", ("csv",)), ("csv, wandb", ("csv", "wandb"))):
        assert parse_names(text) == names
    for text in ("", "csv,", "xls", "csv,csv", "none,csv"):
        with pytest.raises(ArgumentError) as caught:
            parse_names(text)
        assert caught.value.found == repr(text)


def test_a_missing_library_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    sinks.check_installed(["csv"])
    with pytest.raises(BackendError, match="tensorboardX") as caught:
        sinks.check_installed(["csv", "tensorboard"])
    assert "'.[tensorboard]'" in caught.value.remedy


# -- metrics.jsonl over a resume: cut off after the checkpoint, as a whole, and never another program's file ----------


LINES = [json.dumps({"step": step, "loss": 1.0}) + "\n" for step in range(5)]


@pytest.mark.parametrize("tail", ["", '{"step": 9, "lo', "{"])
@pytest.mark.parametrize("step", [0, 1, 3, 4, 7])
def test_records_behind_a_step_and_a_torn_line_are_cut_off_and_nothing_else_is_touched(tmp_path, step, tail):
    path = tmp_path / sinks.NAME
    path.write_text("".join(LINES) + tail)
    before = path.stat().st_ino
    sinks.cut(tmp_path, step)
    assert path.read_text() == "".join(LINES[: step + 1] if step else [])
    assert [file.name for file in tmp_path.iterdir()] == [sinks.NAME]
    if not tail and step >= 4:
        assert path.stat().st_ino == before  # what needs no cut is not written anew
    sinks.cut(tmp_path / "absent", step)
    assert not (tmp_path / "absent").exists()


@pytest.mark.parametrize(
    "text", ["precious", "precious\n", "[]\n", '{"loss": 1}\n', '{"step": "1"}\n', '{"step": 1}\n\n', "\xff\n"]
)
def test_what_is_no_record_is_refused_with_the_file(tmp_path, text):
    path = tmp_path / sinks.NAME
    path.write_bytes(text.encode("latin1"))
    with pytest.raises(ConfigError, match="cannot be used") as caught:
        sinks.cut(tmp_path, 3)
    assert caught.value.found == str(path) and path.read_bytes() == text.encode("latin1")
