"""Refuses models and batches that do not fit into this machine, before memory for them is taken.

The limits are generous. What they let through may still be too much; what they refuse could not have run. Bytes are
compared with all the memory of the machine, as if this rank had the machine for itself and kept nothing but what is
counted here. Where the operating system does not say how much memory there is, nothing is refused.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from mpipipe import arrays, nn
from mpipipe.attention import Local
from mpipipe.errors import ConfigError
from mpipipe.text import exact_bytes, shown_bytes
from mpipipe.train.config import TrainConfig
from mpipipe.train.training_plan import TrainingPlan

STATES = {"adamw": 2, "sgd": 1}  # arrays as big as the parameters that an optimizer keeps


def check_training(config: TrainConfig, plan: TrainingPlan, rank: int, device: str) -> None:
    """Raise ConfigError if what a rank of the pipeline surely needs for training exceeds this machine's memory.

    On the host that is its parameters, gradients and state of the optimizer, the batch, and one micro-batch's input of
    each of its layers; for a GPU, parameters as they are drawn and the batch.
    """
    layers = own_layers(plan, rank)
    count, trained = parameters_of(layers), plan.trained_parameters(rank)
    kind = arrays.dtype(config.dtype)
    wide = arrays.accumulator(kind).itemsize
    needs = {
        "batch": 16 * plan.rows * config.seq_len,  # inputs and targets, as int64
        f"{count:,} parameters": count * wide,
    }
    if device == "cpu":
        rows, length = plan.microbatch_rows, -(-config.seq_len // config.seq)
        needs |= {
            f"gradients and state of {config.optimizer}": trained * wide * (1 + STATES[config.optimizer]),
            "activations of one micro-batch": len(layers) * rows * length * config.dim * kind.itemsize,
        }
    _check_memory(f"training on pipeline rank {rank}", needs, "lower dim, hidden, layers, batch or seq_len, or use "
                  "more ranks for a pipeline")  # fmt: skip


def check_decoding(plan: TrainingPlan, rank: int, dtype: str, caches: tuple[int, int], ranks: int) -> None:
    """As `check_training`, for the parameters of a decoder and its caches: (sequences, positions), on `ranks` ranks."""
    slots, capacity = caches
    layers = own_layers(plan, rank)
    attentions = [layer for top in layers for _, layer in top.walk("") if isinstance(layer, nn.SelfAttention)]
    width = sum(2 * layer.kv_heads * layer.head_dim for layer in attentions)
    count, size = parameters_of(layers), arrays.dtype(dtype).itemsize
    needs = {
        f"{count:,} parameters": 2 * count * size,  # a stage has as many gradients
        f"keys and values of {slots} x {capacity:,} positions": slots * -(-capacity // ranks) * width * size,
    }
    _check_memory(
        f"generating text on pipeline rank {rank}",
        needs,
        "generate fewer tokens, or answers to fewer prompts at once, or use more ranks",
    )


def check_rehearsal(layers: Sequence[nn.Layer], dtype: str, input_bytes: int) -> None:
    """As `check_training`, for a dry run that tries these layers with one micro-batch on this machine."""
    count, wide = parameters_of(layers), arrays.accumulator(arrays.dtype(dtype)).itemsize
    needs = {
        f"{count:,} parameters and their gradients": 2 * count * wide,
        "inputs of the layers": len(layers) * input_bytes,
    }
    _check_memory("rehearsing a stage for the dry run", needs, "run it on a machine with more memory")


def own_layers(plan: TrainingPlan, rank: int) -> list[nn.Layer]:
    """Return the unbound layers of a rank of the pipeline; they hold no arrays."""
    layers = plan.model.build(Local())
    return [layer for start, stop in plan.ranges_of(rank) for layer in layers[start:stop]]


def parameters_of(layers: Sequence[nn.Layer]) -> int:
    """Count the elements of all arrays that the layers declare."""
    return sum(entry.size for top in layers for _, layer in top.walk("") for entry in layer.declared.values())


def machine_memory() -> int | None:
    """Return the bytes of memory of this machine, None if the operating system does not say."""
    try:
        pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None
    return pages * size if pages > 0 and size > 0 else None


def resident() -> int:
    """Return the bytes of memory that this process has now, 0 where the operating system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def _check_memory(what: str, needs: Mapping[str, int], remedy: str) -> None:
    total, memory = sum(needs.values()), machine_memory()
    if memory is None or total <= memory:
        return
    listed = ", ".join(f"{shown_bytes(size)} for {name}" for name, size in needs.items())
    raise ConfigError(
        f"{what} does not fit into memory",
        found=f"at least {exact_bytes(total)}: {listed}",
        expected=f"at most {exact_bytes(memory)}, all that {socket.gethostname()} has",
        remedy=remedy,
    )
