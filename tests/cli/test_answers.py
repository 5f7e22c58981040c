"""Answers come out in the order of their prompts, whenever they are complete."""

import json

import pytest

from mpipipe.cli.generate import printed, written_lines
from mpipipe.errors import ConfigError
from mpipipe.language.inference.generation import Answer
from mpipipe.language.inference.prompts import Bytes, Prompts

PROMPTS = Prompts([[97], [98, 99]], ["a", "bc"])
ANSWERS = [Answer(0, 0, [97], [120, 122], ended="count"), Answer(1, 1, [98, 99], [121, 0], ended="stop")]


ONE = Prompts([[97]], ["a"]), [Answer(0, 0, [97], [0xC3, 0xBC, 27, 0], ended="stop")]


@pytest.mark.parametrize(
    ("prompts", "answers", "tokenizer", "text"),
    [
        # in their order, without the stop token; ids with all tokens
        (PROMPTS, ANSWERS, Bytes(), "--- prompt 0\naxz\n--- prompt 1\nbcy\n"),
        (PROMPTS, ANSWERS, None, "mpipipe: tokens 97,120,122\nmpipipe: tokens 98,99,121,0\n"),
        # one prompt has no heading, and no text can harm a terminal
        (*ONE, Bytes(), "a\u00fc\ufffd\n"),
    ],
)
def test_answers_are_printed(capsys, prompts, answers, tokenizer, text):
    show = printed(prompts, tokenizer)
    for answer in answers:
        show(answer)
    assert capsys.readouterr().out == text


def test_lines_of_json_appear_as_a_whole(tmp_path):
    path = tmp_path / "answers.jsonl"
    with written_lines(Bytes(), str(path)) as show:
        for answer in ANSWERS:
            show(answer)
        assert not path.exists()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == [
        {"number": 0, "prompt_tokens": [97], "answer_tokens": [120, 122], "ended": "count", "prompt": "a",
         "answer": "xz"},
        {"number": 1, "prompt_tokens": [98, 99], "answer_tokens": [121, 0], "ended": "stop", "prompt": "bc",
         "answer": "y"},
    ]  # fmt: skip


def test_nothing_is_left_of_answers_that_were_cut_short(tmp_path):
    path = tmp_path / "answers.jsonl"
    with pytest.raises(RuntimeError), written_lines(None, str(path)) as show:
        show(Answer(0, 0, [97], [1], ended="count"))
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_there_or_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "there").write_text("mine")
    for name, match in (
        ("there", "of this name already"),
        ("absent/file", "cannot be written: there is no such folder"),
    ):
        with pytest.raises(ConfigError, match=match):
            written_lines(None, str(tmp_path / name)).__enter__()
    assert (tmp_path / "there").read_text() == "mine"
