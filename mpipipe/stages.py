"""Stages as pipeline, optimizers and checkpoints see them: one adapter for all kinds.

A user's stage is an object with `forward` and `backward`; docs/stages.md lists what else it may
have. An `nn.Stage` has more: named parameters, ties, a device, layers that ask for their position
and that let messages advance between them. Other rooms see a `StageAdapter` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from inspect import signature
from math import prod
from typing import Any

import numpy as np

from mpipipe import arrays, nn
from mpipipe.arrays import Array, Tree
from mpipipe.errors import ArgumentError, MpipipeError, StageError
from mpipipe.nn import FlatBuffer, Position, kernels
from mpipipe.nn.kernels import Kernels

METHODS = {"F": "forward", "B": "backward", "I": "backward_input", "W": "backward_weight"}


class StageAdapter:
    """A stage of any kind. Arrays are asked for each time: a stage of the user's own may exchange
    them.
    """

    def __init__(self, given: Any):
        self.given = given
        self.name = type(given).__name__
        self.is_model = isinstance(given, nn.Stage)
        # the stage itself, or the inner stages
        self.models: list[nn.Stage] = (
            [given] if self.is_model else list(getattr(given, "inner_stages", ()))
        )
        strange = [type(model).__name__ for model in self.models if not isinstance(model, nn.Stage)]
        if strange:
            raise ArgumentError(
                "inner_stages of a stage", found=", ".join(strange), expected="a list of nn.Stage"
            )
        first = self.models[0] if self.models else None
        self.device = str(getattr(given, "device", "cpu" if first is None else first.device))
        self._gpu: int | None = getattr(given, "gpu", None if first is None else first.gpu)
        # what has its forward and backward: the stage, its CUDA graphs, or in check mode a
        # CheckedStage
        self.computes: Any = given
        self.number: int | None = None  # its logical number, once it is attached to a pipeline
        self._view: tuple[tuple[int, int], FlatView] | None = (
            None  # of the parameters, with their place in memory
        )
        self._asked: tuple[Any, bool] = None, False  # a forward, and whether it takes a position
        self._storage: tuple[Any, list[dict]] = (
            None,
            [],
        )  # of gradients and tied parameters, as the pipeline found them
        self._poll: Callable[[], object] | None = None
        self._ends = self._runs_again = (
            False  # whether the gradient of its input is not asked for; whether it has R's
        )
        self._has_layers_alone = self.is_model and not getattr(given, "takes_branches", False)
        self._gives: tuple[str, ...] = ()  # what a stage of layers hands on over skips

    @classmethod
    def of(cls, stages: Iterable[Any]) -> list[StageAdapter]:
        """Return the adapters of some stages; those that are adapters stay as they are."""
        return [stage if isinstance(stage, cls) else cls(stage) for stage in stages]

    @property
    def index(self) -> int | None:
        """Logical number, as the stage itself has it; None for one that does not say."""
        return getattr(self.given, "index", None)

    @property
    def parameters(self) -> FlatBuffer | FlatView:
        """The parameters by name, with `flat`; of a user's stage a view, where complex ones are
        pairs of real ones.
        """
        if self.is_model:
            return self.given.parameters
        holder = getattr(self.given, "parameters", None)
        flat = flat_if_any(holder)
        key = (0, 0) if flat is None else (arrays.address(flat), flat.size)
        if self._view is None or self._view[0] != key:
            if holder is not None or getattr(self.given, "gradients", None) is not None:
                self._view = key, FlatView.of(holder)
            elif hasattr(self.given, "gradients") or hasattr(self.given, "parameters"):
                self._view = key, FlatView(np.zeros(0, np.float32), {}, {})
            else:
                raise ArgumentError(
                    "a stage without flat parameters and gradients",
                    found=self.name,
                    expected="attributes `parameters` and `gradients`, each None or an object "
                    "with an array `flat`",
                    remedy="make both of nn.FlatBuffer; a stage around others: give its "
                    "inner_stages",
                )
        return self._view[1]

    @property
    def gradients(self) -> FlatBuffer | FlatView:
        """The gradients, laid out as the parameters."""
        if self.is_model:
            return self.given.gradients
        own = self.parameters
        assert isinstance(own, FlatView)
        return (
            own
            if not own and not own.flat.size
            else own.like(getattr(self.given, "gradients", None))
        )

    @property
    def decay_ranges(self) -> list[tuple[int, int, bool]]:
        """(start, stop, decay) ranges of `parameters.flat`."""
        ranges: list[tuple[int, int, bool]] | None = getattr(self.given, "decay_ranges", None)
        if self.is_model and ranges is not None:
            return ranges
        own = self.parameters
        assert isinstance(own, FlatView)
        return (
            own.decay_ranges
            if ranges is None
            else [(own.parts * a, own.parts * b, decay) for a, b, decay in ranges]
        )

    @property
    def kernels(self) -> Kernels:
        """The functions that compute with the parameters where they are."""
        return self.given.kernels if self.is_model else kernels.of_array(self.parameters.flat)

    @property
    def gpu(self) -> int | None:
        """Number of the GPU on which the stage computes, or that has its parameters; None on the
        host.
        """
        flat = None if self.is_model else flat_if_any(getattr(self.given, "parameters", None))
        on_gpu = self._gpu is None and flat is not None and arrays.is_device(flat)
        return arrays.current_gpu() if on_gpu else self._gpu

    @property
    def kept_copy(self) -> Array | None:
        """A copy of `parameters.flat` that the optimizer is to write, too."""
        return self.given.kept_copy if self.is_model else None

    @property
    def originals(self) -> FlatBuffer | None:
        """The parameters, where the stage computes with a copy in a half dtype alone: sums with
        adapters need them.
        """
        model = self.given
        halves = self.is_model and model.compute is not model.parameters and not model.adapted
        return model.parameters if halves else None

    @property
    def tied_copies(self) -> set[str]:
        """Names of parameters that norms count elsewhere."""
        return self.given.buffers.tied_copies if self.is_model else set()

    @property
    def owners(self) -> Mapping[str, tuple[Any, str]]:
        """Names of parameters that lie in the buffers under another name or of another stage, with
        (stage, name).
        """
        return self.given.buffers.owners if self.is_model else {}

    @property
    def before_write(self) -> list[Callable[[], object]]:
        """Functions to be called before anything writes to the parameters (nn.write_hooks)."""
        return getattr(self.given, "before_write", None) or []

    @property
    def contents(self) -> Mapping[str, Any]:
        """All arrays, or StateShards of them, by their names in the whole model: `state_dict()`,
        else `parameters`.
        """
        give = getattr(self.given, "state_dict", None)
        named: Mapping[str, Any] = self.given.parameters if give is None else give()
        if not isinstance(named, FlatBuffer):
            return named
        state = self.given.state if self.is_model else {}
        return {**{name: named.entry(name) for name in named}, **state}

    def set_contents(self, values: Callable[[str], Array]) -> None:
        """Let a stage with `load_state_dict` take values by name; those of any other stage have
        been set in place.
        """
        take = getattr(self.given, "load_state_dict", None)
        if take is not None:  # complex values were read as pairs of real ones
            own = self.contents
            take(
                {
                    name: values(name).view(array.dtype).reshape(array.shape)
                    for name, array in own.items()
                }
            )

    @property
    def ties(self) -> Mapping[str, Sequence[str]]:
        """Names of the parameters that it shares, by the key of what is shared."""
        return getattr(self.given, "ties", {})

    def sync_compute(self) -> None:
        """Renew the copy of the parameters that the stage computes with, where it has one."""
        renew = getattr(self.given, "sync_compute", None)
        if renew is not None:
            renew()

    def check(self, ops: Collection[str], has_replicas: bool) -> None:
        """Raise ArgumentError where the stage lacks what these actions, or the replicas, need."""
        needed = [METHODS[op] for op in METHODS if op in ops]
        missing = [name for name in needed if not callable(getattr(self.given, name, None))]
        if missing:
            raise ArgumentError(
                "a stage lacks methods that the schedule needs",
                found=f"{self.name} without {', '.join(missing)}",
                expected=", ".join(needed),
                remedy="write them; a module of PyTorch becomes a stage by "
                "mpipipe.adapters.torch_stage(module)",
            )
        holder = getattr(self.given, "gradients", None)
        if holder is not None:
            flat_of(holder, "the gradients of a stage")
        if has_replicas and not self.shows_gradients:
            raise ArgumentError(
                "a stage whose gradients cannot be summed over the replicas",
                found=f"{self.name} without the attribute `gradients`",
                expected="an object with one contiguous array `flat` of all gradients, or None "
                "where there are none",
            )

    def check_skips(self, number: int, takes: Sequence[str], gives: Sequence[str]) -> None:
        """Raise ArgumentError where the skips of the stage of this number are not those that it
        knows of.

        A stage of the user's own says by `takes_branches` that it knows nothing of any; layers have
        their names.
        """
        names = [*takes, *gives]
        if self._has_layers_alone and (self.given.names is not None or (number == 0 and gives)):
            self._gives = tuple(dict.fromkeys(gives))
            nn.check_links(self.given.names, number, takes, self._gives)
        elif names and not getattr(self.given, "takes_branches", True):
            raise ArgumentError(
                "a stage with skips whose forward knows nothing of them",
                found=f"{self.name} at {', '.join(names)}",
                expected="a stage of your own, which takes or returns mpipipe.Branches",
                remedy="let layers take and give names (nn.Keep, nn.Join); or call an nn.Stage in "
                "the forward and "
                "backward of your own, and list it in inner_stages; give torch_stage and "
                "jax_stage their names",
            )

    def check_slices(self, number: int, lengths: Sequence[int] | int) -> None:
        """Raise ArgumentError where a stage may mix positions in another way than from slice to
        slice.
        """
        layers = [name for model in self.models for name in model.unsliceable(lengths)]
        if lengths == 1 and layers:
            raise ArgumentError(
                "a stage attends to slices of sequences, and the schedule has whole ones",
                stage=number,
                found=f"layer {', '.join(layers)}",
                remedy="take a schedule with as many slices, or attend without attention.Sliced",
            )
        if lengths != 1 and not self.is_model and not getattr(self.given, "slices", False):
            layers.append(f"{self.name}, which does not say that it takes slices")
        if layers:
            many = (
                f"{lengths} slices"
                if isinstance(lengths, int)
                else f"lengths {', '.join(map(str, lengths))}"
            )
            raise ArgumentError(
                "a schedule has slices, and a stage cannot take the slices of a sequence one "
                "after the other",
                stage=number,
                found=f"layer {', '.join(layers)}" if self.is_model else ", ".join(layers),
                expected="layers for which positions are alike, and nn.SelfAttention with "
                f"attention.Sliced of {many}",
                remedy="attend with attention.Sliced(attention.Local(), lengths); set slices = "
                "True in a stage of your "
                "own that treats each position by itself; or take a schedule without slices",
            )

    @property
    def input_names(self) -> set[str] | None:
        """The names that inputs of this stage, the first one, must have; None where that is not
        known.
        """
        if self._has_layers_alone:
            return set() if self.given.names is None else {*self.given.names.comes_in}
        takes = None if self.is_model else getattr(self.given, "takes", None)
        return {*takes} if type(takes) is tuple else None

    @property
    def shows_gradients(self) -> bool:
        """Whether all gradients are known, so that they can be summed over replicas, or divided by
        a sum of weights.
        """
        return bool(self.models) or hasattr(self.given, "gradients")

    @property
    def shown_gradients(self) -> list[Array]:
        """One-dimensional arrays with the gradients that the stage shows after a step, also of
        inner stages.
        """
        holder = getattr(self.given, "gradients", None)
        flats = [model.gradients.flat for model in self.models] if holder is None else [holder.flat]
        return [flat for flat in flats if flat.size]

    @property
    def gradient_arrays(self) -> list[Array]:
        """These, and the parts of tied parameters; no memory is in two of them."""
        flats = self.shown_gradients
        # the array of a user's stage may be the whole buffer of its inner stage, from before the
        # parts left it
        parts = [part.reshape(-1) for model in self.models for part in model.buffers.parts.values()]
        flats += [
            part for part in parts if not any(arrays.shares_memory(part, flat) for flat in flats)
        ]
        return [flat for flat in flats if flat.size]

    def attach(
        self, number: int, poll: Callable[[], object], ends: bool, runs_again: bool = False
    ) -> None:
        """Give the stage its number and the poll of its layers. `ends`: the gradient of its input
        is not asked for.

        `runs_again`: forwards are run again before their backwards.
        """
        self._ends = ends
        self._runs_again = runs_again
        if self._has_layers_alone:
            self.given.hand_on(self._gives)
        self.number = number
        self._poll = poll
        for model in self.models:
            model.index = number
            model.poll = poll
            model.drop_sequences()
        if not self.is_model:
            for name, value in (("index", number), ("poll", poll)):
                if hasattr(self.given, name):
                    setattr(self.given, name, value)
        self._storage = (
            self._place_of_gradients(),
            [dict(model.buffers.owners) for model in self.models],
        )

    def detach(self) -> None:
        """Let go of what belongs to the pipeline, which is being closed."""
        self.computes = self.given
        self._end_backward(False)
        for model in self.models:
            if model.poll == self._poll:  # or a later pipeline has the stage
                model.poll = None
        if not self.is_model and getattr(self.given, "poll", None) == self._poll:
            self.given.poll = None

    def begin_call(self) -> None:
        """Make the stage compute with its parameters as they are now."""
        for model in self.models:
            model.refresh()
        self._end_backward(self._ends)
        refresh = None if self.is_model else getattr(self.given, "refresh", None)
        if refresh is None:
            return
        try:
            refresh()
        except MpipipeError as error:
            error.stage = self.number if error.stage is None else error.stage
            raise
        except Exception as error:
            if arrays.memory_shortage(error) is not None:
                raise
            raise StageError(
                f"refresh raised {type(error).__name__}: {error}", stage=self.number
            ) from error

    def _end_backward(self, ends: bool) -> None:
        if self.is_model and type(self.given).forward is nn.Stage.forward:
            self.given.end_backward(ends, self._runs_again)
        elif isinstance(getattr(self.given, "ends", None), bool):  # anything else is the user's own
            self.given.ends = ends

    def forward(self, x: Tree, position: Position) -> Any:
        """Return what the stage's forward returns, with its layers at this position."""
        for model in self.models:
            model.position = position
        forward = self.computes.forward
        if self.is_model:
            return forward(x)
        if (
            self._asked[0] != forward
        ):  # a user's forward may be another function than at the last call
            self._asked = forward, takes_parameter(forward, "position")
        return forward(x, position=position) if self._asked[1] else forward(x)

    def begin_gradients(self) -> None:
        """Set all gradients to zero."""
        for model in self.models:
            model.use_parts(True)
        for flat in self.gradient_arrays:
            arrays.set_zero(flat)

    def leave_step(self) -> None:
        """Let backwards outside of a step, or after one that has failed, add to the gradients that
        the stage shows.
        """
        for model in self.models:
            model.use_parts(False)
            model.on_layer_done = None

    def check_storage(self) -> None:
        """Raise ArgumentError where arrays are others than at construction.

        What a user's backward adds to the old gradients would be neither zeroed nor summed over the
        replicas.
        """
        self.check_gradients()
        for model, owners in zip(self.models, self._storage[1]):
            if model.buffers.owners != owners:
                raise ArgumentError(
                    "a later pipeline lets tied parameters share their storage, and sums up their "
                    "gradients",
                    stage=model.index,
                    found=", ".join(sorted({*model.buffers.owners} - {*owners}) or sorted(owners)),
                    expected="the storage that they had when this pipeline was built",
                    remedy="build this pipeline anew, or the later one of other stages",
                )

    def check_gradients(self) -> None:
        """Raise ArgumentError where the gradients of a user's stage are others than at
        construction.
        """
        place = self._place_of_gradients()
        before = self._storage[0]
        if place != before:
            raise ArgumentError(
                f"the gradients of {self.name} have been replaced since the pipeline was built",
                stage=self.number,
                found=_described(place),
                expected="None"
                if before is None
                else f"{_described(before)}: the same array in all steps",
                remedy="write into the array (gradients.flat[...] = 0), set nothing to None; or "
                "build it anew",
            )

    def _place_of_gradients(self) -> tuple[int, int, str] | None:
        """(address, size, dtype) of the gradients of a user's stage; None where there are none."""
        flat = None if self.is_model else flat_if_any(getattr(self.given, "gradients", None))
        return None if flat is None else (arrays.address(flat), flat.size, flat.dtype.name)


