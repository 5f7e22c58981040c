"""Where a training writes while it runs: a stream and files of lines, which cannot end it.

A closed terminal or a full disk is no reason to lose what was trained. The stream falls silent;
lines that find no room in the file are left out.
"""

from __future__ import annotations

import os
import textwrap
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from mpipipe import files
from mpipipe.job import current_rank, write

_FOLD = textwrap.TextWrapper(
    100, expand_tabs=False, replace_whitespace=False, drop_whitespace=False, break_on_hyphens=False
)


def folded(text: str) -> str:
    """Break lines of more than 100 characters, between words if possible."""
    return "\n".join("\n".join(_FOLD.wrap(line)) for line in text.split("\n"))


class SafeStream:
    """A stream of text that falls silent, for good, once it cannot be written to.

    None is silent from the start. The program's exit code will be 1 then, unless the reader has
    left. Characters that cannot be encoded are escaped.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self.stream = stream

    def write(self, text: str) -> None:
        stream = self.stream
        if stream is None:
            return
        try:
            files.show(stream, text)
        except (OSError, ValueError) as error:
            self.stream = None
            files.silence(stream)
            # The reader has left, as `head` does, or the stream is closed.
            if isinstance(error, (BrokenPipeError, ValueError)):
                return
            current_rank().unwritten = True
            write(
                f"mpipipe: the output cannot be written: {files.reason(error)}; the work goes on, "
                "and its exit code will be 1\n"
            )


class JsonLines:
    """A file of whole lines, which can be read as soon as they are written.

    A line that can be written in part only is cut off again, and one warning says so. Raises
    FileExistsError for a file that exists, unless it `goes_on`.
    """

    warned = False

    def __init__(self, path: Path, goes_on: bool = False) -> None:
        self.path = path
        if not goes_on:
            path.touch(exist_ok=False)
        self.file = open(path, "ab", buffering=0)
        # Bytes of whole lines in the file.
        self.whole = self.file.tell()

    def append(self, line: str) -> None:
        """Write a line. Never raises OSError."""
        # The name of a file may be no text.
        rest = memoryview(f"{line}\n".encode(errors="backslashreplace"))
        try:
            while rest:
                rest = rest[self.file.write(rest) :]
            self.whole = self.file.tell()
        except OSError as error:
            with suppress(OSError):
                self.file.truncate(self.whole)
            if not self.warned:
                self.warned = True
                write(
                    f"mpipipe: {self.path} cannot be written: {error.strerror}; the training goes "
                    "on without it\n"
                )

    def sync(self) -> None:
        """Force the lines to the disk, as far as they could be written. Never raises OSError."""
        with suppress(OSError):
            os.fsync(self.file)

    def close(self) -> None:
        """Close the file. May be called twice."""
        with suppress(OSError):
            self.file.close()
