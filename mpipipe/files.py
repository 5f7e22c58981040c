"""Files by name: regular files are opened, and a new one appears as a whole or not at all.

Opening a FIFO waits for a writer, reading /dev/zero never ends, and opening some devices has
effects of its own. So the kind of a file is checked before it is opened. It is checked again on the
open descriptor, since the name may stand for another file by then. A file of absurd size is refused
before it is read, and what has a zero byte is no text. Every function raises OSError, whose
`strerror` says what was found; `reading` and `writing` make the errors that users see.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO, TextIO

from mpipipe.errors import ArgumentError, ConfigError, MpipipeError

# By the letter that begins the line of `ls -l`.
KINDS = {
    "d": "a folder",
    "p": "a FIFO (named pipe)",
    "s": "a socket",
    "c": "a character device",
    "b": "a block device",
}
REGULAR = "a readable regular file"  # callers say that they expected this
PARTIAL = ".partial"  # after the name of a file that is being written
BLOCK = 1 << 20  # bytes of a text that are read together
# Without O_NONBLOCK the open of a FIFO that has just taken the place of the file would wait for a
# writer.
FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC

# False for a name that no file can have, as one of 5000 letters: before Python 3.14 those of Path
# raise OSError for it.
exists = os.path.exists
is_folder = os.path.isdir


@contextmanager
def reading(
    what: str,
    path: str | Path,
    error: type[MpipipeError] = ArgumentError,
    expected: str | None = REGULAR,
    remedy: str | None = None,
    also: tuple[type[Exception], ...] = (),
    done: str = "read",
) -> Iterator[None]:
    """Turn an OSError, or one of `also`, into the error "`what` cannot be read"."""
    caught: tuple[type[Exception], ...] = (OSError, *also)
    try:
        yield
    except caught as cause:
        if isinstance(cause, MpipipeError):  # says already what is wrong
            raise
        text = f"{what} cannot be {done}: {reason(cause, path)}"
        raise error(text, found=str(path), expected=expected, remedy=remedy) from cause


# Turns an OSError into the error "`what` cannot be written", which names the file or folder.
writing = partial(reading, error=ConfigError, expected=None, done="written")


def reason(error: Exception, path: str | Path = "") -> str:
    """Return what an exception says, without its number, and with a file besides `path`."""
    text = getattr(error, "strerror", None) or str(error)
    name = str(getattr(error, "filename", None) or path)
    if name in (str(path), f"{path}{PARTIAL}"):
        return text
    return f"{text}: {name}"


def check_new(what: str, path: str | Path) -> None:
    """Raise ConfigError unless `what` can be a new file there: none is overwritten."""
    is_taken = exists(path) or os.path.islink(path)
    if is_taken or not is_folder(Path(path).parent):
        why = "no such folder"
        if is_taken:
            why = "a file or folder of this name already"
        raise ConfigError(
            f"{what} cannot be written: there is {why}",
            found=str(path),
            expected="a new file in a folder that exists",
            remedy="choose another one, or move the old one away",
        )


def check_regular(path: str | Path) -> os.stat_result:
    """Return the status of `path`; raises OSError unless it is a regular file, or a link to one."""
    try:
        status = os.stat(path)
    except ValueError as error:
        # A zero byte, or a character that the file system's encoding does not have.
        raise OSError(errno.EINVAL, f"no file has such a name: {error}", str(path)) from error
    return _checked(status, path)


def open_regular(path: str | Path) -> int:
    """Open a regular file for reading, never waiting for another process.

    The caller closes the descriptor.
    """
    check_regular(path)
    descriptor = os.open(path, FLAGS)
    try:
        _checked(os.fstat(descriptor), path)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def read_text(path: str | Path, most: int) -> str:
    """Read the UTF-8 text of a regular file; raise UnicodeDecodeError, or as `read_bytes`."""
    return read_bytes(path, most).decode()


def read_bytes(path: str | Path, most: int) -> bytes:
    """Read the bytes of a regular file of text, in any encoding.

    Raises OSError, also where the file has more than `most` bytes, or a zero byte: a disk that was
    full leaves those.
    """
    content = bytearray()
    with open(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        while size <= most and (block := file.read(BLOCK)):
            if (place := block.find(0)) >= 0:
                raise OSError(
                    errno.EINVAL, f"it is no text: byte {len(content) + place} is 0", str(path)
                )
            content += block
            size = max(size, len(content))  # it may have grown
    if size > most:
        raise OSError(errno.EFBIG, f"it has more than {most} bytes", str(path))
    return bytes(content)


def read_at(descriptor: int, start: int, count: int) -> bytes:
    """Read bytes start .. start + count of an open file; fewer only at its end."""
    content = bytearray(count)
    return bytes(content[: read_into(descriptor, start, memoryview(content))])


def read_into(descriptor: int, start: int, memory: memoryview) -> int:
    """Fill writable bytes from position `start` of an open file; return how many there were."""
    filled = 0
    while filled < len(memory):  # one call may give less than there is
        count = os.preadv(descriptor, [memory[filled:]], start + filled)
        if not count:
            break
        filled += count
    return filled


def write_whole(
    path: Path, content: bytes, before_naming: Callable[[], object] | None = None
) -> None:
    """Write a file that appears as a whole, as `whole_file` does."""
    with whole_file(path, before_naming) as file:
        file.write(content)


@contextmanager
def whole_file(path: Path, before_naming: Callable[[], object] | None = None) -> Iterator[BinaryIO]:
    """Open a file that appears as a whole: written next to it, synced, then renamed.

    Where that fails, a file that was there stays as it was, and the unfinished one is removed: a
    full disk gets its room back. One that a killed process has left is removed, too: no two
    processes write into one file, and no link is followed. `before_naming` is called before the
    file gets its name; what it raises spares another process's file.
    """
    partial = path.with_name(f"{path.name}{PARTIAL}")
    status = None
    try:
        with suppress(FileNotFoundError):
            partial.unlink()
        with open(partial, "xb") as file:
            status = os.fstat(file.fileno())
            yield file
            file.flush()
            os.fsync(file.fileno())
        if before_naming is not None:
            before_naming()
        os.replace(partial, path)
        sync_folder(path.parent)
    except BaseException:
        with suppress(OSError):
            if status is not None and os.path.samestat(os.lstat(partial), status):
                partial.unlink()
        raise


def show(stream: TextIO, text: str) -> None:
    """Write a text, in which what cannot be encoded is escaped, and flush it."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
    stream.flush()


def silence(stream: TextIO) -> None:
    """Let a broken stream end in /dev/null: Python flushes it at its end, and would fail."""
    with suppress(OSError, ValueError):
        descriptor = os.open(os.devnull, os.O_WRONLY)
        os.dup2(descriptor, stream.fileno())
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Force the names in a folder to the disk, where its file system can."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems have no such thing
            raise
    finally:
        os.close(descriptor)


def _checked(status: os.stat_result, path: str | Path) -> os.stat_result:
    letter = stat.filemode(status.st_mode)[0]
    if letter == "-":
        return status
    code = errno.EINVAL
    if letter == "d":
        code = errno.EISDIR
    kind = KINDS.get(letter, "no regular file")
    raise OSError(code, f"it is {kind}, not a file", str(path))
