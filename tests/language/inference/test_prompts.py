"""Prompts of the command line and of files."""

import pytest

from mpipipe.errors import ConfigError, DataError
from mpipipe.language.inference.prompts import Bytes, Prompts, read_prompts


def file(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content)
    return str(path)


def test_a_prompt_is_a_line_break_or_the_text_of_the_command_line():
    assert read_prompts(None, None, Bytes()) == Prompts([[10]], ["\n"])
    assert read_prompts("a\udcff", None, Bytes()).tokens == [[97, 255]]  # as it came, though no UTF-8


MIXED = b'{"prompt": "ab"}\n{"prompt": "c", "more": 1}\n{"tokens": [300, 2]}\n'


@pytest.mark.parametrize(
    ("name", "content", "tokenizer", "expected"),
    [
        ("a.txt", b"ab\nc", Bytes(), [[97, 98], [99]]),
        ("a.txt", b"ab\r\n c \n", Bytes(), [[97, 98], [32, 99, 32]]),
        ("a.jsonl", MIXED, Bytes(), [[97, 98], [99], [300, 2]]),
        ("a.jsonl", b'{"tokens": [5, 17, 9]}\n', None, [[5, 17, 9]]),
    ],
)
def test_a_file_has_a_prompt_on_each_line(tmp_path, name, content, tokenizer, expected):
    assert read_prompts(None, file(tmp_path, name, content), tokenizer).tokens == expected


@pytest.mark.parametrize(
    ("name", "content", "match", "place"),
    [
        ("a.txt", b"", "no prompts", "empty file"),
        ("a.txt", b"a\n\nb\n", "prompt 1 is empty", "line 2 of"),
        ("a.txt", b"a\xff", "prompts cannot be read: 'utf-8' codec", "a.txt"),
        ("a.jsonl", b'{"prompt": "a"}\n{"text": "b"}\n', "has no prompt", "line 2 of"),
        ("a.jsonl", b'{"prompt": "a"}\n{"tokens": [1, 2.5]}\n', "has no prompt", "line 2 of"),
        ("a.jsonl", b'{"tokens": []}\n', "prompt 0 is empty", "line 1 of"),
        ("a.jsonl", b'{"prompt": "a"}\n\n', "no JSON", "line 2 of"),
    ],
)
def test_what_is_no_prompt_is_refused_with_its_place(tmp_path, name, content, match, place):
    with pytest.raises(DataError, match=match) as caught:
        read_prompts(None, file(tmp_path, name, content), Bytes())
    assert place in str(caught.value)


def test_what_cannot_be_a_prompt_is_refused(tmp_path):
    with pytest.raises(DataError, match="cannot be read"):
        read_prompts(None, str(tmp_path / "absent"), Bytes())
    for arguments in (("a", None), (None, file(tmp_path, "a.jsonl", b'{"tokens": [1]}\n{"prompt": "a"}\n'))):
        with pytest.raises(ConfigError, match="no tokenizer"):
            read_prompts(*arguments, None)
    with pytest.raises(ConfigError, match="twice"):
        read_prompts("a", "b", Bytes())
