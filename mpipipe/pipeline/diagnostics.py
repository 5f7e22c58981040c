"""Errors that come out of an action: which layer raised them, and what helps."""

from __future__ import annotations

from traceback import walk_tb

from mpipipe import arrays, nn
from mpipipe.errors import StageError
from mpipipe.pipeline.messages import remedy_of

REMEDY = (
    "recompute=True, which keeps the inputs of stages alone; more stages, or more and so smaller "
    "micro-batches; MPIPIPE_GRAPHS=0, without the temporary arrays that each CUDA graph keeps"
)


def layer_of(error: Exception) -> str:
    """Return " of layer 3 (Conv)" for the innermost layer of an error's traceback; "" for none."""
    text = ""
    for frame, _ in walk_tb(error.__traceback__):
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Layer) and owner.name:
            text = f" of layer {owner.name} ({type(owner).__name__})"
    return text


def action_error(what: str, error: Exception) -> StageError:
    """Return the error to raise for one that came out of `what`, an action or the loss."""
    shortage = memory_error(what, error)
    if shortage is not None:
        return shortage
    return StageError(
        f"{what}{layer_of(error)} raised {type(error).__name__}: {error}", remedy=remedy_of(error)
    )


def memory_error(what: str, error: Exception) -> StageError | None:
    """Return the error that explains a lack of GPU memory in an action; None for other errors."""
    shortage = arrays.memory_shortage(error)
    if shortage is None:
        return None
    request = "an unknown number of"
    if shortage.request is not None:
        request = f"{shortage.request:,}"
    return StageError(
        f"{what} ran out of memory on the GPU",
        found=f"{request} bytes asked for, {shortage.free:,} bytes free of {shortage.total:,}",
        remedy=REMEDY,
    )
