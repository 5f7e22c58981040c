"""The data of a training: bytes of text, or tokens, for training and validation."""

from mpipipe.language.data.file_bytes import glance
from mpipipe.language.data.listing import DataListing, UserSource, find, find_files
from mpipipe.language.data.source import Array, Source, Tokens

__all__ = ["Array", "DataListing", "Source", "Tokens", "UserSource", "find", "find_files", "glance"]
