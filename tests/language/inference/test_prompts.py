"""Prompts of the command line and of files; what is none is refused with file and line."""

from __future__ import annotations

import pytest

from mpipipe.errors import ConfigError, DataError
from mpipipe.language.inference.prompts import Bytes, Prompts, parse_ids, read_prompts


def file(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content)
    return str(path)


def test_without_any_prompt_it_is_a_line_break():
    assert read_prompts(None, None, None, Bytes()) == Prompts([[10]], ["\n"])


def test_bytes_of_a_command_line_that_are_no_utf_8_come_through():
    assert read_prompts("a\udcff", None, None, Bytes()).tokens == [[97, 255]]


def test_ids_need_no_tokenizer():
    assert read_prompts(None, None, "5, 17,9", None) == Prompts([[5, 17, 9]], [None])


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.txt", b"ab\nc", [[97, 98], [99]]),
        ("a.txt", b"ab\r\n c \n", [[97, 98], [32, 99, 32]]),
        ("a.jsonl", b'"ab"\n{"prompt": "c", "more": 1}\n{"tokens": [300, 2]}\n[7]\n', [[97, 98], [99], [300, 2], [7]]),
    ],
)
def test_a_file_has_a_prompt_on_each_line(tmp_path, name, content, expected):
    assert read_prompts(None, file(tmp_path, name, content), None, Bytes()).tokens == expected


@pytest.mark.parametrize(
    ("name", "content", "match", "place"),
    [
        ("a.txt", b"", "no prompts", "empty file"),
        ("a.txt", b"a\n\nb\n", "prompt 1 is empty", "line 2 of"),
        ("a.txt", b"a\xff", "no text in UTF-8", "a.txt"),
        ("a.jsonl", b'"a"\n{"text": "b"}\n', "has no prompt", "line 2 of"),
        ("a.jsonl", b'"a"\n{"tokens": [1, 2.5]}\n', "has no prompt", "line 2 of"),
        ("a.jsonl", b'"a"\n{"tokens": [1, true]}\n', "has no prompt", "line 2 of"),
        ("a.jsonl", b'{"tokens": []}\n', "prompt 0 is empty", "line 1 of"),
        ("a.jsonl", b'"a"\n\n', "no JSON", "line 2 of"),
        ("a.jsonl", b"[" * 100_000, "no JSON", "line 1 of"),
    ],
)
def test_what_is_no_prompt_is_refused_with_its_place(tmp_path, name, content, match, place):
    with pytest.raises(DataError, match=match) as caught:
        read_prompts(None, file(tmp_path, name, content), None, Bytes())
    assert place in str(caught.value)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(DataError, match="cannot be read"):
        read_prompts(None, str(tmp_path / "absent"), None, Bytes())


def test_text_needs_a_tokenizer(tmp_path):
    for arguments in (("a", None), (None, file(tmp_path, "a.jsonl", b'[1]\n"a"\n'))):
        with pytest.raises(ConfigError, match="no tokenizer"):
            read_prompts(*arguments, None, None)


def test_two_prompts_at_once_are_refused():
    with pytest.raises(ConfigError, match="twice"):
        read_prompts("a", None, "1", Bytes())


@pytest.mark.parametrize("text", ["", "1,,2", "a", "-1", "1.5", "9" * 30, "\u0661"])
def test_what_are_no_ids_is_refused(text):
    with pytest.raises(ConfigError, match="no token ids"):
        parse_ids(text, "--tokens")
