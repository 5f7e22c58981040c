"""The actions of a stage as CUDA graphs: one launch each, where small micro-batches leave the GPU waiting for Python.

A graph repeats the same work on the same memory. So there are slots: the arrays of one micro-batch under way, from its
forward to its last backward, at fixed places. A forward takes a free slot and copies its input there. Results are
copied out, so that neither messages nor the loss see an array that the next micro-batch of the slot will write.

Each slot has graphs of its own, for the forward and for each kind of backward. The first action of a kind runs without
one, since it compiles kernels, measures, and fills caches. The next one is recorded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from mpipipe import arrays, nn
from mpipipe.arrays import Array
from mpipipe.nn import Stage, accepted_input
from mpipipe.stages import StageAdapter

logger = logging.getLogger("mpipipe")

MOST_KINDS = 4  # shapes of input of one stage that are recorded; inputs of more shapes run without graphs
Key: TypeAlias = "tuple[object, ...]"  # an action, and what its work depends on


class Recorded(NamedTuple):
    """One action of one slot."""

    graph: arrays.Graph  # the work
    result: Any  # what the action returns; each launch writes its arrays


@dataclass(slots=True)
class Slot:
    """Fixed memory for one micro-batch under way."""

    number: int  # among those of its kind
    x: Array  # input
    dy: Array | None = None  # gradient of the output, once a backward was recorded
    graphs: dict[Key, Recorded] = field(default_factory=dict)  # what was recorded


@dataclass(slots=True)
class Kind:
    """What inputs of one shape and dtype have in common."""

    met: set[Key] = field(default_factory=set)  # actions that have run, and may be recorded when they come again
    made: int = 0  # number of slots
    free: dict[int, Slot] = field(default_factory=dict)  # slots that no micro-batch has, by their numbers

    def take(self, x: Array) -> Slot:
        """Take the first free slot, so that a micro-batch has the same one in all steps; make one if none is free."""
        if self.free:
            return self.free.pop(min(self.free))
        self.made += 1
        return Slot(self.made, arrays.empty_like(x))


@dataclass(slots=True)
class Saved:
    """What the forward of a micro-batch leaves for its backward.

    pending_key : of the recorded input gradient that writes `pending` each time; None without a graph
    """

    saved: Any  # what the stage saved
    kind: Kind | None = None  # of the micro-batch; None if graphs are out of the question
    slot: Slot | None = None  # of the micro-batch; None if its forward ran without a graph
    pending: Any = None  # what the input gradient left for the weight gradient
    pending_key: Key | None = None

    def __del__(self) -> None:
        """The slot is free once nobody holds what was saved: after the last backward, or after a call that failed."""
        if self.kind is not None and self.slot is not None:
            self.kind.free[self.slot.number] = self.slot


def use_graphs(stage: StageAdapter, may_record: Callable[[], bool]) -> None:
    """Let a stage compute by CUDA graphs where it can."""
    if type(stage.given) is nn.Stage:
        stage.computes = StageGraphs(stage.given, may_record)
    else:
        logger.info("CUDA graphs: a stage has none: %s is no nn.Stage", stage.name)


class StageGraphs:
    """Forward and backward of a stage, with one launch each where that is possible.

    stage : on a GPU
    may_record : whether the host may wait for the device now, as it does to allocate the memory of a graph

    reason : why nothing more is recorded; "" where it is
    """

    def __init__(self, stage: nn.Stage, may_record: Callable[[], bool]) -> None:
        self.stage, self._may_record = stage, may_record
        self.reason = arrays.graphs_refused() or unrecordable(stage)
        self._kinds: dict[tuple, Kind] = {}
        self._buffers: tuple = ()  # where the recorded work finds parameters and gradients
        logger.info("%s", self)

    def __str__(self) -> str:
        return f"CUDA graphs: stage {self.stage.index} {f'has none: {self.reason}' if self.reason else 'has them'}"

    @property
    def recorded(self) -> int:
        """Number of graphs of the slots that no micro-batch has: of all slots between two calls."""
        return sum(len(slot.graphs) for kind in self._kinds.values() for slot in kind.free.values())

    def forward(self, x: Array) -> tuple[Array, Saved]:
        """As nn.Stage.forward."""
        stage = self.stage
        if self.reason:
            return self._plain_forward(x)
        buffers = (id(stage.compute.flat), id(stage.gradients.flat), tuple(stage.owners.items()))
        if buffers != self._buffers:  # a later pipeline lets parameters share their storage
            self._buffers, self._kinds = buffers, {}
        x = stage.first_layer.upload(accepted_input(stage, x))
        kind = self._kind(x)
        key = ("forward", stage.headless)
        if kind is None or self._is_first(kind, key):
            return self._plain_forward(x, kind)
        slot = kind.take(x)
        recorded = self._recorded(slot, key, lambda: stage.forward(slot.x))
        if recorded is None:
            kind.free[slot.number] = slot
            return self._plain_forward(x, kind)
        arrays.copy_into(slot.x, x)
        recorded.graph.launch()
        y, saved = recorded.result
        return arrays.copy(y), Saved(saved, kind, slot)

    def backward(self, dy: Array, kept: Saved) -> Array | None:
        """As nn.Stage.backward."""
        stage = self.stage
        key: Key = ("backward",)
        recorded = self._recorded_for(kept, key, dy, lambda dy: stage.backward(dy, kept.saved))
        if recorded is None:
            return stage.backward(dy, kept.saved)
        recorded.graph.launch()
        return _copied(recorded.result)

    def backward_input(self, dy: Array, kept: Saved) -> tuple[Array | None, Saved]:
        """As nn.Stage.backward_input."""
        stage = self.stage
        key: Key = ("backward_input",)
        recorded = self._recorded_for(kept, key, dy, lambda dy: stage.backward_input(dy, kept.saved))
        if recorded is None:
            dx, kept.pending = stage.backward_input(dy, kept.saved)
            return dx, kept
        recorded.graph.launch()
        dx, kept.pending = recorded.result
        kept.pending_key = key
        return _copied(dx), kept

    def backward_weight(self, kept: Saved) -> None:
        """As nn.Stage.backward_weight."""
        stage = self.stage
        recorded = None
        key: Key = ("backward_weight",)
        if kept.kind is not None and not self._is_first(kept.kind, key) and kept.slot is not None and kept.pending_key:
            key = *key, kept.pending_key
            recorded = self._recorded(kept.slot, key, lambda: stage.backward_weight(kept.pending))
        if recorded is None:
            stage.backward_weight(kept.pending)
        else:
            recorded.graph.launch()

    # -- slots and recordings

    def _plain_forward(self, x: Array, kind: Kind | None = None) -> tuple[Array, Saved]:
        y, saved = self.stage.forward(x)
        return y, Saved(saved, kind)

    def _kind(self, x: Array) -> Kind | None:
        key = x.shape, x.dtype
        if key not in self._kinds and len(self._kinds) < MOST_KINDS:
            self._kinds[key] = Kind()
        return self._kinds.get(key)

    def _is_first(self, kind: Kind, key: Key) -> bool:
        """Whether an action comes for the first time; the next time it is not."""
        first = key not in kind.met
        kind.met.add(key)
        return first

    def _recorded_for(self, kept: Saved, key: Key, dy: Array, work: Callable[[Array], Any]) -> Recorded | None:
        """Return the graph of a backward with dy in its place, or None if it has to run without one."""
        kind, slot = kept.kind, kept.slot
        if kind is None or self._is_first(kind, key) or slot is None:
            return None
        if not arrays.is_device(dy) or not dy.flags.c_contiguous:
            return None
        if slot.dy is None:
            slot.dy = arrays.empty_like(dy)
        place = slot.dy
        if (dy.shape, dy.dtype) != (place.shape, place.dtype):
            return None
        recorded = self._recorded(slot, key, lambda: work(place))
        if recorded is not None:
            arrays.copy_into(place, dy)
        return recorded

    def _recorded(self, slot: Slot, key: Key, work: Callable[[], Any]) -> Recorded | None:
        """Return the graph of an action, recorded now if it is not yet; None if that is impossible."""
        if self.stage.on_layer_done is not None:  # of each layer as it ends: a graph has no such places
            return None
        found = slot.graphs.get(key)
        if found is not None or self.reason or not self._may_record():
            return found
        stage = self.stage
        poll = stage.poll
        stage.poll = _no_poll  # messages are no part of the work
        try:
            graph, result = arrays.record_graph(work)
            found = slot.graphs[key] = Recorded(graph, result)
        except Exception as error:  # whatever it is, the work can be done without a graph, or raises it again
            self.reason = f"the recording of {key[0]} raised {type(error).__name__}: {error}"
            logger.warning("%s", self)
        finally:
            stage.poll = poll
        return found


def _copied(dx: Array | None) -> Array | None:
    return None if dx is None else arrays.copy(dx)


def _no_poll() -> None:
    """The poll that does nothing."""


# -- Whether CUDA graphs can record what a stage does -----------------------------------------------------------------


def unrecordable(stage: Stage) -> str:
    """Return why graphs cannot record the forward and backward of a stage, or "" where they can.

    A layer can be recorded if its own class says so: one that inherits from it may do other things.
    """
    for place, top in enumerate(stage.layers):
        for name, layer in top.walk(str(stage.first + place)):
            kind = type(layer)
            if not vars(kind).get("recordable", False):
                return f"layer {name} ({kind.__name__}) does not say that it can be recorded"
            reason = layer.unrecordable()
            if reason:
                return f"layer {name} ({kind.__name__}): {reason}"
    return ""
