"""The data of a training: bytes of text, or tokens, for training and validation.

source.py               what a training reads: `Tokens` by position, and two of them as a `Source`
listing.py              the files that `--data` names, and what of them is held out for validation
token_files.py          tokens in files of every format
file_bytes.py           bytes of files by position, and hashes by which ranks compare them
windows.py              which windows of the tokens a step trains on
tokenize.py             text to a file of tokens, with tokenizer
"""

from mpipipe.language.data.file_bytes import glance
from mpipipe.language.data.listing import DataListing, check_tokenizer, find, find_files
from mpipipe.language.data.source import Array, Source, Tokens
from mpipipe.language.data.tokenize import tokenize

__all__ = ["Source", "find"]
__dir__ = __all__.copy
