"""Files of tokens, of any format, as data that were found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mpipipe import files
from mpipipe.errors import DataError
from mpipipe.train.data import foreign_tokens, token_file
from mpipipe.train.data.file_tokens import FileTokens
from mpipipe.train.data.fingerprint import fingerprint
from mpipipe.train.data.pieces import forget_files, read_bytes, size_of
from mpipipe.train.data.source import Source
from mpipipe.train.data.split import Parts, split, whole


@dataclass(frozen=True)
class TokenListing:
    """Files of tokens, as one rank finds them and tells the others; see `finding.Found`.

    Attributes
    ----------
    opened : the tokens of each file
    sizes : (file, bytes) of each file that is read
    vocab : number of token ids
    fingerprint : see `fingerprint.fingerprint`
    tokenizer : hash of the tokenizer that made them, None if that is not known
    """

    opened: tuple[FileTokens, ...]
    sizes: tuple[tuple[Path, int], ...]
    vocab: int
    fingerprint: str
    tokenizer: str | None
    unit: str = "tokens"

    def found(self, paths: Sequence[str | Path]) -> list[tuple[Path, int]]:
        """Return (file, bytes) of each file."""
        return list(self.sizes)

    def open(self, paths: Sequence[str | Path], seq_len: int) -> Source:
        """As `Found.open`."""
        train, validation = split(self.opened, seq_len)
        return Source(self.vocab, train, validation, self.fingerprint, self.unit, self.tokenizer)

    def whole(self, paths: Sequence[str | Path]) -> Parts:
        """As `Found.whole`."""
        return whole(self.opened)


def is_token_file(path: Path) -> bool:
    """Whether a path names tokens in a format that is known; by the first bytes of the file, and Megatron's pairs."""
    magics = (token_file.MAGIC, foreign_tokens.NPY_MAGIC)
    return foreign_tokens.megatron_pair(path) is not None or _begins(path).startswith(magics)


def list_tokens(paths: Sequence[Path], vocab: int | None) -> TokenListing:
    """Open files of tokens for a vocabulary, by default what they say, or one more than their largest id.

    Raises DataError if a file is damaged or of another tokenizer than the others.
    """
    forget_files()
    opened: list[FileTokens] = []
    headers: list[tuple[Path, token_file.Header]] = []
    read: list[Path] = []
    for path in paths:
        pair = foreign_tokens.megatron_pair(path)
        if pair is not None:
            opened.append(foreign_tokens.open_megatron(pair, vocab))
            read += pair
            continue
        read.append(path)
        if _begins(path).startswith(token_file.MAGIC):
            header, tokens = token_file.open_tokens(path, vocab)
            headers.append((path, header))
            opened.append(tokens)
        else:
            opened.append(foreign_tokens.open_npy(path, vocab))
    token_file.same_tokenizer(headers)
    own = max(tokens.vocab for tokens in opened)
    if vocab is None:
        vocab = headers[0][1].vocab if headers else own
    for path, header in headers:
        if header.vocab > vocab:
            raise DataError(
                "tokens of another vocabulary",
                found=f"{header.vocab} token ids, {path}",
                expected=f"at most {vocab}, those of the model",
                remedy="tokenize the text with the tokenizer of the model, or leave out vocab",
            )
    sizes = tuple((path, size_of(path)) for path in read)
    opened = [FileTokens(tokens.ids, vocab, tokens.documents) for tokens in opened]
    known = headers[0][1].tokenizer if len(headers) == len(opened) else None
    return TokenListing(tuple(opened), sizes, vocab, fingerprint(list(sizes)), known)


def _begins(path: Path) -> bytes:
    """Return the first 8 bytes of a file, fewer where there are fewer; none for what is no readable file."""
    try:
        return read_bytes(path, 0, min(8, files.check_regular(path).st_size))
    except OSError:
        return b""
