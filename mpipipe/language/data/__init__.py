"""The data of a training: bytes of text, or tokens, for training and validation."""

from mpipipe.language.data.finding import Found, Given, find
from mpipipe.language.data.pieces import Piece, Text
from mpipipe.language.data.source import Array, Source, Tokens
from mpipipe.language.data.text import Corpus, Listing, find_files, standard_library
from mpipipe.language.data.windows import Batch, training_batch, validation_batch

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
