"""The data of an evaluation: tokens as they are, or text as the tokens of the model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

import numpy as np

from mpipipe.comm.group import Group, group_of
from mpipipe.comm.mesh import Mesh
from mpipipe.errors import ConfigError, DataError
from mpipipe.even_split import even_split
from mpipipe.train.data import Array, Tokens, find
from mpipipe.train.data.fingerprint import glance
from mpipipe.train.data.tokenize import Encoder
from mpipipe.train.data.tokenizer import Tokenizer
from mpipipe.train.data.units import units_of
from mpipipe.train.model_folder import ModelFolder


def open_tokens(folder: ModelFolder, paths: Sequence[str], mesh: Mesh) -> tuple[Tokens, str]:
    """Return the tokens at the paths, which rank 0 looks for, and what a token is called; on every rank, collective.

    Files of tokens are read by position. Text of a model with a tokenizer is tokenized by all ranks together, each of
    which then has all tokens in memory. Raises, on every rank, DataError or ConfigError for data that are not the
    model's.
    """
    group = group_of(mesh.comm)
    listed, tokenizer = None, None
    with group.together("evaluate: the data"):
        if mesh.rank == 0:
            if not paths:
                raise ConfigError("there is nothing to evaluate on", expected="files with --data")
            listed = find([str(Path(path).absolute()) for path in paths], folder.model.vocab)
    absolute = group.broadcast("evaluate: the paths", [str(Path(path).absolute()) for path in paths])
    found = group.broadcast("evaluate: the list of data", listed)
    with group.together("evaluate: the tokenizer"):
        tokenizer = folder.tokenizer()
        if found.unit == "bytes" and tokenizer is None and folder.model.vocab != 256:
            raise ConfigError(
                "the model has no tokenizer, so it takes no text",
                found=f"text in {absolute[0]}, {folder.model.vocab} token ids in the model",
                expected="files of tokens",
                remedy="python -m mpipipe tokenize --tokenizer DIR TEXT --out FILE",
            )
        wanted = getattr(found, "tokenizer", None)
        if tokenizer is not None and wanted not in (None, (hash_ := getattr(tokenizer, "hash", wanted))):
            raise DataError(
                "the tokens are those of another tokenizer",
                found=f"hash {wanted} in {absolute[0]}",
                expected=f"{hash_}, as in {folder.path}",
                remedy="tokenize the text with the tokenizer of the model",
            )
    if found.unit == "bytes" and tokenizer is not None:
        return tokenized(found.found(absolute), cast(Tokenizer, tokenizer), group), "tokens"
    with group.together("evaluate: opening the data"):
        tokens = found.whole(absolute)
        seen = glance(found.found(absolute))
    group.agree(
        "evaluate: the data",
        (("the first and last blocks of the files", seen),),
        message="the ranks see different data",
        remedy="give the same files to all hosts, best on a shared file system",
    )
    return tokens, found.unit


def tokenized(files: Sequence[tuple[Path, int]], tokenizer: Tokenizer, group: Group) -> Array:
    """Return the tokens of files of text on every rank; each rank has tokenized its share. Collective."""
    units = units_of(files)
    part = even_split(len(units), group.size)[group.rank]
    chunk = None
    with group.together("evaluate: tokenizing"):
        chunk = Encoder(tokenizer).encode(units[part.start : part.stop])
    chunks = group.gather("evaluate: the tokens", chunk)
    shifts = np.cumsum([0, *(len(each.ids) for each in chunks)])
    starts = [start + int(shift) for each, shift in zip(chunks, shifts) for start in each.starts]
    ids = np.concatenate([each.ids for each in chunks])
    return Array(ids, starts, sum(sum(each.nbytes) for each in chunks))