def _described(place: tuple[int, int, str] | None) -> str:
    return "None" if place is None else f"{place[2]}[{place[1]}] at {place[0]:#x}"


def takes_parameter(function: Callable[..., Any], name: str) -> bool:
    """Whether a function has a parameter of this name: a user's function is given only those that
    it has.
    """
    try:
        return name in signature(function).parameters
    except (TypeError, ValueError):  # not a function, or a function without a signature
        return False


# -- Named pieces of one flat array, where the array and its names are a user's own: what FlatBuffer has by itself --

WHOLE = "flat"  # name of all parameters together, where their stage gives them none


class FlatView(Mapping[str, Array]):
    """A one-dimensional array as named arrays. One of complex numbers is seen as pairs of real
    ones, with an axis more.

    `parts` is how many numbers of `flat` make one of the given array: 2 for complex ones.
    """

    def __init__(self, flat: Array, offsets: Mapping[str, int], shapes: Mapping[str, arrays.Shape]):
        pair = (2,) if flat.dtype.kind == "c" else ()
        self._given = flat.dtype, flat.size
        self.flat = arrays.as_reals(flat).reshape(-1)
        self.parts = 1 + len(pair)
        self.offsets = {name: self.parts * start for name, start in offsets.items()}
        self._shapes = {name: (*shape, *pair) for name, shape in shapes.items()}

    @classmethod
    def of(cls, holder: Any) -> FlatView:
        """Return the view of a user's `parameters`: an object with `flat`, and a mapping of names
        where it has any.
        """
        flat = flat_of(holder, "the parameters of a stage")
        if not isinstance(holder, Mapping) or not holder:
            return cls(flat, {WHOLE: 0}, {WHOLE: flat.shape})
        offsets = {name: _offset(name, array, flat) for name, array in holder.items()}
        return cls(flat, offsets, {name: array.shape for name, array in holder.items()})

    def like(self, holder: Any) -> FlatView:
        """Return the view of a user's `gradients`, which lie in their flat array as the parameters
        do in theirs.
        """
        flat = flat_of(holder, "the gradients of a stage")
        if (flat.dtype, flat.size) != self._given:
            raise ArgumentError(
                "parameters and gradients of a stage differ",
                found=f"gradients.flat: {flat.dtype}[{flat.size}]",
                expected="{}[{}], as parameters.flat is".format(*self._given),
            )
        view = copy(self)
        view.flat = arrays.as_reals(flat).reshape(-1)
        return view

    @property
    def decay_ranges(self) -> list[tuple[int, int, bool]]:
        """(start, stop, decay) of the flat array: matrices decay and vectors do not; without names
        all of it does.
        """
        decays = {
            name: array.ndim > self.parts or name == WHOLE
            for name, array in self.items()
            if array.size
        }
        starts = {
            name: self.offsets[name]
            for name in sorted(decays, key=lambda name: (self.offsets[name], decays[name]))
        }
        return nn.decay_ranges(starts, decays, self.flat.size)

    def __getitem__(self, name: str) -> Array:
        start = self.offsets[name]
        shape = self._shapes[name]
        return self.flat[start : start + prod(shape)].reshape(shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self.offsets)

    def __len__(self) -> int:
        return len(self.offsets)


def flat_if_any(holder: Any) -> Array | None:
    """Return `holder.flat` where that is a one-dimensional contiguous array; None elsewhere."""
    flat: Any = getattr(holder, "flat", None)
    return flat if arrays.is_array(flat) and flat.ndim == 1 and flat.flags.c_contiguous else None


def flat_of(holder: Any, what: str) -> Array:
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
    raise ArgumentError(
        f"the parameter {name} does not lie in parameters.flat",
        found=f"{array.dtype}{list(array.shape)} elsewhere"
        if arrays.is_array(array)
        else type(array).__name__,
        expected=f"a contiguous view of parameters.flat, {flat.dtype}[{flat.size}]",
        remedy="make the named arrays views of one array, as nn.FlatBuffer does",
    )
