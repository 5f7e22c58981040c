"""Neither a closed output nor a full disk ends a training, and metrics are whole lines at every time."""

import io
import json
import os
import resource
import sys

import pytest

from mpipipe.train.config import read_keys
from mpipipe.train.report import Record, Reporter
from mpipipe.train.screen import JsonLines, SafeStream


@pytest.fixture
def room():
    """room(bytes): no file of this process can grow beyond that; None: no limit."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (before[0] if size is None else size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_lines_that_find_no_room_are_left_out_whole(tmp_path, room, capsys):
    path = tmp_path / "lines"
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
    lines.sync()
    lines.close()
    lines.close()
    assert capsys.readouterr().err.count("cannot be written") == 1


class Full(io.StringIO):
    """A stream on a full disk."""

    def write(self, text):
        raise OSError(28, "No space left on device")


def test_a_stream_that_fails_is_silent_from_then_on_and_standard_error_hears_why(capsys):
    outlet = SafeStream(Full())
    for _ in range(3):
        outlet.write("text")
    assert capsys.readouterr().err.count("No space left on device") == 1


def test_a_reporter_without_an_output_still_writes_metrics(tmp_path, monkeypatch, capsys):
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
    assert capsys.readouterr().err == ""


C_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.mark.long
def test_names_that_are_no_text_do_not_end_a_training(launch, tmp_path):
    """In the C locale no letter outside of ASCII is text."""
    text, out, plan = (tmp_path / os.fsdecode(name) for name in (b"l\xe4uft.txt", b"\xe4\xff", "größe.toml".encode()))
    text.write_text("one two three four\n" * 200)
    plan.write_bytes(
        b'dim = 16\nlayers = 2\nheads = 2\nhidden = 32\nseq_len = 16\nbatch = 8\nout = "%s"\n' % b"gr\xc3\xbcn"
    )
    options = ["--data", text, "--sample-bytes", 4, "--eval-batches", 1, "--log-every", 1, "--save-every", 1]
    command = ["-m", "mpipipe", "train", "--config", plan, *options, "--out", out]
    for steps, more in ((2, ["--trace", tmp_path / "spür"]), (3, ["--resume", "auto"])):
        job = launch(2, [*command, "--steps", steps, *more], env=C_LOCALE)
        assert job.returncode == 0, job.stderr
        assert f"mpipipe: ok steps={steps}" in job.stdout and not job.stderr
        assert any((out / "weights").glob("step-*/manifest.json"))


def test_a_name_in_a_configuration_is_that_of_the_command_line(tmp_path, monkeypatch):
    """In the C locale, too: the file is UTF-8, and the names of files are bytes."""
    path = tmp_path / "plan.toml"
    path.write_text('out = "grün"\ndata = ["weiß.txt"]\n', encoding="utf-8")
    monkeypatch.setattr(os, "fsdecode", lambda name: name.decode("ascii", "surrogateescape"))
    keys = read_keys(path)
    assert keys["out"].encode("ascii", "surrogateescape") == "grün".encode()
    assert keys["data"][0].encode("ascii", "surrogateescape") == "weiß.txt".encode()
