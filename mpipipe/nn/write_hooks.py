"""Hooks around writes to a stage: before its parameters, and after its gradients.

A checkpoint is read from the arrays themselves while the next step computes. Whatever writes
parameters, or what an optimizer remembers, calls `announce_write` first; a checkpoint that still
reads waits there until it has read.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from mpipipe.arrays import Array
from mpipipe.nn.layers.layer import Layer
from mpipipe.nn.stage import Stage


def announce_write(*owners: Any) -> None:
    """Call the `before_write` of stages and optimizers whose arrays are about to change."""
    for owner in owners:
        for function in tuple(owner.before_write):
            function()


# -- Which layer of a stage is the last one to write to each range of its gradients ----------------
#
#     layers       0 -- 1 -- 2 -- 3                  a backward goes from the last one to the first
#     gradients    | 0 | 1 | 2 | 3 | 0 1 2 3 | 0 |   matrices, gains and biases, tied ones
#
# Each array of parameters belongs to one layer, which adds to its gradient in its own backward and
# nowhere else. Places of a tied parameter that share a storage add to arrays of their own within a
# step (pipeline/ties.py), so that holds for them as well. That is known where all layers are of
# this package; others may do as they like.


class GradientPieces(NamedTuple):
    """A one-dimensional array of gradients, cut by the layers that write to it.

    `pieces` are (where the piece ends, place in `Stage.layers` of the layer that writes to it), in
    the order of memory.
    """

    array: Array
    pieces: list[tuple[int, int]]


class GradientReady(NamedTuple):
    """All gradients of a stage, cut into pieces, and the place of each layer.

    The flat buffer comes first, then the parts.
    """

    arrays: list[GradientPieces]
    places: dict[Layer, int]


def gradient_ready(stage: Stage) -> GradientReady | None:
    """Return which layers complete which gradients of a stage; None if that is not known.

    That is for a `Stage` itself: a class derived from it may write to gradients in ways of its own.
    """
    tops = {}  # the place of the layer in `Stage.layers` that each layer is within
    for place, top in enumerate(stage.layers):
        for _, layer in top.walk(""):
            tops[layer] = place
            if not type(layer).__module__.startswith("mpipipe."):
                return None
    place_of = {name: tops[layer] for name, (layer, _) in stage.layer_of.items()}
    flat = stage.gradients.flat
    starts = []
    for name, start in stage.gradients.offsets.items():
        if name not in stage.buffers.owners:
            starts.append((start, name))
    starts.sort()
    stops = [start for start, _ in starts[1:]] + [flat.size]
    pieces = []
    for (start, name), stop in zip(starts, stops):
        if stop > start:
            pieces.append((stop, place_of[name]))
    gradients = [GradientPieces(flat, pieces)]
    for name, part in stage.buffers.parts.items():
        gradients.append(GradientPieces(part.reshape(-1), [(part.size, place_of[name])]))
    return GradientReady(gradients, {layer: place for place, layer in enumerate(stage.layers)})
