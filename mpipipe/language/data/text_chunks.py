"""Texts to tokenize, cut into chunks that any rank can do by itself; how many ranks there are changes nothing.

a text file     |---------------chunk-----------|    one document
JSON lines      |---chunk----|---chunk----|chunk|    a chunk has the lines that begin in it; each is a document
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from mpipipe.errors import DataError
from mpipipe.language.data.file_bytes import read_bytes

CHUNK = 1 << 17  # bytes of JSON lines
BLOCK = 1 << 20  # bytes that are read together to count lines
MOST = 1 << 27  # bytes of a text file
LINES = (".jsonl", ".ndjson")  # names of files of JSON lines


class TextChunk(NamedTuple):
    """A part of a file of `size` bytes: what begins at bytes start ... stop - 1."""

    path: Path
    size: int
    start: int
    stop: int

    def documents(self) -> Iterator[tuple[str, int]]:
        """Yield (text, bytes of it) of each document. Raises DataError, which names the file and the line or byte."""
        return _lines(self) if _has_lines(self.path) else _whole(self)


def chunks_of(entries: Sequence[tuple[Path, int]]) -> list[TextChunk]:
    """Return the chunks of (file, bytes) entries, in order. Raises DataError for a text file that is too long."""
    chunks = []
    for path, size in entries:
        if _has_lines(path):
            chunks += [TextChunk(path, size, start, min(size, start + CHUNK)) for start in range(0, size, CHUNK)]
            continue
        if size > MOST:
            raise DataError(
                "a text file is too long for one document",
                found=f"{size} bytes in {path}",
                expected=f"at most {MOST} bytes",
                remedy="give the text as several files, or as JSON lines with a document in each",
            )
        chunks.append(TextChunk(path, size, 0, size))
    return chunks


def _has_lines(path: Path) -> bool:
    return path.name.lower().endswith(LINES)


def _whole(chunk: TextChunk) -> Iterator[tuple[str, int]]:
    content = read_bytes(chunk.path, 0, chunk.size)
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"a text is not UTF-8: {error.reason}",
            found=f"byte {content[error.start]:#04x} at position {error.start} of {chunk.path}",
            expected="UTF-8",
            remedy="convert the file, or leave it out",
        ) from error
    if text:
        yield text, chunk.size


def _lines(chunk: TextChunk) -> Iterator[tuple[str, int]]:
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
                yield text, nbytes
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
