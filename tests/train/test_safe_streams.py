"""Neither a closed output nor a full disk ends a training, and metrics are whole lines at every time."""

from __future__ import annotations

import io
import json
import os
import resource
import sys

import pytest
from support.small_training import training_job

from mpipipe.train.config import read_keys
from mpipipe.train.report import Record, Reporter
from mpipipe.train.screen import KEPT, JsonLines, SafeStream

TRAINING = """
trouble, limits = words[0], resource.getrlimit(resource.RLIMIT_FSIZE)

def step(number):
    if rank == 0 and number == 2 and trouble == "closed":  # the reader of our output leaves
        reader, writer = os.pipe()
        os.dup2(writer, 1)
        os.close(reader)
    elif rank == 0 and number == 2:  # the disk is full in the middle of the next line
        resource.setrlimit(resource.RLIMIT_FSIZE, (os.path.getsize(out + "/metrics.jsonl") + 30, limits[1]))
    elif rank == 0 and number == 5:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

before("step", step)
options = dict(steps=8, sample_bytes=4)
"""


@pytest.mark.long
@pytest.mark.parametrize("trouble", ["closed", "full"])
def test_neither_a_closed_output_nor_a_full_disk_ends_a_training_or_loses_a_line(launch, tmp_path, trouble):
    out = tmp_path / "run"
    job = launch(2, [*training_job(tmp_path, TRAINING), str(out), trouble])
    assert job.returncode == 0, job.stderr
    assert (out / "weights" / "model.json").exists()
    assert [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()] == list(range(9))
    if trouble == "closed":
        assert "step 2/8" in job.stdout and "step 3/8" not in job.stdout and job.stderr == ""
    else:
        assert job.stderr.count("metrics.jsonl cannot be written") == 1 and "goes on" in job.stderr
        assert job.stdout.splitlines()[-1].startswith("mpipipe: ok steps=8")


HEAD = """
import subprocess, sys
command = [sys.executable, "-m", "mpipipe", *sys.argv[2:]]
job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
for _ in range(int(sys.argv[1])):
    job.stdout.readline()
job.stdout.close()
errors = job.stderr.read().decode()
print(job.wait(), errors)
"""


@pytest.mark.long
def test_a_reader_that_takes_the_first_line_does_not_end_the_training(launch, tmp_path):
    text, script, out = tmp_path / "text.txt", tmp_path / "head.py", tmp_path / "run"
    text.write_text("one two three four\n" * 200)
    script.write_text(HEAD)
    sizes = "--dim 16 --layers 1 --heads 2 --seq-len 16 --batch 8 --steps 3 --log-every 1 --sample-bytes 4".split()
    job = launch(0, [str(script), "1", "train", "--data", str(text), "--out", str(out), "--device", "cpu", *sizes])
    assert job.stdout.strip() == "0", job.stdout
    assert (out / "weights" / "model.json").exists()
    job = launch(0, [str(script), "0", "generate", str(out), "--bytes", "20"])
    assert job.stdout.strip() == "0", job.stdout


@pytest.fixture
def room():
    """room(bytes): no file of this process can grow beyond that; None: no limit."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (before[0] if size is None else size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_lines_that_find_no_room_are_cut_off_and_written_later(tmp_path, room, capsys):
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
    assert path.read_text() == "first\nsecond\nthird\nfourth\n"
    lines.sync()
    lines.close()
    lines.close()
    assert capsys.readouterr().err.count("cannot be written") == 1


def test_lines_that_never_find_room_are_counted_at_the_end(tmp_path, room, capsys):
    lines = JsonLines(tmp_path / "lines")
    room(0)
    for number in range(KEPT + 5):
        lines.append(str(number))
    assert len(lines.waiting) == KEPT
    lines.close()
    room(None)
    assert f"{KEPT + 5} lines" in capsys.readouterr().err


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
            reporter.advance()
            reporter.say("text")
        record = json.loads((tmp_path / str(number) / "metrics.jsonl").read_text())
        assert (record["step"], record["loss"]) == (1, 1.0)
    assert capsys.readouterr().err == ""


C_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.mark.long
@pytest.mark.parametrize("environment", [{}, C_LOCALE], ids=["UTF-8", "C"])
def test_names_that_are_no_text_do_not_end_a_training(launch, tmp_path, environment):
    """In the C locale no letter outside of ASCII is text."""
    text, out, plan = (tmp_path / os.fsdecode(name) for name in (b"l\xe4uft.txt", b"\xe4\xff", "größe.toml".encode()))
    text.write_text("one two three four\n" * 200)
    plan.write_bytes(
        b'dim = 16\nlayers = 2\nheads = 2\nhidden = 32\nseq_len = 16\nbatch = 8\nout = "%s"\n' % b"gr\xc3\xbcn"
    )
    options = ["--data", text, "--sample-bytes", 4, "--eval-batches", 1, "--log-every", 1, "--save-every", 1]
    command = ["-m", "mpipipe", "train", "--config", plan, *options, "--out", out]
    for steps, more in ((2, ["--trace", tmp_path / "spür"]), (3, ["--resume", "auto"])):
        job = launch(2, [*command, "--steps", steps, *more], env=environment)
        assert job.returncode == 0, job.stderr
        assert f"mpipipe: ok steps={steps}" in job.stdout and not job.stderr
        assert (out / "weights" / "model.json").exists()


def test_a_name_in_a_configuration_is_that_of_the_command_line(tmp_path, monkeypatch):
    """In the C locale, too: the file is UTF-8, and the names of files are bytes."""
    path = tmp_path / "plan.toml"
    path.write_text('out = "grün"\ndata = ["weiß.txt"]\n', encoding="utf-8")
    monkeypatch.setattr(os, "fsdecode", lambda name: name.decode("ascii", "surrogateescape"))
    keys = read_keys(path)
    assert keys["out"].encode("ascii", "surrogateescape") == "grün".encode()
    assert keys["data"][0].encode("ascii", "surrogateescape") == "weiß.txt".encode()
