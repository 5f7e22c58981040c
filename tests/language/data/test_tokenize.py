"""Text to tokens: the library's own, and nothing left where that fails."""

import json
import os
from importlib import import_module
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from mpipipe.errors import BackendError, ConfigError, DataError, StorageError
from mpipipe.language import data
from mpipipe.language.data.tokenizer import open_tokenizer

library = pytest.importorskip("tokenizers")
tokenize = import_module("mpipipe.language.data.tokenize")  # the face shows its function of this name
WORDS = ["one", "two", "three", "four,", "Straße", "漢字", "x=1", "  indented", "\n\nend."]


def text_of(seed, words=400):
    rng = np.random.default_rng(seed)
    return "".join(str(word) + str(rng.choice([" ", "\n", "\n\n", "\n  "])) for word in rng.choice(WORDS, words))


@pytest.fixture
def folder(tmp_path):
    """The folder of a byte-level tokenizer, trained on the spot."""
    made = library.Tokenizer(library.models.BPE())
    made.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=330, special_tokens=["<|end|>"], show_progress=False,
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    made.train_from_iterator([text_of(seed) for seed in range(4)], trainer)
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|end|>"}}))
    return tmp_path


@pytest.fixture
def texts(tmp_path):
    """A folder with two text files and one of JSON lines, and all documents in order."""
    (tmp_path / "texts").mkdir()
    whole = {name: text_of(seed, 3000) for seed, name in enumerate(["a.txt", "c.txt"])}
    lines = [text_of(seed, 50) for seed in range(10, 40)]
    for name, text in whole.items():
        (tmp_path / "texts" / name).write_text(text)
    rows = [json.dumps({"text": text, "other": 1}, ensure_ascii=number % 2) for number, text in enumerate(lines)]
    (tmp_path / "texts" / "b.jsonl").write_text("\n".join(rows[:9]) + "\n\n  \n" + "\n".join(rows[9:]))
    return str(tmp_path / "texts"), [whole["a.txt"], *lines, whole["c.txt"]]


@pytest.fixture
def small(monkeypatch):
    """Many calls of the library."""
    monkeypatch.setattr(tokenize, "BATCH", 4000)


def test_tokens_are_those_of_the_library(folder, texts, small):
    path, documents = texts
    made = library.Tokenizer.from_file(str(folder / "tokenizer.json"))
    end = made.token_to_id("<|end|>")
    expected = [[*made.encode(text).ids, end] for text in documents]
    out, told = folder / "tokens", []
    done = tokenize.tokenize([path], str(folder), str(out), progress=lambda *numbers: told.append(numbers))
    assert max(told) == (told[0][1], told[0][1]) and len(set(told)) > 3
    found = data.find([out])
    whole = found.whole()
    assert whole.read(0, len(whole)).tolist() == list(chain.from_iterable(expected))
    np.testing.assert_array_equal(whole.starts(0, len(whole)), np.cumsum([0, *map(len, expected[:-1])]))
    sizes = [len(text.encode()) for text in documents]
    facts = done.facts
    assert (facts.vocab, facts.end, facts.documents, facts.nbytes) == (made.get_vocab_size(), end, 32, sum(sizes))
    assert facts.tokenizer == open_tokenizer(folder).hash == found.tokenizer
    assert np.load(out).dtype == np.uint16 and np.load(out).tolist() == whole.read(0, len(whole)).tolist()
    written = [f"tokens{end}" for end in ("", ".documents", ".json")]
    assert sorted(os.listdir(folder)) == sorted(["texts", "tokenizer.json", "tokenizer_config.json", *written])
    before = [found.token_files[0].bytes_before(len(expected[0]) + shift) for shift in (0, len(expected[1]))]
    assert before == [sizes[0], sizes[0] + sizes[1]]


def test_what_the_tokenizer_puts_around_a_text_stands_around_each_document(tmp_path, texts):
    """As those of SentencePiece, which put a space before each text, too."""
    made = library.Tokenizer(library.models.WordLevel({"▁": 1, "<s>": 0, "</s>": 3, "<unk>": 2}, unk_token="<unk>"))
    made.pre_tokenizer = library.pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    made.post_processor = library.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    made.save(str(tmp_path / "tokenizer.json"))
    path = Path(texts[0], "a.txt")
    tokenize.tokenize([str(path)], str(tmp_path), str(tmp_path / "tokens"), end="</s>")
    whole = data.find([tmp_path / "tokens"]).whole()
    assert whole.read(0, len(whole)).tolist() == [*made.encode(path.read_text()).ids, 3]
    assert whole.read(0, 1).tolist() == [0]


