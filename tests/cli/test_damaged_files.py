"""Texts that ask for much, and what is no file, are refused by name: none is waited for, none takes much memory."""

from __future__ import annotations

import signal
import tracemalloc
from contextlib import contextmanager

import pytest
from support.command_line import invoke
from support.damaged_files import KINDS, NO_FILES, TEXTS, replace

from mpipipe.cli import train
from mpipipe.errors import DataError, MpipipeError
from mpipipe.job import settings
from mpipipe.language.data.file_bytes import forget_files
from mpipipe.language.data.tokenizer import open_tokenizer

MAY_BE_READ = [("metrics", "absent"), ("facts of tokens", "absent")]  # nothing has been said there yet
SECONDS = 60  # for one file; all take milliseconds
MOST_BYTES = 200_000_000


@contextmanager
def watched(case):
    """Fail where the block inside takes long, or more memory than any damaged file may."""

    def late(number, frame):
        raise TimeoutError(f"{case}: still at work after {SECONDS} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES, case
    finally:
        tracemalloc.stop()
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def outcome(kind, path, case):
    """The error with which the file is refused, None where it can be read; nothing else may come out."""
    forget_files()
    with watched(case):
        try:
            kind.read(path)
        except MpipipeError as error:
            assert str(path) in str(error), f"{case}: the file is not named: {error}"
            assert len(str(error)) < 5000, case
            return error
    return None


@pytest.mark.parametrize("name", KINDS)
def test_texts_that_ask_for_much_are_refused_by_name_or_are_texts(tmp_path, name):
    """Such as deep brackets, numbers of thousands of digits, and counts of billions."""
    kind = KINDS[name]
    path = kind.make(tmp_path)
    for number, text in enumerate(TEXTS):
        path.write_bytes(text)
        outcome(kind, path, f"{name}, text {number}")


@pytest.mark.parametrize("way", NO_FILES)
@pytest.mark.parametrize("name", KINDS)
def test_what_is_no_file_of_a_kind_is_refused_by_name(tmp_path, name, way):
    kind = KINDS[name]
    path = kind.make(tmp_path)
    replace(path, way)
    error = outcome(kind, path, f"{name}, {way}")
    assert error is not None or (name, way) in MAY_BE_READ


def test_a_regular_expression_without_end_is_an_error_of_the_tokenizer(tmp_path):
    """The library panics over it, with an exception that `except Exception` does not catch."""
    path = KINDS["tokenizer"].make(tmp_path)
    tokenizer = open_tokenizer(path)
    with watched("a panic"), pytest.raises(DataError, match=r"the tokenizer fails: .*limit") as caught:
        tokenizer.encode("o" * 20_000)
    assert caught.value.found == str(path)


@pytest.fixture
def refused(monkeypatch):
    """refused(words): the report of a command of one process that refuses its arguments."""
    for module in (settings, train):
        monkeypatch.setattr(module, "launcher_size", lambda environment: None)

    def refused(*words):
        with watched(words):
            ended = invoke(*map(str, words))
        assert ended.code == 2 and ended.report.startswith("mpipipe: stopped:\n"), ended
        assert "Traceback" not in ended.report
        return ended.report

    return refused


def test_names_and_numbers_that_cannot_be_are_refused_in_words(refused, tmp_path):
    long = "x" * 5000
    assert f"found: {long}" in refused("convert", long, tmp_path / "new")
    assert "no folder" in refused("convert", "a\0b", tmp_path / "new")
    assert "partition: no partition" in refused("train", "--dry-run", "--partition", "9" * 5000)
    assert "forward='" not in (report := refused("simulate", "--schedule", "gpipe", "--forward", "1e308,1,1,1"))
    assert "the cost forward does not fit" in report and "1e+308" in report
    (tmp_path / "zero.toml").write_text('data = ["a\\u0000b"]\n')
    assert "data has a zero byte" in refused("train", "--dry-run", "--config", tmp_path / "zero.toml")
