"""Prompts of the command line and of files, and text that appears token by token."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpipipe.errors import ConfigError, DataError
from mpipipe.language.inference.prompts import Bytes, Prompts, TextStream, parse_ids, read_prompts


def file(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content)
    return str(path)


def test_a_prompt_is_a_line_break_or_the_text_or_ids_of_the_command_line():
    assert read_prompts(None, None, None, Bytes()) == Prompts([[10]], ["\n"])
    assert read_prompts("a\udcff", None, None, Bytes()).tokens == [[97, 255]]  # as it came, though no UTF-8
    assert read_prompts(None, None, "5, 17,9", None) == Prompts([[5, 17, 9]], [None])  # needs no tokenizer


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
        ("a.txt", b"a\xff", "prompts cannot be read: 'utf-8' codec", "a.txt"),
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


def test_what_cannot_be_a_prompt_is_refused(tmp_path):
    with pytest.raises(DataError, match="cannot be read"):
        read_prompts(None, str(tmp_path / "absent"), None, Bytes())
    for arguments in (("a", None), (None, file(tmp_path, "a.jsonl", b'[1]\n"a"\n'))):
        with pytest.raises(ConfigError, match="no tokenizer"):
            read_prompts(*arguments, None, None)
    with pytest.raises(ConfigError, match="twice"):
        read_prompts("a", None, "1", Bytes())


@pytest.mark.parametrize("text", ["", "1,,2", "a", "-1", "1.5", "9" * 30, "\u0661"])
def test_what_are_no_ids_is_refused(text):
    with pytest.raises(ConfigError, match="no token ids"):
        parse_ids(text, "--tokens")


class Words:
    """A tokenizer that joins words by spaces, and puts none before the first, as those of SentencePiece do."""

    vocab, end = 3, None

    def decode(self, tokens):
        return " ".join("ab c"[token] if token < 3 else "" for token in tokens)


@given(st.binary(max_size=12), st.lists(st.integers(0, 3), max_size=6))
def test_any_bytes_in_any_pieces(content, cuts):
    stream, parts, place = TextStream(Bytes()), [], 0
    for count in (*cuts, len(content)):
        parts.append(stream.feed(list(content[place : place + count])))
        place += count
    assert "".join([*parts, stream.end()]) == content.decode(errors="replace")


@pytest.mark.parametrize("text", ["grün", "日本語", "a\U0001f600b"])
def test_a_character_appears_with_its_last_byte(text):
    stream = TextStream(Bytes())
    found = [stream.feed([byte]) for byte in text.encode()]
    assert "".join(found) == text and all(part in ("", *text) for part in found)
    assert stream.end() == ""


def test_spaces_between_tokens_are_kept():
    stream, tokens = TextStream(Words()), np.random.default_rng(0).integers(0, 2, 20).tolist()
    assert "".join([*(stream.feed([token]) for token in tokens), stream.end()]) == Words().decode(tokens)
