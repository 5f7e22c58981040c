"""A GPU that runs out of memory within a step: what it holds, and what would make it hold less.

Everything is read on the host from arrays that are there. Where no more than one activation is alive, recomputation
saves nothing: the backward needs all of that one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

from mpipipe import arrays
from mpipipe.arrays import Shortage
from mpipipe.errors import StageError
from mpipipe.pipeline.graphs import StageGraphs
from mpipipe.pipeline.weighing import CallState
from mpipipe.stages import StageAdapter


class Held(NamedTuple):
    """What the stages of a rank hold on its GPU.

    Attributes
    ----------
    parameters : bytes of parameters, of their copies to compute with, and of gradients
    idle : bytes of these that places of a tied parameter have given up, and nobody uses (pipeline.ties)
    activations : how many (stage, micro-batch) are alive
    saved : bytes that these hold for their backwards
    inputs : bytes of these that are inputs of stages, which recomputation keeps
    """

    parameters: int
    idle: int
    activations: int
    saved: int
    inputs: int

    @property
    def freed_by_recomputation(self) -> int:
        """Bytes that recomputation would free now, with one activation computed anew at a time."""
        return max(0, self.saved - self.inputs - self.saved // max(1, self.activations))


def memory_error(
    what: str, error: Exception, stages: Sequence[StageAdapter], state: CallState | None, recompute: bool, **place: int
) -> StageError | None:
    """Return the error that explains a lack of device memory, None if `error` is of another kind.

    Parameters
    ----------
    what : the action that failed
    stages, state, recompute : of the executor
    """
    shortage = arrays.memory_shortage(error)
    if shortage is None:
        return None
    held = held_by(stages, state)
    return StageError(
        f"{what} ran out of memory on the GPU",
        found=f"{_asked(shortage)}, {shortage.free:,} bytes free of {shortage.total:,}; {held.activations} activations "
        f"hold {held.saved:,} bytes, parameters and gradients {held.parameters:,}{_idle(held)}",
        remedy=f"{_graphs(stages)}{_recomputation(held, recompute)}; twice as many stages: about "
        f"{held.parameters // 2:,} bytes of parameters and gradients less on each rank, and half of the optimizer's "
        "state; more micro-batches: smaller activations",
    )


def held_by(stages: Sequence[StageAdapter], state: CallState | None) -> Held:
    """Count what the stages of this rank hold on its GPU."""
    models = [model for stage in stages for model in stage.models]
    buffers = [buffer for model in models for buffer in (model.parameters, model.compute, model.gradients)]
    own = list(_spans([buffer.whole for buffer in buffers]))
    used = [buffer.flat for buffer in buffers] + [part for model in models for part in model.parts.values()]
    parameters = _covered(own)
    idle = parameters - _covered(_spans(used))
    if state is None:
        return Held(parameters, idle, 0, 0, 0)
    kept = [*state.saved.values(), *state.pending.values()]
    leases = [view for _, lease in kept for _, (_, view) in lease]
    first = [state.inputs.inputs[m] for stage, m in state.saved if stage == 0]
    saved = _covered([*own, *_spans([saved for saved, _ in kept]), *_spans(leases)]) - parameters
    inputs = _covered([*_spans(leases), *_spans(first)])
    return Held(parameters, idle, len(kept), saved, min(inputs, saved))


def _asked(shortage: Shortage) -> str:
    return "an unknown number of bytes asked for" if shortage.asked is None else f"{shortage.asked:,} bytes asked for"


def _idle(held: Held) -> str:
    return f" ({held.idle:,} of them unused: places of a tied parameter share one array)" if held.idle else ""


def _graphs(stages: Sequence[StageAdapter]) -> str:
    """A remedy where stages have CUDA graphs."""
    used = any(isinstance(stage.computes, StageGraphs) for stage in stages)
    return "MPIPIPE_GRAPHS=0: without the temporary arrays that each CUDA graph keeps; " if used else ""


def _recomputation(held: Held, recompute: bool) -> str:
    if recompute:
        return "recompute=True is on already"
    if held.activations < 2:
        return "recompute=True: saves nothing here, since no more than one activation is alive"
    return f"recompute=True: about {held.freed_by_recomputation:,} bytes of activations less"


def _spans(value: Any) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of the device memory of each array in tuples, lists, dicts and dataclasses."""
    if arrays.is_array(value):
        if arrays.is_device(value) and value.nbytes:
            start = arrays.address(value)
            yield start, start + value.nbytes
        return
    inner: Iterable[Any] = ()
    if isinstance(value, (tuple, list)):
        inner = value
    elif isinstance(value, dict):
        inner = value.values()
    elif is_dataclass(value) and not isinstance(value, type):
        inner = [getattr(value, field.name) for field in fields(value)]
    for each in inner:
        yield from _spans(each)


def _covered(spans: Iterable[tuple[int, int]]) -> int:
    """Count the bytes that any of the spans covers."""
    total, end = 0, 0
    for start, stop in sorted(spans):
        total += max(0, stop - max(start, end))
        end = max(end, stop)
    return total
