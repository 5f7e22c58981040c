"""Sizes that nobody can mean are refused before anything of such a size is built.

The limits are generous: what they let through may still be too much, what they refuse could not have run. Counts are
held against fixed numbers, and bytes against all the memory of the machine (`free` or `sysctl hw.memsize` show it), as
if this rank had the machine for itself and kept nothing but what is counted here. Without a word of the operating
system on its memory, bytes are not checked.
"""

from __future__ import annotations

import os
import socket

from mpipipe import arrays, nn
from mpipipe.attention import Local
from mpipipe.errors import ConfigError

ACTIONS = 1 << 22  # of all ranks in a schedule: building and checking so many takes some seconds and 1 GB
LAYERS = 4096  # transformer blocks: cutting so many into stages takes some seconds
STATES = {"adamw": 2, "sgd": 1}  # arrays as big as the parameters that an optimizer keeps


def check_counts(layers: int, ranks: int, chunks: int, microbatches: int):
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


def check_training(config, plan, rank: int, device: str):
    """Raise ConfigError where what a rank of the pipeline surely needs for training exceeds this machine's memory.

    On the host that is its parameters, gradients and state of the optimizer, the batch, and one micro-batch's input of
    each of its layers; for a GPU, parameters as they are drawn and the batch.
    """
    layers = own_layers(plan, rank)
    count = parameters_of(layers)
    kind = arrays.dtype(config.dtype)
    wide = arrays.accumulator(kind).itemsize
    needs = {
        "batch": 16 * plan.rows * config.seq_len,  # inputs and targets, as int64
        f"{count:,} parameters": count * wide,
    }
    if device == "cpu":
        rows, length = -(-plan.rows // plan.schedule.microbatches), -(-config.seq_len // config.seq)
        needs |= {
            f"gradients and state of {config.optimizer}": count * wide * (1 + STATES[config.optimizer]),
            "activations of one micro-batch": len(layers) * rows * length * config.dim * kind.itemsize,
        }
    _check_memory(f"training on pipeline rank {rank}", needs, "lower dim, hidden, layers, batch or seq_len, or use "
                  "more ranks for a pipeline")  # fmt: skip


def check_decoding(plan, rank: int, dtype: str, capacity: int, ranks: int):
    """As `check_training`, for the parameters of `decoder` and its caches of `capacity` positions on `ranks` ranks."""
    layers = own_layers(plan, rank)
    attentions = [layer for top in layers for _, layer in top.walk("") if isinstance(layer, nn.SelfAttention)]
    width = sum(2 * layer.kv_heads * layer.head_dim for layer in attentions)
    count, size = parameters_of(layers), arrays.dtype(dtype).itemsize
    needs = {
        f"{count:,} parameters": 2 * count * size,  # a stage has as many gradients
        f"keys and values of {capacity:,} positions": -(-capacity // ranks) * width * size,
    }
    _check_memory(f"generating text on pipeline rank {rank}", needs, "generate fewer bytes, or use more ranks")


def own_layers(plan, rank: int) -> list:
    """The unbound layers of a rank of the pipeline; they hold no arrays."""
    layers = plan.model.build(Local())
    parts = [plan.layer_ranges[number] for number in plan.schedule.stages_of(rank)]
    return [layer for start, stop in parts for layer in layers[start:stop]]


def parameters_of(layers) -> int:
    """Elements of all arrays that the layers declare."""
    return sum(entry.size for top in layers for _, layer in top.walk("") for entry in layer.declared.values())


def machine_memory() -> int | None:
    """Bytes of memory of this machine, None where it does not say."""
    try:
        pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None
    return pages * size if pages > 0 and size > 0 else None


def _check_memory(what, needs, remedy):
    total, memory = sum(needs.values()), machine_memory()
    if memory is None or total <= memory:
        return
    listed = ", ".join(f"{_gib(size)} for {name}" for name, size in needs.items())
    raise ConfigError(
        f"{what} does not fit into memory",
        found=f"at least {_gib(total)}: {listed}",
        expected=f"at most {_gib(memory)}, all that {socket.gethostname()} has",
        remedy=remedy,
    )


def _gib(size: int) -> str:
    return f"{size / 2**30:.3g} GiB"
