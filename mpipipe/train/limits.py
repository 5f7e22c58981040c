"""Refuses numbers of layers, actions and positions that could not have run, before anything of such a size is built.

The limits of layers and actions are generous: nobody can mean more.
"""

from __future__ import annotations

from collections.abc import Sequence

from mpipipe import nn
from mpipipe.errors import ConfigError
from mpipipe.schedules.registry import WITH_COSTS
from mpipipe.text import counted

WHOLE_ACTIONS = 1 << 22  # of all ranks in a schedule that each rank makes as a whole: it takes some seconds and 1 GB
ACTIONS = 1 << 20  # of one rank of a schedule
LAYERS = 4096  # transformer blocks: cutting so many into stages takes some seconds


def check_counts(layers: int, name: str, ranks: int, chunks: int, microbatches: int) -> None:
    """Raise ConfigError if the model would have more than LAYERS blocks, or the schedule called `name` more actions.

    A rank makes its own order alone, unless the schedule is searched for its costs: then it makes them all.
    """
    if layers > LAYERS:
        raise ConfigError(
            "too many layers", found=f"layers = {layers:,}", expected=f"at most {LAYERS:,}", remedy="lower layers"
        )
    own = 2 * chunks * microbatches
    actions, most, where = (own * ranks, WHOLE_ACTIONS, "all ranks") if name in WITH_COSTS else (own, ACTIONS, "a rank")
    if actions > most:
        raise ConfigError(
            "the schedule would be too long",
            found=f"{actions:,} actions on {where}: forward and backward of {microbatches:,} micro-batches, and "
            f"{chunks:,} chunks on each of {counted(ranks, 'rank')}",
            expected=f"at most {most:,}",
            remedy="lower microbatches or chunks",
        )


def longest_text(layers: Sequence[nn.Layer]) -> int | None:
    """Return how many tokens a text may have for learned positions, None for a model without; the last is not read."""
    tables = [layer.count for top in layers for _, layer in top.walk("") if isinstance(layer, nn.LearnedPositions)]
    return min(tables) + 1 if tables else None


def check_positions(layers: Sequence[nn.Layer], capacity: int) -> None:
    """Raise ConfigError if a text of `capacity` tokens passes a learned table."""
    longest = longest_text(layers)
    if longest is not None and capacity > longest:
        raise ConfigError(
            "the text would be longer than the model's learned positions",
            found=f"{capacity:,} tokens in all",
            expected=f"at most {longest:,}: {longest - 1:,} positions, and one token more at the end",
            remedy="generate fewer tokens, or give a shorter prompt",
        )
