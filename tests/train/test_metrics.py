"""Metrics of a training that is resumed: cut off behind the checkpoint, as a whole, and never somebody else's file."""

from __future__ import annotations

import json

import pytest

from mpipipe.errors import ConfigError
from mpipipe.train import sinks
from mpipipe.train.screen import JsonLines

LINES = [json.dumps({"step": step, "loss": 1.0}) + "\n" for step in range(5)]


@pytest.mark.parametrize("tail", ["", '{"step": 9, "lo', "{"])
@pytest.mark.parametrize("step", [0, 1, 3, 4, 7])
def test_records_behind_a_step_and_a_torn_line_are_cut_off(tmp_path, step, tail):
    path = tmp_path / sinks.NAME
    path.write_text("".join(LINES) + tail)
    sinks.cut(tmp_path, step)
    assert path.read_text() == "".join(LINES[: step + 1] if step else [])
    assert [file.name for file in tmp_path.iterdir()] == [sinks.NAME]


def test_a_file_that_needs_no_cut_is_not_written_anew(tmp_path):
    path = tmp_path / sinks.NAME
    path.write_text("".join(LINES))
    before = path.stat().st_ino
    sinks.cut(tmp_path, 4)
    assert path.stat().st_ino == before
    sinks.cut(tmp_path / "absent", 4)
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


def test_lines_go_on_behind_those_that_are_there(tmp_path):
    path = tmp_path / "lines"
    for text, goes_on in (("one", False), ("two", True)):
        lines = JsonLines(path, goes_on)
        lines.append(text)
        lines.sync()
        lines.close()
    assert path.read_text() == "one\ntwo\n"
    with pytest.raises(FileExistsError):
        JsonLines(path)
