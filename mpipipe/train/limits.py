"""Refuses numbers of layers, actions and positions that could not have run, before anything of such a size is built.

The limits of layers and actions are generous: nobody can mean more.
"""

from __future__ import annotations

from collections.abc import Sequence

from mpipipe import nn
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


def longest_text(layers: Sequence[nn.Layer]) -> int | None:
    """Return how many tokens a text may have for learned positions, None for a model without; the last is not read."""
    tables = [layer.count for top in layers for _, layer in top.walk("") if isinstance(layer, nn.LearnedPositions)]
    return min(tables) + 1 if tables else None


def check_positions(layers: Sequence[nn.Layer], capacity: int) -> None:
    """Raise ConfigError where a text of `capacity` tokens passes a learned table."""
    longest = longest_text(layers)
    if longest is not None and capacity > longest:
        raise ConfigError(
            "the text would be longer than the model's learned positions",
            found=f"{capacity:,} tokens in all",
            expected=f"at most {longest:,}: {longest - 1:,} positions, and one token more at the end",
            remedy="generate fewer tokens, or give a shorter prompt",
        )
