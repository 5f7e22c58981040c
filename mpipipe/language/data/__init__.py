"""The data of a training: bytes of text, or tokens, for training and validation."""

from mpipipe.language.data.file_bytes import glance
from mpipipe.language.data.listing import DataListing, UserSource, find, find_files
from mpipipe.language.data.source import Array, Source, Tokens
from mpipipe.language.data.windows import Batch, training_batch, validation_batch

__all__ = [
    "Array",
    "Batch",
    "DataListing",
    "Source",
    "Tokens",
    "UserSource",
    "find",
    "find_files",
    "glance",
    "training_batch",
    "validation_batch",
]
