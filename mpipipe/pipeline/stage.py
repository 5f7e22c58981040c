"""What a pipeline asks of a stage, and the adapter that gives any stage what only some have.

A user's stage is an object with `forward` and `backward`. An `nn.Stage` has more: parameters, ties, a device, layers
that ask for their position and that let messages advance between them. The pipeline sees `StageAdapter` alone.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from inspect import signature
from typing import Any, NamedTuple, Protocol

import numpy as np

from mpipipe import arrays, nn
from mpipipe.arrays import Array, Tree
from mpipipe.arrays.trees import flatten, unflatten
from mpipipe.errors import ArgumentError, MpipipeError, NonFiniteError, StageError
from mpipipe.nn import HeadCrossEntropy, Position, kernels
from mpipipe.nn.parameters import FlatView, flat_if_any, flat_of
from mpipipe.nn.stage import check_finished
from mpipipe.nn.write_hooks import GradientReady, gradient_ready
from mpipipe.pipeline.graphs import StageGraphs

logger = logging.getLogger("mpipipe")


class UserStage(Protocol):
    """A pair of array functions. It may keep x until its backward; it holds nothing else of a micro-batch.

    For schedules that split the backward, `backward_input(dy, saved) -> (dx, pending)` and `backward_weight(pending)`
    stand in place of `backward`. Optional attributes say more: see `StageAdapter`.
    """

    def forward(self, x: Tree) -> tuple[Tree, Any]:
        """Return (output, whatever backward needs). It may take a second parameter `position`, an nn.Position."""

    def backward(self, dy: Tree, saved: Any) -> Tree:
        """Add to the gradients of the parameters; return the gradient of x."""


class ArrayFacts(NamedTuple):
    """Where a flat array is, and what it is."""

    address: int
    size: int
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype}[{self.size}] at {self.address:#x}"


METHODS = {"F": "forward", "B": "backward", "I": "backward_input", "W": "backward_weight"}


class StageAdapter:
    """A stage of any kind, as the pipeline sees it.

    Of a stage of the user's own it asks for these attributes, all of them optional:

    device : "cpu" or "cuda", with or without a number; by default that of its inner stages, or "cpu"
    gpu : number of its GPU
    gradients : an object whose `flat` is one contiguous array of all gradients, or None where there are none
    parameters : the same for the parameters; replicas are compared by it
    inner_stages : the nn.Stages that its functions call
    refresh() : is called at the start of each call, before anything is computed
    index : is set to the number of the stage
    poll : is set to a function that lets messages move, to be called where the stage computes for long
    takes_branches : False where its functions know nothing of Branches, so that it can have no skips; by default True

    Attributes
    ----------
    given : the user's stage
    computes : what has its forward and backward: the stage itself, its CUDA graphs, or in check mode a CheckedStage
    models : the nn.Stage itself, or the inner stages
    name : of the type of the stage, for errors
    """

    def __init__(self, given: Any):
        self.given, self.name = given, type(given).__name__
        self.computes: Any = given
        self.is_model = isinstance(given, nn.Stage)
        self.number: int | None = None
        self._asked: tuple[Any, bool] = None, False  # a forward, and whether it takes a position
        self._gradients: ArrayFacts | None = None  # as they were when the pipeline was built
        self._poll: Callable[[], object] | None = None
        self._owners: list[dict] = []
        inner = getattr(given, "inner_stages", ())
        self.models: list[nn.Stage] = [given] if self.is_model else list(inner)
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
        forward = self.computes.forward
        if self.is_model or not self._takes_position(forward):
            return forward(x)
        return forward(x, position=position)

    def _takes_position(self, forward: Callable[..., Any]) -> bool:
        """Whether a user's forward has a parameter `position`; it may be another function than at the last call."""
        if self._asked[0] != forward:
            self._asked = forward, takes_parameter(forward, "position")
        return self._asked[1]

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
        flats += [part for part in parts if not any(arrays.shares_memory(part, flat) for flat in flats)]
        return [flat for flat in flats if flat.size]

    def gradient_ready(self) -> GradientReady | None:
        """Return which layer of an nn.Stage writes to which gradients; None where that is not known."""
        return gradient_ready(self.given) if type(self.given) is nn.Stage else None

    def parameter_facts(self) -> tuple[str, list[np.ndarray]]:
        """Return (names, shapes and dtypes; values on the host) as far as known: what replicas must have in common."""
        if not self.models:
            return self._facts_of_own()
        lines = [
            f"{name} {model.dtype} {array.dtype} {array.shape} {'frozen' * (name in model.frozen)}"
            for model in self.models
            for name, array in model.parameters.items()
        ]
        flats = [flat for model in self.models for flat in (model.parameters.flat, model.buffers.held.flat)]
        return "".join(lines), [arrays.download(flat) for flat in flats]

    def _facts_of_own(self) -> tuple[str, list[np.ndarray]]:
        """The same of a stage of the user's own: its flat parameters, and what else `state_dict` gives as arrays."""
        text = "".join(f"{flat.dtype} {flat.shape}" for flat in self.gradients)
        holder, give = getattr(self.given, "parameters", None), getattr(self.given, "state_dict", dict)
        view = None if flat_if_any(holder) is None else FlatView.of(holder)
        trained: dict[str, Array] = dict(view or {})
        rest = {name: array for name, array in give().items() if name not in trained and arrays.is_array(array)}
        shapes = "".join(f"{name} {array.dtype} {array.shape}" for name, array in (trained | rest).items())
        flats = [*([] if view is None else [view.flat]), *rest.values()]
        return text + shapes, [arrays.download(flat) for flat in flats]

    @property
    def has_parameters(self) -> bool:
        """Whether there is something to train in the stage, as far as known."""
        return any(flat.size for flat in self.gradients)

    def attach(self, number: int, poll: Callable[[], object], ends: bool) -> None:
        """Tell the stage its logical number, what its layers call so that messages advance, and if it ends backwards.

        `ends` is whether a stage before it exists that wants no gradient.
        """
        if type(self.given) is nn.Stage:
            self.given.end_backward(ends or self.given.first_layer.uploads_integers)
        self.number = number
        self._poll, self._owners = poll, [dict(model.owners) for model in self.models]
        for model in self.models:
            model.index, model.poll = number, poll
        if not self.is_model:
            for name, value in (("index", number), ("poll", poll)):
                if hasattr(self.given, name):
                    setattr(self.given, name, value)
        self._gradients = self._gradient_facts()

    def detach(self) -> None:
        """Let go of what belongs to the pipeline, which is being closed."""
        self.computes = self.given
        if type(self.given) is nn.Stage:
            self.given.end_backward(self.given.first_layer.uploads_integers)
        for model in self.models:
            if model.poll == self._poll:  # or a later pipeline has the stage
                model.poll = None
        if not self.is_model and getattr(self.given, "poll", None) == self._poll:
            self.given.poll = None

    def _gradient_facts(self) -> ArrayFacts | None:
        """Where the gradients of a user's stage are; None where there are none."""
        holder = None if self.is_model else getattr(self.given, "gradients", None)
        flat = flat_if_any(holder)
        return None if flat is None else ArrayFacts(arrays.address(flat), flat.size, flat.dtype.name)

    def check_storage(self) -> None:
        """Raise ArgumentError where parameters or gradients are not those that the pipeline was built with.

        That is where a later pipeline has given tied parameters another storage, or where a user's stage has other
        gradients now: what its backward adds to the old ones would be neither zeroed nor summed over the replicas. Nor
        may an optimizer step that has begun still need the gradients.
        """
        for each in (self.given, *self.models):
            check_finished(each, self.number)
        self._check_gradients()
        for model, owners in zip(self.models, self._owners):
            if model.owners != owners:
                raise ArgumentError(
                    "a later pipeline lets tied parameters share their storage, and sums up their gradients",
                    stage=model.index,
                    found=", ".join(sorted({*model.owners} - {*owners}) or sorted(owners)),
                    expected="the storage that they had when this pipeline was built",
                    remedy="build this pipeline anew, or the later one of other stages",
                )

    def _check_gradients(self) -> None:
        found, before = self._gradient_facts(), self._gradients
        if found != before:
            raise ArgumentError(
                f"the gradients of {self.name} have been replaced since the pipeline was built",
                stage=self.number,
                found="None" if found is None else str(found),
                expected="None" if before is None else f"{before}: the same array in all steps",
                remedy="write into the array (gradients.flat[...] = 0), set nothing to None; or build it anew",
            )

    def begin_call(self) -> None:
        """Make the stage compute with its parameters as they are now."""
        for model in self.models:
            model.refresh()
        if not self.is_model:
            self._refresh()

    def _refresh(self) -> None:
        refresh = getattr(self.given, "refresh", None)
        try:
            if refresh is not None:
                refresh()
        except MpipipeError as error:
            error.stage = self.number if error.stage is None else error.stage
            raise
        except Exception as error:
            if arrays.memory_shortage(error) is not None:
                raise
            text = f"refresh raised {type(error).__name__}: {error}"
            raise StageError(text, stage=self.number) from error

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
        self._check_gradients()
        for model in self.models:
            if model.unwritten:
                model.end_gradients()

    @property
    def shows_gradients(self) -> bool:
        """Whether all gradients are known, so that they can be summed over replicas, or divided by a sum of weights."""
        return bool(self.models) or hasattr(self.given, "gradients")

    def leave_step(self) -> None:
        """Let backwards outside of a step, or after one that has failed, add to the gradients that the stage shows."""
        for model in self.models:
            model.use_parts(False)
            model.unwritten = set()
            model.on_layer_done = None

    def check(self, ops: Collection[str], has_replicas: bool) -> None:
        """Raise ArgumentError where the stage lacks what these actions, or the replicas, need."""
        needed = [METHODS[op] for op in METHODS if op in ops]
        missing = [name for name in needed if not callable(getattr(self.given, name, None))]
        if missing:
            raise ArgumentError(
                "a stage lacks methods that the schedule needs",
                found=f"{self.name} without {', '.join(missing)}",
                expected=", ".join(needed),
                remedy="write them; a module of PyTorch becomes a stage by mpipipe.adapters.torch_stage(module)",
            )
        holder = getattr(self.given, "gradients", None)
        if holder is not None:
            flat_of(holder, "the gradients of a stage")
        if has_replicas and not self.shows_gradients:
            raise ArgumentError(
                "a stage whose gradients cannot be summed over the replicas",
                found=f"{self.name} without the attribute `gradients`",
                expected="an object with one contiguous array `flat` of all gradients, or None where there are none",
            )


