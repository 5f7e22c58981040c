"""The batches of a training of text, as plain functions."""

from types import SimpleNamespace

from mpipipe.language.data import windows
from mpipipe.language.data.windows import read_windows


def training_starts(length, *, seed, step, batch, rows, seq_len, order="random"):
    """Where the windows of some rows of the batch of a step begin."""
    config = SimpleNamespace(seed=seed, batch=batch, seq_len=seq_len, order=order)
    return windows.training_starts(config, length, step, range(rows.start, rows.stop))


def training_batch(tokens, *, seq_len, **which):
    """(inputs, targets) of some rows of the batch of a step."""
    return read_windows(tokens, training_starts(len(tokens), seq_len=seq_len, **which), seq_len)


def validation_batch(tokens, *, index, batches, batch, rows, seq_len):
    """(inputs, targets) of some rows of a validation batch."""
    config = SimpleNamespace(eval_batches=batches, batch=batch, seq_len=seq_len)
    starts = windows.validation_starts(config, len(tokens), index, range(rows.start, rows.stop))
    return read_windows(tokens, starts, seq_len)
