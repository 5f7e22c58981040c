"""A stage: consecutive layers of the model on one rank, with one buffer of parameters and one of gradients."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from mpipipe import arrays
from mpipipe.arrays import Array
from mpipipe.errors import ArgumentError
from mpipipe.nn import kernels
from mpipipe.nn.checks import checked_dtype
from mpipipe.nn.inputs import accepted_input
from mpipipe.nn.layers.containers import Sequential
from mpipipe.nn.layers.layer import Layer, first_leaf
from mpipipe.nn.parameters import FlatBuffer, decay_ranges, drawn, memory_order
from mpipipe.nn.position import Position
from mpipipe.nn.rope_tables import RopeTables


class Stage:
    """Layers, bound to flat buffers.

    Parameters
    ----------
    layers : sequence of Layer
        Layers that no stage has bound yet.
    dtype : str or numpy.dtype
        Of activations: "float32", "float64", "float16" or "bfloat16". Parameters and gradients have it too, but float32
        in place of the last two (Micikevicius et al., "Mixed precision training", 2018).
    seed : int
        Initial values are drawn for (seed, parameter name or tie key) in float64 and then cast. They depend neither on
        how the model is cut into stages nor on dtype.
    device : str
        "cpu", "cuda", "cuda:1", ... or "auto".
    first : int
        Index of layers[0] in the whole model; a parameter is named like "3.weight" or "3.layer.gain".

    Attributes
    ----------
    parameters, gradients : mapping of str to array
        Views of one buffer `.flat` each; same names, same offsets.
    compute : mapping of str to array
        The values that layers compute with: `parameters` itself, or its copy in a half dtype, which `refresh` makes.
    device : str
        "cpu" or "cuda".
    gpu : int or None
        Number of the GPU, None on the host.
    kernels : Kernels
        The functions that layers compute with there (see nn.kernels).
    tables : RopeTables
        Shared by the attention layers.
    position : Position
        Of the forward under way, or of the last one; read by random layers.
    poll : callable or None
        A function without arguments, called after each layer (to keep messages moving).
    ties : dict of str to list of str
        Tie key to the names of the parameters on this stage that carry it.
    tied_copies : set of str
        Names of parameters here that are counted elsewhere (set by the pipeline).
    owners : dict of str to (Stage, str)
        Names here of parameters that lie in the buffers under another name or of another stage (set by the pipeline).
    parts : dict of str to array
        For each of these names what its layer adds to the gradient; the pipeline adds the parts to `gradients`.
    unwritten : set of str
        In a step, names whose gradients hold nothing yet: the first part that a layer has for one replaces it.
    decay_ranges : list of tuple
        (start, stop, decay) ranges of the flat buffers.
    index : int or None
        Logical stage number, set by the pipeline.
    before_write : list of callable
        Called without arguments before an optimizer or a load writes parameters (see nn.writing).

    Raises
    ------
    ArgumentError
        Something is no layer, a layer has a stage already, or the dtype is none of these.
    BackendError
        The device is not there.

    Examples
    --------
    >>> import numpy as np
    >>> from mpipipe import nn
    >>> stage = nn.Stage([nn.Linear(3, 4), nn.Gelu(), nn.Linear(4, 2)], seed=1)
    >>> y, saved = stage.forward(np.ones((5, 3), np.float32))
    >>> dx = stage.backward(np.ones_like(y), saved)
    >>> stage.gradients["2.bias"]
    array([5., 5.], dtype=float32)
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        dtype: str | np.dtype = "float32",
        seed: int = 0,
        device: str = "cpu",
        first: int = 0,
    ):
        self.device = arrays.check_device(device)
        self.gpu = arrays.current_gpu() if self.device == "cuda" else None
        self.dtype = checked_dtype(dtype)
        arrays.check_computable(self.dtype, self.device)
        self.kernels = kernels.of(self.device, self.dtype)
        self.tables = RopeTables(self.kernels, self.dtype, self.device)
        self._plain = np.ndarray if self.device == "cpu" else None  # inputs of this type need no further look
        self.layers, self.first, self.seed = tuple(layers), first, seed
        self.position = Position()
        self.poll: Callable[[], object] | None = None
        self.index: int | None = None
        self.before_write: list[Callable[[], object]] = []
        self.tied_copies: set[str] = set()
        self.ties: dict[str, list[str]] = {}
        self.owners: dict[str, tuple[Stage, str]] = {}
        self.parts: dict[str, Array] = {}
        self.unwritten: set[str] = set()
        self._keeps_compute = False
        self._bind()

    def _bind(self) -> None:
        for place, layer in enumerate(self.layers):
            if not isinstance(layer, Layer):
                raise ArgumentError(
                    f"layers[{place}] is not a layer", found=type(layer).__name__, expected="an instance of nn.Layer"
                )
        named = [pair for i, layer in enumerate(self.layers) for pair in layer.walk(str(self.first + i))]
        declared = {f"{name}.{key}": p for name, layer in named for key, p in layer.declared.items()}
        shapes = {name: p.shape for name, p in declared.items()}
        layout: Any = {"narrowest": self.dtype, "order": memory_order(declared)}
        wide = arrays.accumulator(self.dtype)
        self.parameters = drawn(declared, wide, self.device, self.seed, layout)
        self.gradients = FlatBuffer(shapes, wide, self.device, **layout)
        self.compute = self.parameters if wide == self.dtype else FlatBuffer(shapes, self.dtype, self.device, **layout)
        for name, parameter in declared.items():
            if parameter.tie is not None:
                self.ties.setdefault(parameter.tie, []).append(name)
        self.refresh()
        decays = {name: p.decay for name, p in declared.items()}
        self.decay_ranges = decay_ranges(self.parameters.offsets, decays, self.parameters.flat.size)
        for name, layer in named:
            layer.bind(self, name)
        self.layer_of = {f"{name}.{key}": (layer, key) for name, layer in named for key in layer.declared}
        replaced = [n for n, (layer, key) in self.layer_of.items() if key in vars(type(layer)).get("replaced", ())]
        self.knows_layers = all(type(layer).__module__.startswith("mpipipe.") for _, layer in named)
        self._replaced = replaced if self.knows_layers else []  # a user's layer may add to those of others first
        self._chain = Sequential(self.layers)
        self._chain.stage = self
        self.first_layer = first_leaf(self._chain)

    def refresh(self) -> None:
        """Let layers compute with the parameters as they are now. A pipeline does this at the start of each call."""
        if not self._keeps_compute:
            self.renew_compute()

    def renew_compute(self) -> None:
        """Do what `refresh` does, after `keep_compute` too: for whoever has set parameters nevertheless."""
        if self.compute is not self.parameters and self.parameters.flat.size:
            self.kernels.cast(self.parameters.flat, self.compute.flat)

    def keep_compute(self) -> None:
        """From now on let optimizers write `compute`, and `refresh` do nothing: nobody else may write parameters."""
        self.refresh()
        self._keeps_compute = self.compute is not self.parameters

    @property
    def kept_copy(self) -> Array | None:
        """What optimizers write besides the parameters: `compute.flat` after `keep_compute`."""
        return self.compute.flat if self._keeps_compute else None

    def begin_gradients(self) -> None:
        """Begin gradients anew: those that their layers will replace stay as they are, all others become zero."""
        self.unwritten = set(self._replaced)
        for name, (layer, key) in self.layer_of.items():
            if name not in self.unwritten:
                arrays.set_zero(getattr(layer, f"{key}_grad"))

    def use_parts(self, used: bool) -> None:
        """Let layers add to the parts of shared gradients, or to the gradients. A pipeline does this around each step.

        Parameters
        ----------
        used : bool
            Whether to the parts, as within a step.
        """
        source: Mapping[str, Array] = self.parts if used else self.gradients
        for name in self.parts:
            layer, key = self.layer_of[name]
            setattr(layer, f"{key}_grad", source[name])

    def end_gradients(self, names: Collection[str] | None = None) -> None:
        """End gradients: those that no layer has written are zero.

        Parameters
        ----------
        names : collection of str, optional
            Of parameters; by default all.
        """
        ending = self.unwritten if names is None else self.unwritten.intersection(names)
        for layer, key in map(self.layer_of.__getitem__, ending):
            arrays.set_zero(getattr(layer, f"{key}_grad"))
        self.unwritten = self.unwritten - ending

    def tell(self, ended: Callable[[Layer], object] | None) -> None:
        """Let a function be told of each layer that has ended its backward. A pipeline does this around the last one.

        Parameters
        ----------
        ended : callable or None
            Called as `ended(layer)` when one of `layers` has added its part to the gradients; None ends that.
        """
        self._chain.ended = ended

    @property
    def is_telling(self) -> bool:
        """Whether somebody is told of layers that have added their parts."""
        return self._chain.ended is not None

    def forward(self, x: Array, position: Position | None = None) -> tuple[Array, Any]:
        """Compute the output of one micro-batch.

        Parameters
        ----------
        x : array
            Of the dtype of the stage, or integers for an Embedding. An array on the host is uploaded for a GPU.
        position : Position, optional
            By default that of the last forward.

        Returns
        -------
        y : array
            The output.
        saved : object
            All that the backward of this micro-batch needs.

        Raises
        ------
        ArgumentError
            The input has another dtype, does not fit the layers, or is on a GPU and the stage is not.
        """
        if position is not None:
            self.position = position
        if type(x) is not self._plain or x.dtype != self.dtype:
            x = accepted_input(self, x)
        return self._chain.forward(x)

    def backward_input(self, dy: Array, saved: Any) -> tuple[Array, Any]:
        """Compute the gradient of the input of one micro-batch.

        Parameters
        ----------
        dy : array
            Gradient of the output.
        saved : object
            What `forward` saved.

        Returns
        -------
        dx : array or None
            Gradient of the input; None for integers.
        pending : object
            All that `backward_weight` needs.
        """
        return self._chain.backward_input(dy, saved)

    def backward_weight(self, pending: Any) -> None:
        """Add this micro-batch's part to the gradients of the parameters.

        Parameters
        ----------
        pending : object
            What `backward_input` returned.
        """
        self._chain.backward_weight(pending)

    def backward(self, dy: Array, saved: Any) -> Array:
        """Do `backward_input` and `backward_weight` at once.

        Parameters
        ----------
        dy : array
            Gradient of the output.
        saved : object
            What `forward` saved.

        Returns
        -------
        array or None
            Gradient of the input; None for integers.
        """
        return self._chain.backward(dy, saved)