# -- The loss of the last stage: what it returns, checked, with its gradient times the share of the micro-batch -------


class Loss:
    """A user's loss function.

    Parameters
    ----------
    function : `function(output, target) -> (value, gradient of the output)`, with a weight as a third value or without.
        A function with a parameter `factor` multiplies the gradient by it before rounding; for others it is multiplied
        afterwards.
    """

    def __init__(self, function: Callable[..., Any]):
        self.function = function
        self.takes_factor = takes_parameter(function, "factor")
        self.with_head = function if isinstance(function, HeadCrossEntropy) else None

    def taking_head(self) -> AbstractContextManager[None]:
        """Within this context the last stage leaves the product of its head to the function, if that is made for it."""
        return nullcontext() if self.with_head is None else self.with_head.taking_over()

    def call(self, output: Tree, target: Tree, factor: float) -> Any:
        """Return what the function returns."""
        return self.function(output, target, factor=factor) if self.takes_factor else self.function(output, target)

    def checked(self, result: Any) -> tuple[Any, Tree, float | None]:
        """Return (value, gradient, weight or None) of a result; raises ArgumentError if it is none.

        Where the weight is 0, there is no value: it is NaN here.
        """
        if type(result) is not tuple or len(result) not in (2, 3):
            raise ArgumentError(
                "a loss returns (value, gradient of the output), or (value, gradient of the output, weight)",
                found=f"a tuple of {len(result)}" if type(result) is tuple else type(result).__name__,
                expected="a tuple of two or three",
            )
        value, gradient, weight = result[0], result[1], None
        if len(result) == 3:
            weight = checked_weight(result[2])
            if weight == 0:
                return math.nan, gradient, weight
        if type(value) is not float:
            if getattr(value, "size", 1) != 1:
                raise ArgumentError(
                    "the value of a loss", found=f"an array of shape {value.shape}", expected="one number"
                )
            if isinstance(value, (np.ndarray, np.generic)):
                value = value.item()
            on_device = arrays.is_device(value)
            if isinstance(value, complex) or (on_device and value.dtype.kind == "c"):
                raise ArgumentError(
                    "the value of a loss is complex",
                    found="a complex number",
                    expected="one real number",
                    remedy="the mean of abs(x) ** 2, or of x.real",
                )
            if on_device:  # looked at when the step has ended
                return value, gradient, weight
        check_finite(value)
        return value, gradient, weight

    def scaled(self, gradient: Tree, factor: float, output: Tree) -> Tree:
        """Return the gradient times a factor; raises ArgumentError if it does not fit the output.

        For the factor 0 the gradient is not looked at.
        """
        if factor == 1 and type(gradient) is type(output) is np.ndarray:  # the common case, on the hot path
            if gradient.shape == output.shape and gradient.dtype == output.dtype and output.dtype.kind == "f":
                return gradient
        outputs, expected = flatten(output)
        leaves, structure = flatten(gradient) if factor else (list(map(_zeros_like, outputs)), expected)
        if structure != expected:
            raise ArgumentError(
                "the gradient of the loss has another structure than the output", found=structure, expected=expected
            )
        scaled: list = []
        for leaf, like in zip(leaves, outputs):
            if not arrays.is_floating(like.dtype):
                scaled.append(None)  # an integer output has no gradient
                continue
            if not _alike(leaf, like):
                raise ArgumentError(
                    "the gradient of the loss does not match the output",
                    found=_described(leaf) if arrays.is_array(leaf) else type(leaf).__name__,
                    expected=_described(like),
                )
            scaled.append(leaf if factor in (0, 1) else kernels.of_array(leaf).scale(leaf, factor))
        return unflatten(scaled, structure)


