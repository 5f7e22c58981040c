"""The actions of a stage as CUDA graphs: one launch each, so that no GPU waits for Python.

A graph repeats the same work on the same memory. So there are slots: the arrays of one micro-batch
under way, from its forward to its last backward, at fixed places. A forward takes a free slot and
copies its input there. Results are copied out, so that neither messages nor the loss see an array
that the next micro-batch of the slot will write.

Each slot has graphs of its own, for the forward and for each kind of backward. The first action of
a kind runs without one, since it compiles kernels, measures, and fills caches. The next one is
recorded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

from mpipipe import arrays, nn
from mpipipe.arrays import Array
from mpipipe.nn import Stage, accepted_input
from mpipipe.pipeline.attached import AttachedStage

logger = logging.getLogger("mpipipe")

# Methods that a recording does not call again.
METHODS = {"forward", "backward", "backward_input", "backward_weight"}
MOST_KINDS = 4  # shapes of input of a stage that are recorded; others run without graphs
Key: TypeAlias = "tuple[object, ...]"  # an action, and what its work depends on


@dataclass(slots=True)
class Slot:
    """Fixed memory for one micro-batch under way."""

    # What each action reads, once it was recorded: x or dy.
    inputs: dict[str, Array] = field(default_factory=dict)
    # action -> (its graph, what the action returns: each launch writes these arrays)
    graphs: dict[Key, tuple[arrays.Graph, Any]] = field(default_factory=dict)


@dataclass(slots=True)
class Saved:
    """What the forward of a micro-batch leaves for its backward."""

    # The forward and its backwards depend on this besides the input.
    mode: Key
    # Actions that have run, and may be recorded when they come again.
    met: set[Key]
    # None if graphs are out of the question.
    slot: Slot | None = None
    # Takes the slot at the end.
    free: list[Slot] = field(default_factory=list)
    by_graph: bool = True  # whether graphs have run all actions so far
    saved: nn.Saved = None
    # The input gradient leaves this for the weight gradient.
    pending: nn.Pending = None

    def __del__(self) -> None:
        """Free the slot once what was saved is dropped, also after a failed call."""
        if self.slot is not None:
            self.free.append(self.slot)


def use_graphs(stage: AttachedStage) -> None:
    """Let a stage compute by CUDA graphs where it can."""
    # A class derived from it may do more than its layers.
    if type(stage.stage) is Stage:
        stage.runner = StageGraphs(stage.stage)
    else:
        logger.info("CUDA graphs: stage %d has none: it is no nn.Stage", stage.number)


class StageGraphs:
    """Forward and backward of a stage on a GPU, with one launch each where that is possible."""

    def __init__(self, stage: nn.Stage) -> None:
        self.stage = stage
        self.position = stage.position
        # Why no more is recorded; "" if it is.
        self.reason = arrays.graphs_refused() or unrecordable(stage)
        # Slots that no micro-batch has, by shape and dtype of the input.
        self._free: dict[tuple, list[Slot]] = {}
        self._met: set[Key] = set()
        # What recordings have read: where parameters and gradients are, and the layers.
        self._read: tuple = ()
        logger.info("%s", self)

    def __str__(self) -> str:
        state = "has them"
        if self.reason:
            state = f"has none: {self.reason}"
        return f"CUDA graphs: stage {self.stage.index} {state}"

    @property
    def recorded(self) -> int:
        """Number of graphs of the slots that no micro-batch has: of all slots between two calls."""
        graphs = 0
        for slots in self._free.values():
            for slot in slots:
                graphs += len(slot.graphs)
        return graphs

    def forward(self, x: Array) -> tuple[Array | None, Saved]:
        stage = self.stage
        stage.position = self.position
        if not self.reason:
            self._forget_if_changed()
        kept = Saved((stage.names.headless,), self._met)
        if not self.reason:
            x = stage.first_layer.upload(accepted_input(stage, x))
            shape = x.shape, x.dtype
            if shape in self._free or len(self._free) < MOST_KINDS:
                kept.mode = (*kept.mode, shape)
                kept.free = self._free.setdefault(shape, [])
                kept.slot = kept.free.pop() if kept.free else Slot()
        y, kept.saved = self._run("forward", x, kept, stage.forward)
        return self._copied(y, kept), kept

    def _forget_if_changed(self) -> None:
        """Record anew if parameters have moved, or an attribute of a layer was set."""
        stage = self.stage
        places = map(arrays.address, (stage.compute.flat, stage.gradients.flat))
        read = (*places, *stage.owners.items(), stage.names.version)
        if read == self._read:
            return
        self._read = read
        self._free = {}
        self._met = set()
        self.reason = unrecordable(stage)
        if self.reason:
            logger.warning("%s", self)

    def backward(self, dy: Array, kept: Saved) -> Array | None:
        work = partial(self.stage.backward, saved=kept.saved)
        return self._copied(self._run("backward", dy, kept, work), kept)

    def backward_input(self, dy: Array, kept: Saved) -> tuple[Array | None, Saved]:
        work = partial(self.stage.backward_input, saved=kept.saved)
        dx, kept.pending = self._run("backward_input", dy, kept, work)
        return self._copied(dx, kept), kept

    def backward_weight(self, kept: Saved) -> None:
        self._run("backward_weight", None, kept, lambda _: self.stage.backward_weight(kept.pending))

    @staticmethod
    def _copied(result: Array | None, kept: Saved) -> Array | None:
        """Return a result from where the next launch will not write."""
        if kept.by_graph and result is not None:
            return arrays.copy(result)
        return result

    def _run(
        self, action: str, value: Array | None, kept: Saved, work: Callable[[Any], Any]
    ) -> Any:
        """Return what `work` returns for a value; by a graph where that is possible."""
        key = (action, *kept.mode)
        slot = kept.slot
        if slot is not None:
            can_record = key in kept.met and kept.by_graph and self._fits(slot, action, value)
            kept.met.add(key)
            place = slot.inputs.get(action)
            if can_record and self._record(slot, key, lambda: work(place)):
                if place is not None:
                    arrays.copy_into(place, value)
                graph, result = slot.graphs[key]
                graph.launch()
                return result
        kept.by_graph = False
        return work(value)

    @staticmethod
    def _fits(slot: Slot, action: str, value: Array | None) -> bool:
        """Whether the slot has a place for what an action reads, which is made now if need be."""
        if value is None:
            return True
        if not (arrays.is_device(value) and value.flags.c_contiguous):
            return False
        if action not in slot.inputs:
            slot.inputs[action] = arrays.empty_like(value)
        place = slot.inputs[action]
        return (value.shape, value.dtype) == (place.shape, place.dtype)

    def _record(self, slot: Slot, key: Key, work: Callable[[], object]) -> bool:
        """Whether the slot has a graph of an action, which is recorded now if it can be."""
        stage = self.stage
        if key not in slot.graphs and not self.reason:
            # Messages are no part of the work.
            poll = stage.poll
            stage.poll = lambda: None
            try:
                slot.graphs[key] = arrays.record_graph(work)
            except Exception as error:
                # Without a graph the work can be done, or raises the error again.
                self.reason = f"the recording of {key[0]} raised {type(error).__name__}: {error}"
                logger.warning("%s", self)
            finally:
                stage.poll = poll
        return key in slot.graphs


# -- Whether CUDA graphs can record what a stage does ----------------------------------------------


def unrecordable(stage: Stage) -> str:
    """Return why graphs cannot record the forward and backward of a stage, or "" where they can.

    A layer can be recorded if its own class says so: one that inherits from it may do other things.
    """
    if stage.has_names:
        return "names come in or go out"
    if replaced := METHODS & vars(stage).keys():
        return f"its {min(replaced)} was replaced"
    for place, top in enumerate(stage.layers):
        for name, layer in top.walk(str(stage.first + place)):
            kind = type(layer)
            if not vars(kind).get("recordable", False):
                return f"layer {name} ({kind.__name__}) does not say that it can be recorded"
            if replaced := METHODS & vars(layer).keys():
                return f"layer {name} ({kind.__name__}): its {min(replaced)} was replaced"
            reason = layer.unrecordable()
            if reason:
                return f"layer {name} ({kind.__name__}): {reason}"
    return ""
