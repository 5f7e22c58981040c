"""Text to a file of tokens, by all ranks together; the file is the same for any number of them.

The texts are cut into units (units.py), and units are put into chunks of about `CHUNK` bytes. Chunk c belongs to rank c
modulo the number of ranks. The ranks agree behind every `ROUND` chunks of theirs, so that an error on one of them ends
them all, and all know how far they are.

    the library's threads     | encode 0 | encode 1 | encode 2 |
    Python              read 0 | read 1  | write 0, read 2 | write 1 ...
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from itertools import chain, islice
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from mpipipe import files
from mpipipe.comm.binding import own_cores, parse_cores
from mpipipe.comm.group import Group, group_of
from mpipipe.comm.threads import fair_share
from mpipipe.comm.types import Communicator
from mpipipe.errors import ConfigError, DataError
from mpipipe.train import output_folder
from mpipipe.train.data.parts import Chunk, Counts, PartWriter, assemble
from mpipipe.train.data.pieces import forget_files
from mpipipe.train.data.text import find_files
from mpipipe.train.data.token_file import Header, itemsize_for
from mpipipe.train.data.tokenizer import Tokenizer, explained, open_tokenizer
from mpipipe.train.data.units import Text, Texts, Unit, units_of

CHUNK = 1 << 21  # bytes of text
ROUND = 4  # chunks of each rank
THREADS = "RAYON_NUM_THREADS"  # of the library


class Done(NamedTuple):
    """What has been tokenized.

    Attributes
    ----------
    header : of the file
    path : of the file
    files : number of files of text
    seconds : from the first text that was read to the file under its name
    """

    header: Header
    path: Path
    files: int
    seconds: float


def tokenize(
    texts: Sequence[str],
    tokenizer: str,
    out: str,
    comm: Communicator,
    *,
    end: str | None = None,
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> Done:
    """Write the tokens of texts into a file; collective. All ranks raise the same error, and leave no file then.

    Parameters
    ----------
    texts : files and folders of text; files of JSON lines are known by their names
    tokenizer : folder of a tokenizer
    out : a new file, in a folder that all ranks share
    comm : the ranks
    end : the token behind each document, in place of the one that the tokenizer's folder names
    progress : called with the bytes that are done, and all

    Raises
    ------
    DataError
        For a text that cannot be read, a line without a text, a tokenizer that cannot be read.
    ConfigError
        For an `out` that is there already, or that ranks do not share.
    StorageError
        For a file that cannot be written.
    BackendError
        Without the library.
    """
    group, path = group_of(comm), Path(output_folder.shared_path(comm, out))
    with group.together("tokenize: the output"):
        if comm.rank == 0:
            _check_new(path)
    output_folder.make_folder(path.parent, comm, writes=True)
    share_threads(group)
    with group.together("tokenize: the tokenizer"):
        encoder = Encoder(open_tokenizer(tokenizer, end))
    group.agree(
        "tokenize: the tokenizer",
        (("tokenizer", encoder.tokenizer.hash), ("end of text", encoder.tokenizer.end)),
        message="the ranks have different tokenizers",
        remedy="give all hosts the same folder",
    )
    found = found_texts(texts, group)
    chunks = chunks_of(units_of(found))
    start, total, done = perf_counter(), sum(size for _, size in found), 0
    with PartWriter(path, comm.rank) as part, ThreadPoolExecutor(1) as worker:
        encoded = encoder.stream(chunks[comm.rank :: comm.size], worker)
        for _ in range(-(-len(chunks) // (comm.size * ROUND))):
            error, size = None, 0
            try:
                for chunk, nbytes in islice(encoded, ROUND):
                    part.write(chunk)
                    size += nbytes
            except Exception as caught:
                error = caught
            done += int(group.agree("tokenize: some chunks", values=[size], error=error).sum())
            progress(done, total)
        with group.together("tokenize: the parts"):
            part.flush()
        counts = group.gather("tokenize: the parts", part.counts)
        header = _assembled(path, counts, encoder.tokenizer, group)
    return Done(header, path, len(found), perf_counter() - start)


class Encoder:
    """Turns units into tokens.

    Parameters
    ----------
    tokenizer : to use
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.texts = tokenizer, Texts(tokenizer)
        ends = () if tokenizer.end is None else (tokenizer.end,)
        behind = tokenizer.behind if tokenizer.behind[-1:] == ends else (*tokenizer.behind, *ends)
        self._dtype = np.dtype(f"<u{itemsize_for(tokenizer.vocab)}")
        self._around = np.array(tokenizer.before, self._dtype), np.array(behind, self._dtype)

    def encode(self, units: Sequence[Unit]) -> Chunk:
        """Return the tokens of some units."""
        texts = self._texts(units)
        return self._chunk(texts, self._encode(texts))

    def stream(self, chunks: Sequence[Sequence[Unit]], worker: Executor) -> Iterator[tuple[Chunk, int]]:
        """Yield the tokens of some chunks, and how many bytes of text each has; the worker calls the library."""
        earlier: tuple[list[Text], Future[Sequence[Any]], int] | None = None
        for units in chunks:
            texts = self._texts(units)
            future = worker.submit(self._encode, texts)
            if earlier is not None:
                yield self._chunk(earlier[0], earlier[1].result()), earlier[2]
            earlier = texts, future, sum(unit.stop - unit.start for unit in units)
        if earlier is not None:
            yield self._chunk(earlier[0], earlier[1].result()), earlier[2]

    def _texts(self, units: Sequence[Unit]) -> list[Text]:
        return list(chain.from_iterable(map(self.texts.of, units)))

    def _encode(self, texts: Sequence[Text]) -> Sequence[Any]:
        with explained(self.tokenizer.path):
            found: Sequence[Any] = self.tokenizer.library.encode_batch_fast(
                [each.text for each in texts], add_special_tokens=False
            )
        return found

    def _chunk(self, texts: Sequence[Text], encoded: Sequence[Any]) -> Chunk:
        before, behind = self._around
        pieces, starts, count = [np.zeros(0, self._dtype)], list[int](), 0
        for each, found in zip(texts, encoded):
            own = [np.array(found.ids, self._dtype)]
            if each.opens:
                starts.append(count)
                own.insert(0, before)
            if each.closes:
                own.append(behind)
            pieces += own
            count += sum(map(len, own))
        return Chunk(np.concatenate(pieces), starts, [each.nbytes for each in texts if each.opens])


