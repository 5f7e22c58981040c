"""The batches of a training of text, and bytes that continue a prompt, as plain functions."""

from mpipipe.language.data.windows import read_windows, training_starts, validation_starts
from mpipipe.language.inference.generation import continued


def training_batch(tokens, *, seq_len, **which):
    """(inputs, targets) of some rows of the batch of a step."""
    return read_windows(tokens, training_starts(len(tokens), seq_len=seq_len, **which), seq_len)


def validation_batch(tokens, *, seq_len, **which):
    """(inputs, targets) of some rows of a validation batch."""
    return read_windows(tokens, validation_starts(len(tokens), seq_len=seq_len, **which), seq_len)


def generate(decoder, prompt, count, **options):
    """So many bytes that a model of bytes continues `prompt` with."""
    return bytes(continued(decoder, prompt, count, 256, **options))
