"""Text from a model, byte by byte, through the pipeline that trained it."""

from __future__ import annotations

import numpy as np

from mpipipe.comm import share
from mpipipe.train.data import generator


def generate(pipeline, comm, prompt, count: int, *, seq_len: int, temperature: float, seed: int) -> bytes:
    """`count` bytes that continue `prompt`; the same on every rank. Collective over `comm` and the replicas.

    Each byte takes one forward of the whole pipeline over the last `seq_len` bytes. The window is filled up with zeros
    on the right, which a causal model does not see from the left, so that all forwards have the same shape.

    Parameters
    ----------
    pipeline : Pipeline whose inputs are int64 (1, seq_len) and outputs logits (1, seq_len, 256)
    comm : the pipeline's ranks
    prompt : at least one byte, on every rank
    temperature : divides the logits; 0 takes the likeliest byte
    """
    first, last = pipeline.schedule.placement[0], pipeline.schedule.placement[-1]
    text = bytearray(prompt)
    for index in range(count):
        window = np.frombuffer(bytes(text[-seq_len:]), np.uint8)
        inputs = np.zeros((1, seq_len), np.int64)
        inputs[0, : window.size] = window
        logits = pipeline.forward(inputs if comm.rank == first else None)
        byte = None
        if comm.rank == last:
            byte = draw(logits[0, window.size - 1], temperature, generator(seed, "sample", index))
        text.append(share.broadcast(comm, byte, last))
    return bytes(text[len(prompt) :])


def readable(text: bytes) -> str:
    """`text` as UTF-8 in which a replacement character stands for all that would not show, or would move a cursor."""
    shown = text.decode(errors="replace")
    return "".join(char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in shown)


def draw(logits, temperature: float, random: np.random.Generator) -> int:
    """An index drawn from softmax(logits / temperature), computed in float64; at temperature 0 the largest."""
    if temperature == 0:
        return int(np.argmax(logits))
    scaled = (logits.astype(np.float64) - logits.max()) / temperature
    cumulative = np.cumsum(np.exp(scaled))
    return int(np.searchsorted(cumulative, random.random() * cumulative[-1], side="right"))
