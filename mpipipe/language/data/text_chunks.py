"""Texts to tokenize, cut into chunks that any rank can do by itself; how many ranks there are changes nothing.

    a text file     |---chunk----|---chunk----|-chunk--|    one document; cut at line breaks, see `TextReader.cut`
    JSON lines      |---chunk----|---chunk----|-chunk--|    a chunk has the lines that begin in it; each is a document

A cut must not change tokens. So it stands between lines that end and begin with something else than white space, and
the text around it must have the same tokens in one piece as in two. A tokenizer that puts something before each text,
as those of SentencePiece do, allows no cut.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from mpipipe.errors import DataError
from mpipipe.language.data.file_bytes import read_bytes
from mpipipe.language.data.tokenizer import Tokenizer, library_errors

CHUNK = 1 << 17  # bytes between the places where cuts are looked for
SEARCHED = 1 << 15  # bytes after such a place
TRIED = 8  # cuts that the tokenizer is asked about there
BLOCK = 1 << 20  # bytes that are read together to count lines
CONTEXT = 500  # bytes on each side that it sees then
MOST = 1 << 25  # bytes of a chunk
LINES = (".jsonl", ".ndjson")  # names of files of JSON lines
SPACE = b" \t\n\r\v\f"


class TextChunk(NamedTuple):
    """A part of a file of `size` bytes: what begins at bytes start ... stop - 1."""

    path: Path
    size: int
    start: int
    stop: int


class Passage(NamedTuple):
    """A text to tokenize: whether a document begins and ends with it, and where one begins, the bytes of all of it."""

    text: str
    opens: bool
    closes: bool
    nbytes: int


def chunks_of(entries: Sequence[tuple[Path, int]]) -> list[TextChunk]:
    """Return the chunks of (file, bytes) entries, in order."""
    return [
        TextChunk(path, size, start, min(size, start + CHUNK))
        for path, size in entries
        for start in range(0, size, CHUNK)
    ]


class TextReader:
    """Reads the texts of chunks; the tokenizer is asked where texts can be cut."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.cut = lru_cache(maxsize=4096)(self._cut)  # each is asked for twice: as an end, and as a beginning

    def passages(self, chunk: TextChunk) -> Iterator[Passage]:
        """Yield the texts of a chunk. Raises DataError, which names the file and the line or byte."""
        return self._lines(chunk) if chunk.path.name.lower().endswith(LINES) else self._piece(chunk)

    def _piece(self, chunk: TextChunk) -> Iterator[Passage]:
        path, size, start, _ = chunk
        begin = self.cut(path, size, start)
        if begin is None:  # the chunk before this one goes on
            return
        end, place = None, start
        while end is None:
            place += CHUNK
            end = self.cut(path, size, place)
            if place - start > MOST and (end or size) - begin > MOST:
                raise DataError(
                    "a text is too long for this tokenizer, which allows no cut in it",
                    found=f"{size} bytes in {path}",
                    expected=f"at most {MOST} bytes between cuts",
                    remedy="give the text as several files, or as JSON lines with a document in each",
                )
        content = read_bytes(path, begin, end - begin)
        try:
            text = content.decode()
        except UnicodeDecodeError as error:
            raise DataError(
                f"a text is not UTF-8: {error.reason}",
                found=f"byte {content[error.start]:#04x} at position {begin + error.start} of {path}",
                expected="UTF-8",
                remedy="convert the file, or leave it out",
            ) from error
        yield Passage(text, begin == 0, end == size, size)

    def _cut(self, path: Path, size: int, place: int) -> int | None:
        """Return where the text is cut at or soon after a place; None if it is not."""
        if place <= 0 or place >= size:
            return 0 if place <= 0 else size
        first = place - CONTEXT
        content = read_bytes(path, first, min(size, place + SEARCHED + CONTEXT) - first)
        tried, at = 0, CONTEXT - 1
        while tried < TRIED and (at := content.find(b"\n", at) + 1):
            if at > CONTEXT + SEARCHED or at >= len(content):
                break
            if content[at - 2] not in SPACE and content[at] not in SPACE:
                tried += 1
                if self._keeps(content[at - CONTEXT + 1 : at], content[at : at + CONTEXT]):
                    return first + at
        return None

    def _keeps(self, left: bytes, right: bytes) -> bool:
        """Whether two neighbours have the same tokens as the text of both."""
        texts = [part.decode(errors="ignore") for part in (left, right)]  # the outer ends may lie in a character
        if not all(texts) or texts[0][-2:-1].isspace() or texts[1][0].isspace():
            return False
        encode = self.tokenizer.library.encode
        with library_errors(self.tokenizer.path):
            one, two, both = (encode(text, add_special_tokens=False).ids for text in (*texts, "".join(texts)))
        return one + two == both

    def _lines(self, chunk: TextChunk) -> Iterator[Passage]:
        path, size, start, stop = chunk
        begin = 0 if start == 0 else _line_after(path, size, start - 1)
        if begin >= stop:
            return
        end = _line_after(path, size, stop - 1)
        place = begin
        for line in read_bytes(path, begin, end - begin).split(b"\n"):
            if line.strip():
                text, nbytes = _text_of(line, path, place)
                if text:
                    yield Passage(text, True, True, nbytes)
            place += len(line) + 1


def _line_after(path: Path, size: int, place: int) -> int:
    """Return where the line begins whose predecessor ends at or after this place."""
    while place < size:
        count = min(1 << 16, size - place)
        at = read_bytes(path, place, count).find(b"\n")
        if at >= 0:
            return place + at + 1
        place += count
    return size


def _text_of(line: bytes, path: Path, place: int) -> tuple[str, int]:
    """Return the text of a line of JSON, and its bytes; `place` is where the line begins."""
    try:
        facts = json.loads(line)
        text = facts["text"] if isinstance(facts, dict) else None
        if not isinstance(text, str):
            raise ValueError(f"text is {type(text).__name__}" if isinstance(facts, dict) else type(facts).__name__)
        return text, len(text.encode())
    except (ValueError, KeyError, RecursionError) as error:  # a text with half a character is a ValueError, too
        reason = "it has no text" if isinstance(error, KeyError) else f"{type(error).__name__}: {error}"
        blocks = (read_bytes(path, start, min(BLOCK, place - start)) for start in range(0, place, BLOCK))
        number = 1 + sum(block.count(b"\n") for block in blocks)
        raise DataError(
            "a line is no JSON object with a text",
            found=f"{reason[:200]}, line {number} of {path}",
            expected='a line like {"text": "..."}',
            remedy="mend the line, or leave it out",
        ) from error