def checked_weight(weight: Any) -> float:
    """Return the weight of a loss as a float; raises ArgumentError unless it is a finite number of at least 0."""
    if isinstance(weight, (np.ndarray, np.generic)) and weight.ndim == 0:
        weight = weight.item()
    is_number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
    if not is_number or not 0 <= weight <= sys.float_info.max:
        raise ArgumentError(
            "the weight of a loss",
            found=repr(weight) if is_number else type(weight).__name__,
            expected="a finite number of at least 0",
            remedy="return how many things the value is a mean over, such as target.size or float(mask.sum())",
        )
    return float(weight)


def check_finite(value: Any) -> None:
    """Raise NonFiniteError for a loss that is infinite or NaN, ArgumentError for what is no number."""
    try:
        finite = math.isfinite(value)
    except (TypeError, ValueError):
        raise ArgumentError("the value of a loss", found=type(value).__name__, expected="one number") from None
    if not finite:
        raise NonFiniteError(
            "the loss is not finite",
            found=value,
            remedy="lower the learning rate, clip gradients, or look at this micro-batch's data",
        )


def _zeros_like(array: Array) -> Array:
    zeros = arrays.empty_like(array)
    arrays.set_zero(zeros)
    return zeros


def _alike(leaf: Array, like: Array) -> bool:
    """Whether both are arrays of one shape and dtype on one kind of device; refuses a masked array."""
    if type(leaf) is not type(like):
        arrays.refuse_mask(leaf)
        if not arrays.is_array(leaf) or arrays.is_device(leaf) != arrays.is_device(like):
            return False
    return leaf.shape == like.shape and leaf.dtype == like.dtype


def _described(array: Array) -> str:
    return f"{array.dtype.name}{list(array.shape)} on {arrays.device_of(array)}"


def unscaled(tree: Tree, scale: float) -> Tree:
    """Input gradients without the factor that all gradients of the step carry."""
    if tree is None or scale == 1:
        return tree
    leaves, structure = flatten(tree)
    return unflatten([None if x is None else kernels.of_array(x).scale(x, 1 / scale) for x in leaves], structure)


# -- Optional parameters of a user's functions: a function is given only those that it has ----------------------------


def takes_parameter(function: Callable[..., Any], name: str) -> bool:
    """Whether a function has a parameter of this name; False for a function without a signature."""
    try:
        return name in signature(function).parameters
    except (TypeError, ValueError):  # not a function, or a function without a signature
        return False
