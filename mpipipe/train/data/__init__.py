"""The data of a training: bytes of text, or tokens, for training and validation."""

from mpipipe.train.data.finding import Found, Given, find
from mpipipe.train.data.pieces import Piece, Text
from mpipipe.train.data.source import Array, Source, Tokens
from mpipipe.train.data.text import Corpus, Listing, find_files, standard_library
from mpipipe.train.data.windows import Batch, training_batch, validation_batch

__all__ = [
    "Array",
    "Batch",
    "Corpus",
    "Found",
    "Given",
    "Listing",
    "Piece",
    "Source",
    "Text",
    "Tokens",
    "find",
    "find_files",
    "standard_library",
    "training_batch",
    "validation_batch",
]
