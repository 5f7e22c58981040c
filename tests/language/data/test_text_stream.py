"""Text that appears token by token is in the end the text of all tokens at once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpipipe.language.inference.prompts import Bytes, TextStream


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
