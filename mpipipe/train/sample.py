"""Text from a model, byte by byte."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mpipipe.comm.consensus import raise_on_all
from mpipipe.comm.group import group_of
from mpipipe.comm.mesh import Mesh
from mpipipe.errors import ArgumentError, NonFiniteError
from mpipipe.pipeline import Pipeline
from mpipipe.train.data import generator


def generate(pipeline: Pipeline, mesh: Mesh, prompt: bytes, count: int, *, temperature: float, seed: int) -> bytes:
    """Return bytes that continue `prompt`, the same on every rank. Collective over the mesh.

    The first forward takes the prompt, and each later one the byte before. One rank draws for all: ranks whose logits
    differ in a last bit still write the same text.

    Parameters
    ----------
    pipeline : what `build_decoder` makes, on `mesh.pipe`, before any other forward
    mesh : the ranks
    prompt : at least one byte, on every rank
    count : number of bytes to return
    temperature : divides the logits; 0 takes the likeliest byte
    seed : of the draws

    Raises, on every rank, ArgumentError for an empty prompt and a temperature that is below 0 or not finite, and
    NonFiniteError where the model gives logits that are NaN or infinite.
    """
    group = group_of(mesh.comm)
    with group.together("generate: the prompt"):
        if not prompt:
            raise ArgumentError("the prompt is empty", expected="at least one byte, which the text then continues")
        if not 0 <= temperature < math.inf:
            raise ArgumentError("temperature", found=temperature, expected="a finite number of at least 0")
    placement = pipeline.schedule.placement
    first, drawing = mesh.pipe.rank == placement[0], mesh.rank_of(placement[-1], 0, 0)
    text, latest = bytearray(), bytes(prompt)
    for index in range(count):
        inputs = np.frombuffer(latest, np.uint8).astype(np.int64)[None] if first else None
        logits: Any = pipeline.forward(inputs)  # one array, since the inputs are one
        byte = error = None
        if mesh.rank == drawing:
            try:
                byte = draw(logits[0, -1], temperature, generator(seed, "sample", index))
            except NonFiniteError as caught:
                error = caught
        byte, error = group.broadcast("generate: the next byte", (byte, error), drawing)
        if error is not None:
            raise_on_all(drawing, error, group)
        latest = bytes([byte])
        text += latest
    return bytes(text)


def readable(text: bytes) -> str:
    """Decode UTF-8, with a replacement character for all that would not show, or would move a cursor."""
    shown = text.decode(errors="replace")
    return "".join(char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in shown)


def draw(logits: np.ndarray, temperature: float, random: np.random.Generator) -> int:
    """Draw an index from softmax(logits / temperature), computed in float64; at temperature 0 the largest.

    Raises NonFiniteError where a logit is NaN or infinite.
    """
    finite = np.isfinite(logits)
    if not finite.all():
        raise NonFiniteError(
            "the logits of the model are not finite",
            found=f"{np.count_nonzero(~finite)} of {finite.size} are not",
            expected="finite numbers",
            remedy="take weights of a training whose loss is finite, or a wider dtype",
        )
    if temperature == 0:
        return int(np.argmax(logits))
    scaled = (logits.astype(np.float64) - logits.max()) / temperature
    cumulative = np.cumsum(np.exp(scaled))
    return int(np.searchsorted(cumulative, random.random() * cumulative[-1], side="right"))
