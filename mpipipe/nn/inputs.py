"""The input of a stage: what is accepted, and brought to its device."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from mpipipe import arrays
from mpipipe.arrays import Array
from mpipipe.errors import ArgumentError
from mpipipe.nn.layers.layer import Layer


class AcceptingStage(Protocol):
    """What is asked of the stage; see nn.Stage."""

    dtype: np.dtype
    device: str
    index: int | None
    first_layer: Layer


def accepted_input(stage: AcceptingStage, x: Array) -> Array:
    """Return an input on the stage's device, checked. An Embedding checks integers before it uploads them."""
    device = arrays.device_of(x)
    x = arrays.plain(x)
    if device == "cuda" and stage.device == "cpu":
        raise ArgumentError(
            "the input of a stage on the host is on a GPU",
            stage=stage.index,
            found=type(x).__name__,
            expected="numpy.ndarray",
            remedy="build the stage with device='cuda', or give a numpy array",
        )
    integers = x.dtype.kind in "iu"
    if x.dtype != stage.dtype and not (integers and stage.first_layer.takes_integers):
        raise ArgumentError(
            "the input of a stage has the wrong dtype",
            stage=stage.index,
            found=str(x.dtype),
            expected=f"{stage.dtype}, or integers for an Embedding",
            remedy="hand over real and imaginary parts as features, or let a stage of your own compute with them"
            if x.dtype.kind == "c"
            else f"convert it with astype({str(stage.dtype)!r}) or build the stage with dtype={str(x.dtype)!r}",
        )
    if device == "cuda" and not x.flags.c_contiguous:
        raise ArgumentError(
            "the input of a stage on a GPU is not contiguous",
            stage=stage.index,
            found=f"shape {x.shape}, strides {x.strides}",
            remedy="pass cupy.ascontiguousarray(x)",
        )
    stays = device == stage.device or (integers and stage.first_layer.uploads_integers)
    return x if stays else arrays.upload(x)
