"""The data of a training: bytes of text, or tokens, for training and validation."""

from mpipipe.language.data.file_bytes import Piece, Text
from mpipipe.language.data.listing import DataListing, UserSource, find
from mpipipe.language.data.source import Array, Source, Tokens
from mpipipe.language.data.text import Corpus, Listing, find_files, standard_library
from mpipipe.language.data.windows import Batch, training_batch, validation_batch

__all__ = [
    "Array",
    "Batch",
    "Corpus",
    "DataListing",
    "Listing",
    "Piece",
    "Source",
    "Text",
    "Tokens",
    "UserSource",
    "find",
    "find_files",
    "standard_library",
    "training_batch",
    "validation_batch",
]
