"""What a pipeline asks of a stage, and the adapter that gives any stage what only some have.

A user's stage is an object with `forward` and `backward`. An `nn.Stage` has more: parameters, ties, a device, layers
that ask for their position and that let messages advance between them. The pipeline sees `StageAdapter` alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import Any, Protocol

import numpy as np

from mpipipe import arrays, nn
from mpipipe.arrays import Array, Tree
from mpipipe.errors import ArgumentError
from mpipipe.nn import Position
from mpipipe.nn.writers import Writers, writers_of
from mpipipe.pipeline.graphs import StageGraphs

logger = logging.getLogger("mpipipe")


class UserStage(Protocol):
    """A pair of array functions. It may keep x until its backward; it holds nothing else of a micro-batch.

    For schedules that split the backward, `backward_input(dy, saved) -> (dx, pending)` and `backward_weight(pending)`
    stand in place of `backward`. Optional attributes say more: see `StageAdapter`.
    """

    def forward(self, x: Tree) -> tuple[Tree, Any]:
        """Return (output, whatever backward needs)."""

    def backward(self, dy: Tree, saved: Any) -> Tree:
        """Add to the gradients of the parameters; return the gradient of x."""


METHODS = {"F": "forward", "B": "backward", "I": "backward_input", "W": "backward_weight"}


class StageAdapter:
    """A stage of any kind, as the pipeline sees it.

    Of a stage of the user's own it asks for these attributes, all of them optional:

    device : "cpu" or "cuda", with or without a number; by default that of its inner stages, or "cpu"
    gpu : number of its GPU
    gradients : an object whose `flat` is one contiguous array of all gradients, or None where there are none
    inner_stages : the nn.Stages that its functions call

    Attributes
    ----------
    given : the user's stage
    computes : what has its forward and backward: the stage itself, or its CUDA graphs
    models : the nn.Stage itself, or the inner stages
    name : of the type of the stage, for errors
    """

    def __init__(self, given: Any):
        self.given, self.name = given, type(given).__name__
        self.computes: Any = given
        self._poll: Callable[[], object] | None = None
        self._owners: list[dict] = []
        inner = getattr(given, "inner_stages", ())
        self.models: list[nn.Stage] = [given] if isinstance(given, nn.Stage) else list(inner)
        strange = [type(model).__name__ for model in self.models if not isinstance(model, nn.Stage)]
        if strange:
            raise ArgumentError("inner_stages of a stage", found=", ".join(strange), expected="a list of nn.Stage")
        first = self.models[0] if self.models else None
        self.device = str(getattr(given, "device", "cpu" if first is None else first.device))
        self.gpu: int | None = getattr(given, "gpu", None if first is None else first.gpu)

    def forward(self, x: Tree, position: Position) -> Any:
        """Return what the stage's forward returns, with its layers at this position."""
        for model in self.models:
            model.position = position
        return self.computes.forward(x)

    def use_graphs(self, may_record: Callable[[], bool]) -> None:
        """Let the stage compute by CUDA graphs where it can."""
        if type(self.given) is nn.Stage:
            self.computes = StageGraphs(self.given, may_record)
        else:
            logger.info("CUDA graphs: a stage has none: %s is no nn.Stage", self.name)

    @property
    def gradients(self) -> list[Array]:
        """One-dimensional arrays that hold all gradients and parts; asked each time: a stage may exchange them.

        No memory is in two of them: the array of a stage of the user's own may be the whole buffer of its inner stage,
        taken before the parts in it left that buffer.
        """
        holder = getattr(self.given, "gradients", None)
        flats = [model.gradients.flat for model in self.models] if holder is None else [holder.flat]
        parts = [part.reshape(-1) for model in self.models for part in model.parts.values()]
        return flats + [part for part in parts if not any(arrays.shares_memory(part, flat) for flat in flats)]

    def writers(self) -> Writers | None:
        """Return which layer of an nn.Stage writes to which gradients; None where that is not known."""
        return writers_of(self.given) if type(self.given) is nn.Stage else None

    def parameter_facts(self) -> tuple[str, list[np.ndarray]]:
        """Return (names, shapes and dtypes; values on the host) as far as known: what replicas must have in common."""
        if not self.models:
            return "".join(f"{flat.dtype} {flat.shape}" for flat in self.gradients), []
        lines = [
            f"{name} {model.dtype} {array.dtype} {array.shape}"
            for model in self.models
            for name, array in model.parameters.items()
        ]
        return "".join(lines), [arrays.download(model.parameters.flat) for model in self.models]

    def attach(self, number: int, poll: Callable[[], object]) -> None:
        """Tell the stage its logical number, and what its layers call so that messages advance."""
        self._poll, self._owners = poll, [dict(model.owners) for model in self.models]
        for model in self.models:
            model.index, model.poll = number, poll

    def detach(self) -> None:
        """Let go of what belongs to the pipeline, which is being closed."""
        self.computes = self.given
        for model in self.models:
            if model.poll == self._poll:  # or a later pipeline has the stage
                model.poll = None

    def check_storage(self) -> None:
        """Raise ArgumentError where a later pipeline has given tied parameters another storage."""
        for model, owners in zip(self.models, self._owners):
            if model.owners != owners:
                raise ArgumentError(
                    "a later pipeline lets tied parameters share their storage, and sums up their gradients",
                    stage=model.index,
                    found=", ".join(sorted({*model.owners} - {*owners}) or sorted(owners)),
                    expected="the storage that they had when this pipeline was built",
                    remedy="build this pipeline anew, or the later one of other stages",
                )

    def begin_call(self) -> None:
        """Make the stage compute with its parameters as they are now."""
        for model in self.models:
            model.refresh()

    def begin_gradients(self) -> None:
        """Begin gradients anew: set them to zero, or let an nn.Stage replace them by the first that it has of each."""
        for model in self.models:
            model.use_parts(True)
        if type(self.given) is nn.Stage:  # another class may add to its gradients in ways of its own
            self.given.begin_gradients()
            return
        for flat in self.gradients:
            arrays.set_zero(flat)

    def end_gradients(self) -> None:
        """End the gradients of a step: no later action adds to them."""
        for model in self.models:
            if model.unwritten:
                model.end_gradients()

    def leave_step(self) -> None:
        """Let backwards outside of a step, or after one that has failed, add to the gradients that the stage shows."""
        for model in self.models:
            model.use_parts(False)
            model.unwritten = set()
            model.tell(None)

    def check(self, ops: Collection[str], has_replicas: bool) -> None:
        """Raise ArgumentError where the stage lacks what these actions, or the replicas, need."""
        needed = [METHODS[op] for op in METHODS if op in ops]
        missing = [name for name in needed if not callable(getattr(self.given, name, None))]
        if missing:
            raise ArgumentError(
                "a stage lacks methods that the schedule needs",
                found=f"{self.name} without {', '.join(missing)}",
                expected=", ".join(needed),
            )
        holder = getattr(self.given, "gradients", None)
        if holder is not None and not _is_flat(getattr(holder, "flat", None)):
            raise ArgumentError(
                "the gradients of a stage",
                found=f"{type(holder).__name__} without a one-dimensional contiguous array `flat`",
                expected="an object with `flat`, or None for a stage without parameters",
            )
        if has_replicas and not self.models and not hasattr(self.given, "gradients"):
            raise ArgumentError(
                "a stage whose gradients cannot be summed over the replicas",
                found=f"{self.name} without the attribute `gradients`",
                expected="an object with one contiguous array `flat` of all gradients, or None where there are none",
            )


def _is_flat(flat: Any) -> bool:
    return arrays.is_array(flat) and flat.ndim == 1 and flat.flags.c_contiguous