def test_a_text_file_that_is_too_long_is_refused_by_name(folder, texts, monkeypatch):
    monkeypatch.setattr(tokenize, "MOST", 4000)
    with pytest.raises(DataError, match="too long for one document") as caught:
        tokenize.tokenize([texts[0]], str(folder), str(folder / "other"))
    assert "a.txt" in caught.value.found and "JSON lines" in caught.value.remedy


BAD_LINES = {
    "no text": b'{"words": "x"}',
    "text of another kind": b'{"text": 5}',
    "no object": b'["text"]',
    "no JSON": b'{"text": "x"',
    "half a character": b'{"text": "\\ud800"}',
    "no UTF-8": b'{"text": "\xff"}',
    "deep": b"[" * 100_000,
}


@pytest.mark.parametrize("bad", BAD_LINES)
def test_a_line_without_text_is_one_error_with_file_and_line(tmp_path, folder, small, bad):
    path = tmp_path / "lines.jsonl"
    good = b'{"text": "some words"}\n'
    path.write_bytes(good * 700 + BAD_LINES[bad] + b"\n" + good * 300)
    with pytest.raises(DataError, match="no JSON object with a text") as caught:
        tokenize.tokenize([str(path)], str(folder), str(tmp_path / "tokens"))
    assert f"line 701 of {path}" in caught.value.found
    assert not [name for name in os.listdir(tmp_path) if "tokens" in name]


def test_text_that_is_no_utf8_is_one_error_with_file_and_position(tmp_path, folder, small):
    path = tmp_path / "latin.txt"
    path.write_bytes(b"words and\nmore words\n" * 300 + b"\xe4 umlaut")
    with pytest.raises(DataError, match="not UTF-8") as caught:
        tokenize.tokenize([str(path)], str(folder), str(tmp_path / "tokens"))
    assert caught.value.found == f"byte 0xe4 at position 6300 of {path}"


@pytest.mark.parametrize("broken", ["npy_header", "write_facts"])
def test_a_failure_while_the_file_is_put_together_leaves_nothing(tmp_path, folder, texts, small, monkeypatch, broken):
    def fail(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tokenize, broken, fail)
    with pytest.raises(StorageError, match="No space left"):
        tokenize.tokenize([texts[0]], str(folder), str(tmp_path / "tokens"))
    assert not [name for name in os.listdir(tmp_path) if "tokens" in name]


@pytest.mark.parametrize("name", ["tokens", "tokens.json", "tokens.documents"])
def test_what_is_there_already_stays(tmp_path, folder, texts, name):
    (tmp_path / name).write_text("mine")
    with pytest.raises(ConfigError, match="already") as caught:
        tokenize.tokenize([texts[0]], str(folder), str(tmp_path / "tokens"))
    assert str(tmp_path / name) in caught.value.found and (tmp_path / name).read_text() == "mine"


WRONG_FOLDERS = {
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "the tokenizer cannot be read: No such file"),
    "no JSON": (lambda folder: (folder / "tokenizer.json").write_text("{"), "tokenizer cannot be read"),
    "an end that it does not have": (
        lambda folder: (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}'),
        "does not have the token that ends a text",
    ),
    "a broken file beside it": (
        lambda folder: (folder / "tokenizer_config.json").write_text("}"),
        "beside the tokenizer cannot be read",
    ),
}


@pytest.mark.parametrize("wrong", WRONG_FOLDERS)
def test_a_folder_without_a_good_tokenizer_is_refused_by_name(tmp_path, folder, texts, wrong):
    change, match = WRONG_FOLDERS[wrong]
    change(folder)
    with pytest.raises(DataError, match=match) as caught:
        tokenize.tokenize([texts[0]], str(folder), str(tmp_path / "tokens"))
    assert "tokenizer" in caught.value.found


def test_without_the_library_the_error_says_what_to_install(tmp_path, folder, texts, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with pytest.raises(BackendError, match="tokenizers") as caught:
        tokenize.tokenize([texts[0]], str(folder), str(tmp_path / "tokens"))
    assert ".[tokens]" in caught.value.remedy


def test_a_tokenizer_gives_text_back(folder):
    tokenizer = open_tokenizer(folder)
    assert tokenizer.decode([*tokenizer.encode(WORDS[4]), tokenizer.end]) == WORDS[4]
    assert open_tokenizer(folder / "tokenizer.json", end="one").end == tokenizer.library.token_to_id("one")
