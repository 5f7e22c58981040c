"""Stages as pipelines, optimizers and checkpoints see them.

    nn.Stage       layers of this package: has all that a pipeline asks by itself
    UserStage      an object of the user's, with what it leaves out filled in

A user's stage is an object with `forward` and `backward`; docs/stages.md lists what else it may
have. Its arrays are looked up each time, since it may exchange them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from inspect import signature
from math import prod
from typing import Any, Protocol, TypeAlias

import numpy as np

from mpipipe import arrays, nn
from mpipipe.arrays import Array, Tree
from mpipipe.errors import ArgumentError
from mpipipe.nn import FlatBuffer, Pending, Position, Saved, kernels
from mpipipe.nn.kernels import Kernels

# A stage with all that other rooms ask of one.
PipelineStage: TypeAlias = "nn.Stage | UserStage"
METHODS = {"F": "forward", "B": "backward", "I": "backward_input", "W": "backward_weight"}


class StageLike(Protocol):
    """A stage of your own: the least that a `Pipeline` asks of an object in place of `nn.Stage`.

    docs/stages.md lists what else it may have: `parameters` and `gradients` for optimizers and
    replicas, `backward_input` and `backward_weight` for schedules that split the backward.
    """

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tree, Saved]:
        """Return (y, saved) for x, and for a `position: nn.Position` where it has that parameter.

        x and y are an array, or a tuple or dict of arrays. `saved` is what the backward needs.
        """

    def backward(self, dy: Any, saved: Any, /) -> Tree:
        """Add to the gradients of the parameters; return that of the input."""


class Runner(StageLike, Protocol):
    """Forward and backward of a stage, for one micro-batch at a time."""

    position: Position  # read by the next forward

    def forward(self, x: Tree) -> tuple[Tree, Saved]:
        """Return the output, and what the backward needs."""

    def backward_input(self, dy: Tree, saved: Saved) -> tuple[Tree, Pending]:
        """Return the gradient of the input, and what `backward_weight` needs."""

    def backward_weight(self, pending: Pending) -> None:
        """Add to the gradients of the parameters."""


def as_stages(stages: Iterable[Any]) -> list[PipelineStage]:
    """Return stages as other rooms see them; what is one already stays as it is."""
    known: list[PipelineStage] = []
    for stage in stages:
        if not isinstance(stage, (nn.Stage, UserStage)):
            stage = UserStage(stage)
        known.append(stage)
    return known


def gradient_arrays(stage: PipelineStage) -> list[Array]:
    """Return the gradients that a stage shows, and the parts of tied parameters in it.

    No memory is in two of them.
    """
    flats = stage.shown_gradients
    for inner in stage.inner_stages:
        for part in inner.buffers.parts.values():
            part = part.reshape(-1)
            # A user's array may be the whole buffer of an inner stage, from before the parts left.
            if part.size and not arrays.shares_any(part, flats):
                flats.append(part)
    return flats


def check_stage(stage: PipelineStage, ops: Collection[str], has_replicas: bool) -> None:
    """Raise ArgumentError if a stage lacks what these actions, or the replicas, need."""
    if not isinstance(stage, UserStage):
        return
    needed = [method for op, method in METHODS.items() if op in ops]
    missing = [method for method in needed if not callable(stage.given(method))]
    if missing:
        raise ArgumentError(
            "a stage lacks methods that the schedule needs",
            found=f"{stage.name} without {', '.join(missing)}",
            expected=", ".join(needed),
            remedy="write them; a module of PyTorch becomes a stage by "
            "mpipipe.adapters.torch_stage(module)",
        )
    holder = stage.given("gradients")
    if holder is not None:
        flat_of(holder, "the gradients of a stage")
    if has_replicas and not stage.shows_gradients:
        raise ArgumentError(
            "a stage whose gradients cannot be summed over the replicas",
            found=f"{stage.name} without the attribute `gradients`",
            expected="an object with one contiguous array `flat` of all gradients, or None "
            "where there are none",
        )


def arrays_to_compare(stage: PipelineStage) -> tuple[list[tuple[str, Array]], list[Array]]:
    """Return what replicas must have in common: named arrays, and flat ones with their values."""
    named: list[tuple[str, Array]] = []
    flats: list[Array] = []
    for inner in stage.inner_stages:
        for name, array in (*inner.parameters.items(), *inner.state.items()):
            frozen = ""
            if name in inner.frozen:
                frozen = " frozen"
            named.append((f"{name} {inner.dtype}{frozen}", array))
        flats += [inner.parameters.flat, inner.buffers.frozen_parameters.flat]
    if isinstance(stage, UserStage) and not stage.inner_stages:
        named = [("", flat) for flat in gradient_arrays(stage)]
        own_arrays = named_arrays(stage, "parameters")
        if own_arrays:
            # Numbers of `flat` may have no name.
            own_arrays = {WHOLE: stage.parameters.flat, **own_arrays}
        for name, array in stage.given("state_dict", dict)().items():
            if arrays.is_array(array):
                own_arrays.setdefault(name, array)
        named += own_arrays.items()
        flats += own_arrays.values()
    return named, flats


def named_arrays(stage: PipelineStage, attribute: str) -> dict[str, Array]:
    """Return all "parameters" or "gradients" of a stage by name; as "flat" without names."""
    named: dict[str, Array] = {}
    if isinstance(stage, UserStage) and flat_if_any(stage.given(attribute)) is not None:
        named.update(FlatView.of(stage.given(attribute)))
    for inner in stage.inner_stages:
        named.update(getattr(inner, attribute))
    return named


class UserStage(nn.Differentiable):
    """A stage of the user's own as a pipeline, optimizers and checkpoints see it.

    What it leaves out is filled in.
    """

    kept_copy = None
    originals = None
    owners: Mapping[str, tuple[object, str]] = {}
    tied_copies: Collection[str] = ()

    def __init__(self, user_stage: Any):
        self.user_stage = user_stage
        self.name = type(user_stage).__name__  # for errors
        self.inner_stages: list[nn.Stage] = list(getattr(user_stage, "inner_stages", ()))
        for inner in self.inner_stages:
            if not isinstance(inner, nn.Stage):
                raise ArgumentError(
                    "inner_stages of a stage",
                    found=type(inner).__name__,
                    expected="a list of nn.Stage",
                )
        self._first = next(iter(self.inner_stages), None)
        # True if all gradients are known, so that replicas can sum them.
        self.shows_gradients = bool(self.inner_stages) or hasattr(user_stage, "gradients")
        self.position = Position()
        # The last forward that was called, and whether it takes a position.
        self._forward: tuple[Any, bool] = (None, False)

    def given(self, name: str, default: object = None) -> Any:
        """Return what the user's stage has under a name, or else the default."""
        return getattr(self.user_stage, name, default)

    @property
    def index(self) -> int | None:
        """Logical number; None before a pipeline has set it."""
        return self.given("index")

    @property
    def device(self) -> str:
        """Name of the device: "cpu" or "cuda"."""
        return str(self.given("device", getattr(self._first, "device", "cpu")))

    @property
    def gpu(self) -> int | None:
        """Number of the GPU with its parameters; None on the host."""
        gpu: int | None = self.given("gpu", getattr(self._first, "gpu", None))
        if gpu is None and arrays.is_device(flat_if_any(self.given("parameters"))):
            return arrays.current_gpu()
        return gpu

    @property
    def kernels(self) -> Kernels:
        """Functions that compute with the parameters where they are."""
        return kernels.of_array(self.parameters.flat)

    @property
    def parameters(self) -> FlatView:
        """The parameters by name, with `flat`; complex ones are pairs of real ones."""
        holder = self.given("parameters")
        if holder is not None or self.given("gradients") is not None:
            return FlatView.of(holder)
        if hasattr(self.user_stage, "gradients") or hasattr(self.user_stage, "parameters"):
            return FlatView(np.zeros(0, np.float32), {})
        raise ArgumentError(
            "a stage without flat parameters and gradients",
            found=self.name,
            expected="attributes `parameters` and `gradients`, each None or an object with an "
            "array `flat`",
            remedy="make both of nn.FlatBuffer; a stage around others: give its inner_stages",
        )

    @property
    def gradients(self) -> FlatView:
        """Gradients, laid out as the parameters."""
        parameters = self.parameters
        if not parameters and not parameters.flat.size:
            return parameters
        return parameters.like(self.given("gradients"))

    @property
    def decay_ranges(self) -> list[tuple[int, int, bool]]:
        """(start, stop, decay) ranges of `parameters.flat`."""
        ranges: list[tuple[int, int, bool]] | None = self.given("decay_ranges")
        parameters = self.parameters
        if ranges is None:
            return parameters.decay_ranges
        parts = parameters.parts
        size = parameters.flat.size // parts
        flat_ranges = []
        edges = [0]
        for start, stop, decay in ranges:
            edges += [start, stop]
            flat_ranges.append((parts * start, parts * stop, decay))
        edges.append(size)
        # Each range begins where the one before it ends.
        if edges[::2] != edges[1::2]:
            raise ArgumentError(
                "decay_ranges of a stage leave out parameters, or have some twice",
                found=f"{self.name}: {ranges}",
                expected=f"ranges from 0 to {size} without gaps, in order",
            )
        return flat_ranges

    @property
    def ties(self) -> Mapping[str, Sequence[str]]:
        """Names of the parameters that are shared, by the key of what is shared."""
        return self.given("ties", {})

    @property
    def before_write(self) -> list[Callable[[], object]]:
        """Functions to call before anything writes to the parameters."""
        hooks = self.given("before_write")
        # A list that is empty is the user's own, too: a pipeline adds to it.
        if hooks is None:
            return []
        return hooks

    @property
    def contents(self) -> Mapping[str, Any]:
        """All arrays by name: of `state_dict()`, else `parameters`."""
        named = self.given("state_dict", lambda: self.user_stage.parameters)()
        if isinstance(named, FlatBuffer):
            return {name: named.entry(name) for name in named}
        return named

    def set_contents(self, values: Callable[[str], Array]) -> None:
        """Take values by name that could not be set in place."""
        take = self.given("load_state_dict")
        if take is None:
            return
        read = {}
        for name, array in self.contents.items():
            # Complex arrays were read as pairs of real numbers.
            read[name] = values(name).view(array.dtype).reshape(array.shape)
        take(read)

    def sync_compute(self) -> None:
        """Renew the copy of the parameters that the stage computes with, if there is one."""
        renew = self.given("sync_compute")
        if renew is not None:
            renew()

    # -- as a pipeline runs it ---------------------------------------------------------------------

    def check_skips(self, number: int, takes: Sequence[str], gives: Sequence[str]) -> None:
        """Raise ArgumentError if the stage does not know of these skips."""
        names = [*takes, *gives]
        if names and not self.given("takes_branches", True):
            raise nn.no_branches_error(self.name, names)

    def unsliceable(self, rows: Sequence[int] | int | None = None) -> list[str]:
        """Names of what cannot take a sequence in slices of these lengths, or this number."""
        names: list[str] = []
        for inner in self.inner_stages:
            names += inner.unsliceable(rows)
        if rows != 1 and not self.given("slices", False):
            names.append(f"{self.name}, which does not say that it takes slices")
        return names

    @property
    def own_gradients(self) -> Array | None:
        """Array of gradients that a user's own code could replace; None if there is none."""
        return flat_if_any(self.given("gradients"))

    @property
    def shown_gradients(self) -> list[Array]:
        """One-dimensional arrays with the gradients that the stage shows after a step."""
        holder = self.given("gradients")
        if holder is not None:
            if holder.flat.size:
                return [holder.flat]
            return []
        return [array for inner in self.inner_stages for array in inner.shown_gradients]

    def attach(self, number: int, poll: Callable[[], object], gives: Sequence[str] | None) -> None:
        """Take a number, a function to call between layers, and the names to hand on."""
        for inner in self.inner_stages:
            inner.attach(number, poll, None)
        for name, value in (("index", number), ("poll", poll)):
            if hasattr(self.user_stage, name):
                setattr(self.user_stage, name, value)

    def detach(self, poll: Callable[[], object] | None) -> None:
        """Forget the function, unless a later pipeline has set another one."""
        self._set_ends(False)
        for inner in self.inner_stages:
            inner.detach(poll)
        if self.given("poll") == poll:
            self.user_stage.poll = None

    def begin_call(self, ends: bool, runs_again: bool) -> None:
        """Compute with the parameters as they are now.

        `ends`: the gradient of the input may be None. `runs_again`: forwards are run again before
        their backwards.
        """
        for inner in self.inner_stages:
            inner.refresh()
        self._set_ends(ends)
        refresh = self.given("refresh")
        if refresh is not None:
            refresh()

    def _set_ends(self, ends: bool) -> None:
        # Anything else than a bool is an attribute of the user's own.
        if isinstance(self.given("ends"), bool):
            self.user_stage.ends = ends

    def forward(self, x: Tree) -> tuple[Tree, Saved]:
        """Return the output, and what the backward needs."""
        for inner in self.inner_stages:
            inner.position = self.position
        forward = self.user_stage.forward
        # It may be another function than at the last call.
        if self._forward[0] != forward:
            self._forward = forward, takes_parameter(forward, "position")
        if self._forward[1]:
            return forward(x, position=self.position)
        return forward(x)

    def backward(self, dy: Tree, saved: Saved) -> Tree:
        return self.user_stage.backward(dy, saved)

    def backward_input(self, dy: Tree, saved: Saved) -> tuple[Tree, Pending]:
        """Return the gradient of the input, and what `backward_weight` needs."""
        return self.user_stage.backward_input(dy, saved)

    def backward_weight(self, pending: Pending) -> None:
        """Add to the gradients of the parameters."""
        self.user_stage.backward_weight(pending)


