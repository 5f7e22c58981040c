"""Texts that ask for much, and what is no file, are refused by name: none is waited for, none takes much memory."""

import json
import os
import tracemalloc
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from support.command_line import invoke
from support.token_files import random_documents, write_megatron, write_tokens

from mpipipe import schedules
from mpipipe.errors import DataError, MpipipeError
from mpipipe.language import data
from mpipipe.language.data.file_bytes import forget_files
from mpipipe.language.data.tokenizer import open_tokenizer
from mpipipe.language.inference.prompts import read_prompts
from mpipipe.schedules.csv_text import from_file
from mpipipe.train import TrainConfig, report

DOCUMENTS = 200


def _tokens(folder):
    return write_tokens(folder / "tokens", *random_documents(np.random.default_rng(0), DOCUMENTS))


def _facts(folder):
    return _tokens(folder).with_name("tokens.json")


def _read_data(path):
    whole = data.find([path.with_name("tokens") if path.stem == "tokens" else path]).whole()
    for start in range(0, len(whole), 1 << 16):
        whole.read(start, min(1 << 16, len(whole) - start))
    whole.starts(0, len(whole))
    return whole.nbytes


def _megatron(folder):
    rng = np.random.default_rng(1)
    write_megatron(folder / "pair", [rng.integers(0, 50, size) for size in (5, 9, 1, 30, 8)], [0, 2, 3, 5])
    return folder / "pair.idx"


def _text(name, content):
    def make(folder):
        (folder / name).write_text(content)
        return folder / name

    return make


def _tokenizer(folder):
    words = {"one": 0, "two": 1, "?": 2}
    library = pytest.importorskip("tokenizers")
    made = library.Tokenizer(library.models.WordLevel(words, unk_token="?"))
    made.pre_tokenizer = library.pre_tokenizers.Split(library.Regex(r"(o+o+)+n|\s"), "isolated")
    made.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def _read_tokenizer(path):
    opened = open_tokenizer(path)
    return opened.decode(opened.encode("one two three"))


CONFIG = 'dim = 64\nheads = 4\ndata = ["text"]\nlr = 0.003\nschedule = "one_f_one_b"\n'
PROMPTS = "".join(json.dumps({"tokens": [number, 5, 9]}) + "\n" for number in range(40))
METRICS = "".join(json.dumps({"step": step, "loss": 5.0 / step}) + "\n" for step in range(1, 40))
KINDS = {  # a kind of file: a function that writes a whole one in a folder, and one that reads it as commands do
    "tokens": (_tokens, _read_data),
    "facts of tokens": (_facts, _read_data),
    "megatron": (_megatron, _read_data),
    "csv": (_text("order.csv", schedules.zero_bubble_h1(4, 8).to_csv()), from_file),
    "configuration": (_text("config.toml", CONFIG), lambda path: TrainConfig.load(str(path))),
    "metrics": (_text(report.METRICS, METRICS), lambda path: report.records_until(path.parent, 10)),
    "tokenizer": (_tokenizer, _read_tokenizer),
    "prompts": (_text("prompts.jsonl", PROMPTS), lambda path: read_prompts(None, str(path), None)),
}
TEXTS = [
    b"", b"\n", b"[]", b"null", b"{}", b"[" * 100_000, b'{"a":' * 50_000, b"\xff\xfe" * 50, b"1" * 5000, b"1" * 200_000,
    b"0F999999999,0B999999999\n", b"a = " + b"[" * 50_000, b"\x93NUMPY\x01\x00\x28\x23" + b"(" * 9000,
    b"\x93NUMPY\x02\x00\xff\xff\xff\xff{", b"MMIDIDX\0\0" + b"\xff" * 90,
]  # fmt: skip
NO_FILES = ["FIFO", "device", "folder", "absent", "absurd size", "zeros at the end", "nothing but zeros"]


def replace(path: Path, way: str) -> None:
    """Put one of `NO_FILES` in the place of a file."""
    if way == "absurd size":
        os.truncate(path, 1 << 42)
    elif way == "zeros at the end":
        os.truncate(path, path.stat().st_size + (30 << 20))
    elif way == "nothing but zeros":
        os.truncate(path, 0)
        os.truncate(path, 30 << 20)
    else:
        path.unlink()
        if way == "FIFO":
            os.mkfifo(path)
        elif way == "device":
            path.symlink_to("/dev/zero")
        elif way == "folder":
            path.mkdir()


MAY_BE_READ = [("metrics", "absent"), ("facts of tokens", "absent")]  # nothing has been said there yet
MOST_BYTES = 200_000_000


@contextmanager
def watched(case):
    """Fail where the block inside takes more memory than any damaged file may."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES, case
    finally:
        tracemalloc.stop()


def outcome(read, path, case):
    """The error with which the file is refused, None where it can be read; nothing else may come out."""
    forget_files()
    with watched(case):
        try:
            read(path)
        except MpipipeError as error:
            assert str(path) in str(error), f"{case}: the file is not named: {error}"
            assert len(str(error)) < 5000, case
            return error
    return None


@pytest.mark.parametrize("name", KINDS)
def test_texts_that_ask_for_much_are_refused_by_name_or_are_texts(tmp_path, name):
    """Such as deep brackets, numbers of thousands of digits, and counts of billions."""
    make, read = KINDS[name]
    path = make(tmp_path)
    for number, text in enumerate(TEXTS):
        path.write_bytes(text)
        outcome(read, path, f"{name}, text {number}")


@pytest.mark.parametrize("way", NO_FILES)
@pytest.mark.parametrize("name", KINDS)
def test_what_is_no_file_of_a_kind_is_refused_by_name(tmp_path, name, way):
    make, read = KINDS[name]
    path = make(tmp_path)
    replace(path, way)
    error = outcome(read, path, f"{name}, {way}")
    assert error is not None or (name, way) in MAY_BE_READ


def test_a_regular_expression_without_end_is_an_error_of_the_tokenizer(tmp_path):
    """The library panics over it, with an exception that `except Exception` does not catch."""
    path = _tokenizer(tmp_path)
    tokenizer = open_tokenizer(path)
    with watched("a panic"), pytest.raises(DataError, match=r"the tokenizer fails: .*limit") as caught:
        tokenizer.encode("o" * 20_000)
    assert caught.value.found == str(path)


@pytest.fixture
def refused(alone):
    """refused(words): the report of a command of one process that refuses its arguments."""

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
    assert "no file has such a name" in refused("train", "--dry-run", "--config", tmp_path / "zero.toml")