def chunks_of(units: Sequence[Unit]) -> list[list[Unit]]:
    """Put consecutive units together."""
    chunks: list[list[Unit]] = []
    room = 0
    for unit in units:
        size = unit.stop - unit.start
        if size > room:
            chunks.append([])
            room = CHUNK
        chunks[-1].append(unit)
        room -= size
    return chunks


def found_texts(texts: Sequence[str], group: Group) -> list[tuple[Path, int]]:
    """Return (file, bytes) of all texts, as rank 0 sees them."""
    found: list[tuple[Path, int]] = []
    with group.together("tokenize: listing the texts"):
        if group.rank == 0:
            forget_files()
            found = [entry for text in texts for entry in find_files(Path(text).absolute())]
    listed: list[tuple[Path, int]] = group.broadcast("tokenize: the list of texts", found)
    return listed


def _check_new(path: Path) -> None:
    if files.exists(path):
        raise ConfigError(
            "there is a file or folder of this name already",
            found=str(path),
            expected="a new file",
            remedy="choose another one with --out, or move the old one away",
        )


def _assembled(path: Path, counts: Sequence[Sequence[Counts]], tokenizer: Tokenizer, group: Group) -> Header:
    header = None
    with group.together("tokenize: the file of tokens"):
        if group.rank == 0:
            if not sum(count.tokens for part in counts for count in part):
                raise DataError("the texts have no tokens", found=str(path), remedy="give files that hold some text")
            header, _ = assemble(path, counts, tokenizer.vocab, tokenizer.end, tokenizer.hash)
    shared: Header = group.broadcast("tokenize: the header", header)
    return shared


def share_threads(group: Group) -> None:
    """Let the library use this rank's share of the cores, unless the user has set a number of threads; collective.

    Hardware threads count as cores, as the library counts them.
    """
    own = parse_cores(own_cores())
    share = fair_share(group, own)
    if own and THREADS not in os.environ:
        os.environ[THREADS] = str(share)
