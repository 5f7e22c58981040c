"""A stage: consecutive layers of the model on one rank, with flat buffers of their arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import numpy as np

from mpipipe import arrays
from mpipipe.arrays import Array, Tree
from mpipipe.errors import ArgumentError
from mpipipe.nn import kernels
from mpipipe.nn.checks import checked_dtype
from mpipipe.nn.layers.layer import (
    Differentiable,
    Layer,
    Pending,
    Position,
    Saved,
    WithPending,
    WithSaved,
    full_name,
    leaf,
    mixes,
)
from mpipipe.nn.layers.names import Names, sum_of, value_of
from mpipipe.nn.lora import merge
from mpipipe.nn.parameters import FlatBuffer, StageBuffers, frozen_names
from mpipipe.nn.rope import RopeTables
from mpipipe.text import counted

# Properties of a stage that say where its arrays lie, and what its layers have in common.
OF_ARRAYS = (
    "parameters",
    "gradients",
    "compute",
    "frozen",
    "decay_ranges",
    "gpu",
    "owners",
    "tied_copies",
    "layer_of",
    "ties",
    "takes",
    "gives",
    "first_layer",
)


class Stage(Differentiable):
    """Consecutive layers whose parameters, and gradients, lie in one array each.

    Parameters
    ----------
    layers : sequence of Layer
        Layers that no stage has bound yet.
    dtype : str or numpy.dtype
        Of activations: "float32", "float64", "float16" or "bfloat16". Parameters and gradients have
        it too, but float32 in place of the last two (Micikevicius et al., "Mixed precision
        training", 2018).
    seed : int
        Initial values are drawn for (seed, parameter name or tie key) in float64 and then cast.
        They depend neither on how the model is cut into stages nor on dtype.
    device : str
        "cpu", "cuda", "cuda:1", ... or "auto".
    first : int
        Index of layers[0] in the whole model; a parameter is named like "3.weight" or
        "3.layer.gain".
    frozen : sequence of str
        Patterns of the names of parameters that stay as they are, as for `fnmatch`: ``0.*``,
        ``*.gain``. The last one that fits a name counts; one that begins with "!" keeps what it
        fits trained.

    Attributes
    ----------
    device : str
        "cpu" or "cuda".
    kernels : Kernels
        The functions that layers compute with there (see nn.kernels).
    buffers : StageBuffers
        Its arrays: see nn.parameters.
    names : Names
        The layers one after the other, with the names that they take and give.
    position : Position
        Of the forward under way, or of the last one; read by random layers.
    poll : callable or None
        A function without arguments, called after each layer (to keep messages moving).
    before_write : list of callable
        Called without arguments before an optimizer or a load writes parameters (see
        nn.write_hooks).
    named_layers : list of (str, Layer)
        All layers within it, with their full names.
    tables : RopeTables
        The rotary tables that the layers share.
    index : int or None
        Set by the pipeline: the logical stage number.
    seed : int
        What initial values, and random numbers of layers, are drawn for.

    Raises
    ------
    BackendError
        The device is not there.

    Examples
    --------
    >>> import numpy as np
    >>> from mpipipe import nn
    >>> stage = nn.Stage([nn.Linear(3, 4), nn.Gelu(), nn.Linear(4, 2)], seed=1)
    >>> stage
    <Stage of 3 layers, 26 parameters in float32 on cpu>
    >>> y, saved = stage.forward(np.ones((5, 3), np.float32))
    >>> dx = stage.backward(np.ones_like(y), saved)
    >>> stage.gradients["2.bias"]
    array([5., 5.], dtype=float32)
    """

    # Unless its layers take or give names: a subclass that does so itself sets it to True.
    takes_branches = False

    keeps_halves = False  # True if parameters in half precision have no originals in float32

    # What a pipeline asks of any stage: see mpipipe.stages.
    shows_gradients = True
    own_gradients = None

    def __init__(
        self,
        layers: Sequence[Layer],
        dtype: str | np.dtype = "float32",
        seed: int = 0,
        device: str = "cpu",
        first: int = 0,
        frozen: Sequence[str] = (),
    ):
        self.device = arrays.check_device(device)
        self.dtype = checked_dtype(dtype)
        arrays.check_computable(self.dtype, self.device)
        self.kernels = kernels.of(self.device, self.dtype)
        self.layers = tuple(layers)
        self.first = first
        self.seed = seed
        self.position = Position()
        self.poll: Callable[[], object] | None = None
        self.index: int | None = None
        self.before_write: list[Callable[[], object]] = []
        for place, layer in enumerate(self.layers):
            if not isinstance(layer, Layer):
                raise ArgumentError(
                    f"layers[{place}] is not a layer",
                    found=type(layer).__name__,
                    expected="an instance of nn.Layer",
                )
        self.tables = RopeTables(self.kernels.rope_table, self.dtype)
        self.names = Names(self, self.layers)
        self.named_layers = self._named_layers()
        declared = {name: layer.declared[key] for name, (layer, key) in self.layer_of.items()}
        names = frozen_names(declared, frozen)
        wide = self.dtype
        if not self.keeps_halves:
            wide = arrays.accumulator(self.dtype)
        self.buffers = StageBuffers(declared, names, wide, self.dtype, self.device, seed)
        self.sync_compute()
        for name, layer in self.named_layers:
            layer.bind(self, name)
            for key in layer.adapters:
                # It computes with the sum of matrix and adapters (see nn.LoRA).
                matrix = full_name(name, key)
                total = self.compute[matrix]
                if not self.buffers.has_copy:
                    total = arrays.empty_like(total)
                self.buffers.merged[matrix] = layer, total
                setattr(layer, key, total)
        if self.buffers.merged:
            self.before_write.append(partial(setattr, self.buffers, "written", True))
            merge(self, anew=True)
        for _, layer in self.named_layers:
            frozen_here = []
            for _, inner in layer.walk(""):
                frozen_here += [getattr(inner, f"{key}_grad") is None for key in inner.declared]
            layer.frozen = bool(frozen_here) and all(frozen_here)
        self.end_backward(False)

    def __init_subclass__(cls) -> None:
        # Optimizers would read these in place of the arrays, without a word. A property is meant.
        for name in OF_ARRAYS:
            if not isinstance(getattr(cls, name), property):
                raise ArgumentError(
                    "a subclass of nn.Stage replaces what belongs to its arrays or layers",
                    found=f"{cls.__name__}.{name}",
                    remedy="choose another name",
                )

    def __repr__(self) -> str:
        size = sum(array.size for array in self.compute.values())
        layers = counted(len(self.layers), "layer")
        parameters = counted(size, "parameter")
        return f"<{type(self).__name__} of {layers}, {parameters} in {self.dtype} on {self.device}>"

    def __call__(self, x: Tree, position: Position | None = None) -> Tree:
        """Compute the output of one micro-batch, without what a backward needs: see `forward`."""
        return self.forward(x, position)[0]

    def __reduce__(self) -> NoReturn:
        raise ArgumentError(
            "a stage cannot be copied or pickled: its layers hold views of its arrays",
            remedy="make another stage of new layers, and copy the values: "
            "other.parameters.flat[...] = stage.parameters.flat",
        )

    # -- layers, and their names

    @property
    def first_layer(self) -> Layer:
        """The layer that sees the input, within the first one."""
        return leaf(self.names.chain, 0)

    @property
    def layer_of(self) -> dict[str, tuple[Layer, str]]:
        """The layer of each parameter, and what that calls it, by the parameter's name."""
        layers = {}
        for layer_name, layer in self.named_layers:
            for key in layer.declared:
                layers[full_name(layer_name, key)] = layer, key
        return layers

    @property
    def ties(self) -> dict[str, list[str]]:
        """Names of the parameters that carry a tie, by its key."""
        ties: dict[str, list[str]] = {}
        for name, (layer, key) in self.layer_of.items():
            tie = layer.declared[key].tie
            if tie is not None:
                ties.setdefault(tie, []).append(name)
        return ties

    @property
    def takes(self) -> tuple[str, ...]:
        """The names that its layers take from outside."""
        return self.names.takes

    @property
    def gives(self) -> tuple[str, ...]:
        """The names that its layers give."""
        return self.names.named

    # -- parameters and gradients

    @property
    def parameters(self) -> FlatBuffer:
        """All parameters by name; `flat` is what is trained."""
        return self.buffers.parameters

    @property
    def gradients(self) -> FlatBuffer:
        """Gradients of what is trained, with the offsets of `parameters`."""
        return self.buffers.gradients

    @property
    def compute(self) -> FlatBuffer:
        """What layers compute with: `parameters` itself, or its copy in a half dtype."""
        return self.buffers.compute

    @property
    def frozen(self) -> set[str]:
        """Names of the parameters that stay as they are."""
        return self.buffers.frozen

    @property
    def decay_ranges(self) -> list[tuple[int, int, bool]]:
        """(start, stop, decay) ranges of `parameters.flat`."""
        return self.buffers.decay_ranges

    @property
    def gpu(self) -> int | None:
        """Number of the GPU with the arrays; None on the host."""
        return self.buffers.gpu

    @property
    def owners(self) -> dict[str, tuple[Stage, str]]:
        """(stage, name) where a tied parameter lies, if that is elsewhere."""
        return self.buffers.owners

    @property
    def tied_copies(self) -> set[str]:
        """Names of the tied parameters that norms count in another place."""
        return self.buffers.tied_copies

    @property
    def state(self) -> dict[str, Array]:
        """Arrays that are not parameters, such as running means of a module of PyTorch, by name."""
        arrays_by_name = {}
        for name, layer in self.named_layers:
            for key, array in layer.state.items():
                arrays_by_name[full_name(name, key)] = array
        return arrays_by_name

    @property
    def contents(self) -> dict[str, Any]:
        """All arrays by name, for a checkpoint: StateShards of parameters that are divided.

        A subclass with more arrays has `state_dict()` and `load_state_dict(arrays)`.
        """
        if hasattr(self, "state_dict"):
            return self.state_dict()
        return {**{name: self.parameters.entry(name) for name in self.parameters}, **self.state}

    def set_contents(self, values: Callable[[str], Array]) -> None:
        """Give a subclass with `load_state_dict` its arrays; all others are set in place.

        Parameters
        ----------
        values : callable
            Gives an array for each name.
        """
        if hasattr(self, "load_state_dict"):
            self.load_state_dict({name: values(name) for name in self.contents})

    @property
    def inner_stages(self) -> list[Stage]:
        """List of this stage alone."""
        return [self]

    @property
    def shown_gradients(self) -> list[Array]:
        """The flat array of gradients, unless it is empty."""
        flat = self.gradients.flat
        if not flat.size:
            return []
        return [flat]

    def _named_layers(self) -> list[tuple[str, Layer]]:
        named: list[tuple[str, Layer]] = []
        for place, layer in enumerate(self.layers, self.first):
            named += layer.walk(str(place))
        return named

    # -- the copy of parameters that layers compute with, and the sums with their adapters

    def refresh(self) -> None:
        """Let layers compute with the parameters as they are now.

        A pipeline does this at the start of each call.
        """
        for _, layer in self.named_layers:
            layer.begin_call()
        if not self.buffers.optimizer_writes:
            self.sync_compute()
        elif self.buffers.written:
            self.buffers.written = False
            merge(self)

    def sync_compute(self) -> None:
        """Copy parameters to what layers compute with, even after `optimizer_writes_compute`.

        Call it after you wrote parameters yourself.
        """
        buffers = self.buffers
        frozen = buffers.frozen_parameters, buffers.frozen_compute
        for wide, compute in ((buffers.parameters, buffers.compute), frozen):
            if compute is not wide and not wide.is_divided and wide.flat.size:
                self.kernels.copy(wide.flat, compute.flat)
        merge(self, anew=True)

    def optimizer_writes_compute(self) -> None:
        """Let optimizers write `compute` from now on, so that `refresh` does nothing.

        Nothing else may write parameters.
        """
        self.refresh()
        buffers = self.buffers
        buffers.optimizer_writes = buffers.has_copy or bool(buffers.merged)

    @property
    def kept_copy(self) -> Array | None:
        """Array that optimizers write besides the parameters: `compute.flat`, once they do."""
        if self.buffers.optimizer_writes and self.buffers.has_copy:
            return self.compute.flat
        return None

    @property
    def originals(self) -> FlatBuffer | None:
        """The parameters, if layers compute with nothing but a copy of them in a half dtype."""
        if self.buffers.merged or not self.buffers.has_copy:
            return None
        return self.parameters

    # -- what a pipeline does with a stage

    @property
    def direct(self) -> Differentiable:
        """What runs micro-batches whose input `forward` has accepted once.

        It is the stage itself where a subclass, or somebody for this object, has replaced `forward`
        or `backward`.
        """
        kind = type(self)
        is_own = kind.forward is not Stage.forward or kind.backward is not Stage.backward
        if is_own or not vars(self).keys().isdisjoint(("forward", "backward")):
            return self
        return self.names.entry

    def check_skips(self, number: int, takes: Sequence[str], gives: Sequence[str]) -> None:
        """Raise ArgumentError unless these are the skips that its layers know of.

        Parameters
        ----------
        number : int
            Logical number of the stage.
        takes, gives : sequence of str
            Names of the skips that end and begin here.
        """
        if self.takes_branches:
            return
        # The first stage takes its names from the inputs, and hands on others that are there.
        missing = {*self.names.unclaimed} - {*gives}
        unknown = {*takes} - {*self.takes}
        if number:
            missing |= {*self.takes} - {*takes}
            unknown |= {*gives} - {*self.gives}
        if missing or unknown:
            words = [f"no skip {name}" for name in sorted(missing)]
            words += [f"skip {name}" for name in sorted(unknown)]
            raise ArgumentError(
                "the skips of the schedule are not those of the names that layers take and give",
                found=", ".join(words),
                expected="for each name a skip from the stage that gives it to each other one that "
                "takes it",
                remedy="Pipeline(stages, stages.schedule, ...) of what mpipipe.cut returns, of "
                "layers such as nn.Keep and nn.Join; or a stage of your own, which takes "
                "mpipipe.Branches",
            )

    def attach(self, number: int, poll: Callable[[], object], gives: Sequence[str] | None) -> None:
        """Take what a pipeline sets.

        Parameters
        ----------
        number : int
            Logical number of the stage.
        poll : callable
            Called without arguments after each layer, to keep messages moving.
        gives : sequence of str or None
            Names to hand on over skips; None if another stage does.
        """
        self.index = number
        self.poll = poll
        # Drop sequences in slices that a failed call has left.
        for _, layer in self.named_layers:
            attend: Any = getattr(layer, "_attend", None)
            if getattr(attend, "slice_rows", None) is not None:
                attend.begin(Position(-1))
        if gives is not None and not self.takes_branches:
            self.names.hand_on(gives)

    def detach(self, poll: Callable[[], object] | None) -> None:
        """Forget the function that is called after each layer.

        Parameters
        ----------
        poll : callable or None
            That function. One of a later pipeline stays.
        """
        if type(self).forward is Stage.forward:
            self.end_backward(False)
        if self.poll == poll:
            self.poll = None

    def begin_call(self, ends: bool, runs_again: bool) -> None:
        """Compute with the parameters as they are now; see `end_backward`."""
        self.refresh()
        # A subclass with a forward of its own may need the gradient of the input.
        if type(self).forward is Stage.forward:
            self.end_backward(ends, runs_again)

    def use_parts(self, used: bool) -> None:
        """Let layers add to the parts of shared gradients, as in a step, or to the gradients."""
        parts = self.buffers.parts
        if not parts:
            return
        source: Mapping[str, Array] = self.gradients
        if used:
            source = parts
        for name in parts:
            layer, key = self.layer_of[name]
            setattr(layer, f"{key}_grad", source[name])

    def end_backward(self, ends: bool, runs_again: bool = False) -> None:
        """Let backwards end with the lowest trained layer, if dx is not asked for.

        From then on they return None for that gradient. Integers have none. Where forwards are to
        run again, all layers keep what they keep for a backward.
        """
        chain = self.names.chain
        if chain.asked == (ends, runs_again):
            return
        chain.asked = ends, runs_again
        ends = ends or self.first_layer.uploads_integers
        trained = []
        for place, layer in enumerate(self.layers):
            if not layer.frozen and (layer.declared or not _knows_its_end(layer)):
                trained.append(place)
        lowest = 0
        if ends and trained:
            lowest = trained[0]
        chain.lowest = lowest
        for place, layer in enumerate(self.layers):
            if _knows_its_end(layer):
                layer.ends = ends and place == lowest
            for _, inner in layer.walk(""):
                inner.has_backward = runs_again or place >= lowest

    def unsliceable(self, rows: Sequence[int] | int | None = None) -> list[str]:
        """Name the layers that cannot take a sequence in slices along axis 1, such as "3 (Conv)".

        Parameters
        ----------
        rows : sequence of int, or int, optional
            Rows of each slice, or the number of slices, 1 for whole sequences. A layer that attends
            to others cannot take these.
        """
        names = []
        for name, layer in self.named_layers:
            fits = rows == 1 or not mixes(layer)
            lengths = getattr(getattr(layer, "attend", None), "slice_rows", None)
            if lengths is None or rows is None:
                pass
            elif isinstance(rows, int):
                fits = fits and len(lengths) == rows
            else:
                fits = fits and tuple(lengths) == tuple(rows)
            if not fits:
                names.append(f"{name} ({type(layer).__name__})")
        return names

    # -- names that layers give and take

    @property
    def has_names(self) -> bool:
        """Whether names come in, go out, or are handed from layer to layer."""
        return self.names.entry is self.names

    def taken(self, name: str) -> Tree:
        """Return what stands under a name, in the forward of a layer that lists it in `takes`.

        It is not to be written to.

        A layer before has given it, or the input has it.
        """
        return value_of(getattr(self.position, "values", {}), name)

    def give(self, name: str, tree: Tree) -> None:
        """Give later layers something by a name, in a forward that lists it in `gives`.

        It is not to be written to any more.
        """
        if name not in self.gives:
            raise ArgumentError(f"a layer gives the name {name!r} without having it in `gives`")
        self.position.values[name] = tree  # type: ignore[attr-defined]  # of a chain with names

    def add_gradient(self, name: str, gradient: Tree) -> None:
        """Add to the gradient of what was taken by a name, in `backward_input`.

        The gradient is shaped as what was taken, with None in place of an array of integers.
        """
        gradients = self.names.gradients_for(name, (*self.takes, *self.gives), "takes")
        gradients[name] = sum_of(gradients.get(name), gradient)

    def gradient_of(self, name: str) -> Tree:
        """Return the gradient of what was given by a name, in `backward_input`.

        It is the sum of what all takers have added; None where none has.
        """
        return self.names.gradients_for(name, self.gives, "gives").pop(name, None)

    # -- forward and backward

    def forward(self, x: Array, position: Position | None = None) -> WithSaved:
        """Compute the output of one micro-batch.

        Parameters
        ----------
        x : array
            Of the dtype of the stage, or integers for an Embedding. An array on the host is
            uploaded for a GPU, not the other way round.
        position : Position, optional
            By default that of the last forward.

        Returns
        -------
        y, saved : array, object
            The output, and all that the backward of this micro-batch needs.
        """
        if position is not None:
            self.position = position
        if type(x) is not np.ndarray or x.dtype != self.dtype or self.device == "cuda":
            x = accepted_input(self, x)
        return self.names.entry.forward(x)

    def backward_input(self, dy: Array, saved: Saved) -> WithPending:
        return self.names.entry.backward_input(dy, saved)

    def backward_weight(self, pending: Pending) -> None:
        self.names.chain.backward_weight(pending)

    def backward(self, dy: Array, saved: Saved) -> Array:
        return self.names.entry.backward(dy, saved)


def _knows_its_end(layer: Layer) -> bool:
    """Return True for a class that has the attribute `ends`, and is not derived from such a one."""
    return "ends" in vars(type(layer))


def accepted_input(stage: Stage, x: object, named: bool = False, part: bool = False) -> Any:
    """Return an input, checked, on the device of the stage.

    An Embedding checks integers before it uploads them.

    What is `named` comes next to the input, under a name, and may be of integers. A `part` of
    several may have the dtype of parameters, as sums over the vocabulary have.
    """
    if isinstance(x, arrays.Branches):
        if not stage.has_names:
            message = "the input of a stage has names that no layer takes"
            raise ArgumentError(message, stage=stage.index, found=", ".join(x.skips))
        skips = {}
        for name, tree in x.skips.items():
            skips[name] = accepted_input(stage, tree, named=True)
        return arrays.Branches(accepted_input(stage, x.main), **skips)
    if isinstance(x, (tuple, dict)):  # for layers of PyTorch or JAX
        return arrays.mapped(lambda leaf: accepted_input(stage, leaf, named, part=True), x)
    device = arrays.device_of(x)
    x = arrays.strip_subclass(x)
    if device == "cuda" and stage.device == "cpu":
        raise ArgumentError(
            "the input of a stage on the host is on a GPU",
            stage=stage.index,
            found=type(x).__name__,
            expected="numpy.ndarray",
            remedy="build the stage with device='cuda', or give a numpy array",
        )
    first = stage.first_layer
    if named or first.takes_any:
        if device != stage.device:
            x = arrays.upload(x)
        return x
    integers = x.dtype.kind in "iu"
    wide = part and x.dtype == arrays.accumulator(stage.dtype)
    if x.dtype != stage.dtype and not wide and not (integers and first.takes_integers):
        raise ArgumentError(
            "the input of a stage has the wrong dtype",
            stage=stage.index,
            found=str(x.dtype),
            expected=f"{stage.dtype}, or integers for an Embedding",
            remedy="convert it with astype, or build the stage with this dtype; of complex numbers "
            "hand over real and imaginary parts",
        )
    if device == "cuda" and not x.flags.c_contiguous:
        raise ArgumentError(
            "the input of a stage on a GPU is not contiguous",
            stage=stage.index,
            found=f"shape {x.shape}, strides {x.strides}",
            remedy="pass cupy.ascontiguousarray(x)",
        )
    if device != stage.device and not (integers and first.uploads_integers):
        x = arrays.upload(x)
    return x
