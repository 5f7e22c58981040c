"""A standard output that cannot be written is one line and an exit code, for every command."""

import sys

import pytest
from support.command_line import invoke

from mpipipe.cli.output import show

FULL = "mpipipe: the standard output cannot be written: No space left on device\n"
ON_A_FULL_DISK = """
import os, sys
os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
from mpipipe.cli import main
sys.argv = ["mpipipe", *{words}]
main()
"""
SIZES = "--dim 16 --layers 1 --heads 2 --seq-len 16 --batch 8 --steps 2 --sample-bytes 0 --device cpu".split()


@pytest.mark.parametrize(
    "words",
    [
        "--help",
        "--version",
        "info --help",
        "simulate --schedule gpipe --ranks 2 --microbatches 2",
        "train --dry-run --dim 16 --layers 1 --seq-len 16 --batch 4",
    ],
)
def test_a_full_disk_is_one_line_and_a_failure(alone, monkeypatch, words):
    with open("/dev/full", "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        ended = invoke(*words.split())
    assert (ended.code, ended.report) == (1, FULL)


def test_the_end_of_the_interpreter_adds_nothing(launch):
    job = launch(0, ON_A_FULL_DISK.format(words=["info"]))
    assert (job.returncode, job.stderr) == (1, FULL)


def test_a_training_on_a_full_disk_is_done_and_says_that_something_is_missing(launch, tmp_path):
    (tmp_path / "text.txt").write_text("one two three four\n" * 200)
    out = tmp_path / "run"
    words = ["train", "--data", str(tmp_path / "text.txt"), "--out", str(out), *SIZES]
    job = launch(0, ON_A_FULL_DISK.format(words=words))
    assert job.returncode == 1
    line = (
        "mpipipe: the output cannot be written: No space left on device; the work goes on, and its exit code will be 1"
    )
    assert job.stderr == f"{line}\n"
    assert any((out / "weights").glob("step-*/manifest.json"))
    assert "mpipipe: ok steps=2" in (out / "train.log").read_text()


def test_no_standard_output_is_no_error(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    show("text")
