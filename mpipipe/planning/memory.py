"""Refuses models and batches that do not fit into this machine, before memory for them is taken.

The limits are generous. What they let through may still be too much; what they refuse could not have run. Bytes are
compared with all the memory of the machine, as if this rank had the machine for itself and kept nothing but what is
counted here. Where the operating system does not say how much memory there is, nothing is refused.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from mpipipe import arrays, nn
from mpipipe.errors import ConfigError
from mpipipe.planning.layer_plan import LayerPlan
from mpipipe.planning.problem import PlanningProblem, declared
from mpipipe.text import exact_bytes, shown_bytes


def check_training(
    problem: PlanningProblem, plan: LayerPlan, rank: int, device: str, *, sample: int, message: int
) -> None:
    """Raise ConfigError if what a rank of the pipeline surely needs for training exceeds this machine's memory.

    On the host that is its parameters, gradients and state of the optimizer, the batch, and one micro-batch's input of
    each of its layers; for a GPU, parameters as they are drawn and the batch. `sample` are the bytes of inputs and
    targets of one sample, `message` those that a layer hands to the next for a micro-batch.
    """
    own = plan.layers_of(rank)
    count = parameters_of([problem.layers[layer] for layer in own])
    wide = arrays.accumulator(arrays.dtype(problem.dtype)).itemsize
    needs = {"batch": sample * plan.rows, f"{count:,} parameters": count * wide}
    if device == "cpu":
        trained = sum(problem.trained_counts[layer] for layer in own)
        needs |= {
            f"gradients and state of {problem.optimizer}": trained * wide * (1 + problem.moments),
            "activations of one micro-batch": len(own) * message,
        }
    check_memory(f"training on pipeline rank {rank}", needs, "lower dim, hidden, layers, batch or seq_len, or use "
                 "more ranks for a pipeline")  # fmt: skip


def check_rehearsal(layers: Sequence[nn.Layer], dtype: str, input_bytes: int) -> None:
    """Raise ConfigError as `check_training` does, where a dry run tries these layers with one micro-batch."""
    count, wide = parameters_of(layers), arrays.accumulator(arrays.dtype(dtype)).itemsize
    needs = {
        f"{count:,} parameters and their gradients": 2 * count * wide,
        "inputs of the layers": len(layers) * input_bytes,
    }
    check_memory("rehearsing a stage for the dry run", needs, "run it on a machine with more memory")


def parameters_of(layers: Sequence[nn.Layer]) -> int:
    """Count the elements of all arrays that the layers declare."""
    return sum(parameter.size for parameter in declared(layers).values())


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


def check_memory(what: str, needs: Mapping[str, int], remedy: str) -> None:
    """Raise ConfigError if the bytes that `what` needs, by what they are for, exceed this machine's memory."""
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


def attentions(layers: Sequence[nn.Layer]) -> Iterator[nn.SelfAttention]:
    """Yield the attention layers among these layers and their parts."""
    for top in layers:
        yield from (layer for _, layer in top.walk("") if isinstance(layer, nn.SelfAttention))
