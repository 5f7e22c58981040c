"""Refuses numbers of layers and positions that could not have run, before anything of such a size is built."""

from __future__ import annotations

from collections.abc import Sequence

from mpipipe import arrays, nn
from mpipipe.attention import Local
from mpipipe.errors import ConfigError
from mpipipe.language.models.fine_tuning import Model
from mpipipe.planning.layer_plan import LayerPlan
from mpipipe.planning.memory import attentions, check_memory, parameters_of
from mpipipe.train.training_plan import check_actions

LAYERS = 4096  # transformer blocks, which is generous: cutting so many into stages takes some seconds


def check_layers(layers: int) -> None:
    """Raise ConfigError for more than LAYERS transformer blocks."""
    if layers > LAYERS:
        raise ConfigError(
            "too many layers", found=f"layers = {layers:,}", expected=f"at most {LAYERS:,}", remedy="lower layers"
        )


def check_counts(layers: int, schedule: str, ranks: int, chunks: int, microbatches: int) -> None:
    """Raise ConfigError for too many transformer blocks, and for a schedule with too many actions."""
    check_layers(layers)
    check_actions(schedule, ranks, chunks, microbatches)


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


def check_decoding(model: Model, plan: LayerPlan, rank: int, dtype: str, caches: tuple[int, int], ranks: int) -> None:
    """Raise ConfigError if a decoder surely exceeds this machine's memory: its parameters, and its caches.

    `caches` are (sequences, positions), which lie on `ranks` ranks.
    """
    slots, capacity = caches
    layers = model.build(Local())
    own = [layers[place] for place in plan.layers_of(rank)]
    width = sum(2 * layer.kv_heads * layer.head_dim for layer in attentions(own))
    count, size = parameters_of(own), arrays.dtype(dtype).itemsize
    needs = {
        f"{count:,} parameters": 2 * count * size,  # a stage has as many gradients
        f"keys and values of {slots} x {capacity:,} positions": slots * -(-capacity // ranks) * width * size,
    }
    check_memory(
        f"generating text on pipeline rank {rank}",
        needs,
        "generate fewer tokens, or answers to fewer prompts at once, or use more ranks",
    )
