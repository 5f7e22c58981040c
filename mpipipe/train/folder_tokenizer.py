"""The tokenizer that lies in a model folder, whoever wrote the folder."""

from __future__ import annotations

from pathlib import Path

from mpipipe.train.data.tokenizer import NAME, Tokenizer, open_tokenizer


def tokenizer_in(folder: Path) -> Tokenizer | None:
    """Open the tokenizer in a folder, None if there is none. Raises DataError or BackendError."""
    return open_tokenizer(folder) if (folder / NAME).exists() else None