def takes_parameter(function: Callable[..., object], name: str) -> bool:
    """Return True if a user's function has a parameter of this name."""
    try:
        return name in signature(function).parameters
    except (TypeError, ValueError):  # not a function, or a function without a signature
        return False


# -- Named pieces of one flat array of a user's own; FlatBuffer has them by itself -----------------

WHOLE = "flat"  # name of all parameters together, where their stage gives them none


class FlatView(Mapping[str, Array]):
    """A one-dimensional array as named arrays.

    One of complex numbers is seen as pairs of real ones, with an axis more.

    `parts` is how many numbers of `flat` make one of the given array: 2 for complex ones.
    """

    def __init__(self, flat: Array, places: Mapping[str, tuple[int, arrays.Shape]]):
        self._given = flat
        self._places = places  # start in the given array, and shape
        self.flat = arrays.as_reals(flat).reshape(-1)
        self.parts = 1 + (flat.dtype.kind == "c")
        self.offsets = {name: self.parts * start for name, (start, _) in places.items()}

    @classmethod
    def of(cls, holder: object) -> FlatView:
        """Return the view of a user's `parameters`: an object with `flat`, perhaps with names."""
        flat = flat_of(holder, "the parameters of a stage")
        if not isinstance(holder, Mapping) or not holder:
            return cls(flat, {WHOLE: (0, flat.shape)})
        places = {}
        for name, array in holder.items():
            places[name] = _offset(name, array, flat), array.shape
        return cls(flat, places)

    def like(self, holder: object) -> FlatView:
        """Return the view of a user's `gradients`, which lie as the parameters do."""
        flat = flat_of(holder, "the gradients of a stage")
        expected = self._given
        if (flat.dtype, flat.size) != (expected.dtype, expected.size):
            raise ArgumentError(
                "parameters and gradients of a stage differ",
                found=f"gradients.flat: {flat.dtype}[{flat.size}]",
                expected=f"{expected.dtype}[{expected.size}], as parameters.flat is",
            )
        return FlatView(flat, self._places)

    @property
    def decay_ranges(self) -> list[tuple[int, int, bool]]:
        """(start, stop, decay) ranges: matrices decay, vectors do not; without names all does."""
        named = []
        for name, (_, shape) in self._places.items():
            if prod(shape):
                named.append((self.offsets[name], len(shape) > 1 or name == WHOLE, name))
        starts = {}
        decays = {}
        for start, decay, name in sorted(named):
            starts[name] = start
            decays[name] = decay
        return nn.decay_ranges(starts, decays, self.flat.size)

    def __getitem__(self, name: str) -> Array:
        start, shape = self._places[name]
        return arrays.as_reals(self._given[start : start + prod(shape)].reshape(shape))

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def flat_if_any(holder: object) -> Array | None:
    """Return `holder.flat` where that is a one-dimensional contiguous array; None elsewhere."""
    flat: Any = getattr(holder, "flat", None)
    if arrays.is_array(flat) and flat.ndim == 1 and flat.flags.c_contiguous:
        return flat
    return None


def flat_of(holder: object, what: str) -> Array:
    """Return `holder.flat`; raises ArgumentError if that is no flat array."""
    flat = flat_if_any(holder)
    if flat is None:
        raise ArgumentError(
            what,
            found=f"{type(holder).__name__} without a one-dimensional contiguous array `flat`",
            expected="an object with `flat`, or None for a stage without parameters",
        )
    return flat


def _offset(name: str, array: Any, flat: Array) -> int:
    """Where a named array starts in the flat one."""
    if arrays.is_array(array) and array.dtype == flat.dtype and array.flags.c_contiguous:
        start, rest = divmod(arrays.address(array) - arrays.address(flat), flat.dtype.itemsize)
        if array.size == 0:
            return 0
        if rest == 0 and 0 <= start and start + array.size <= flat.size:
            return start
    found = type(array).__name__
    if arrays.is_array(array):
        found = f"{array.dtype}{list(array.shape)} elsewhere"
    raise ArgumentError(
        f"the parameter {name} does not lie in parameters.flat",
        found=found,
        expected=f"a contiguous view of parameters.flat, {flat.dtype}[{flat.size}]",
        remedy="make the named arrays views of one array, as nn.FlatBuffer does",
    )
