"""Refuses numbers of layers and actions that nobody can mean, before anything of such a size is built.

The limits are generous: what they refuse could not have run.
"""

from __future__ import annotations

from mpipipe.errors import ConfigError

ACTIONS = 1 << 22  # of all ranks in a schedule: building and checking so many takes some seconds and 1 GB
LAYERS = 4096  # transformer blocks: cutting so many into stages takes some seconds


def check_counts(layers: int, ranks: int, chunks: int, microbatches: int) -> None:
    """Raise ConfigError where the model would have more than LAYERS blocks, or the schedule more than ACTIONS."""
    if layers > LAYERS:
        raise ConfigError(
            "too many layers", found=f"layers = {layers:,}", expected=f"at most {LAYERS:,}", remedy="lower layers"
        )
    actions = 2 * ranks * chunks * microbatches
    if actions > ACTIONS:
        raise ConfigError(
            "the schedule would be too long",
            found=f"{actions:,} actions: forward and backward of {microbatches:,} micro-batches on {ranks} ranks with "
            f"{chunks:,} chunks each",
            expected=f"at most {ACTIONS:,}",
            remedy="lower microbatches or chunks",
        )
