"""A stage: consecutive layers of the model on one rank, with one buffer of parameters and one of gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from mpipipe import arrays
from mpipipe.arrays import Array
from mpipipe.errors import ArgumentError
from mpipipe.nn import kernels
from mpipipe.nn.checks import checked_dtype
from mpipipe.nn.freezing import frozen_names, make_buffers, mark_frozen
from mpipipe.nn.layers.containers import Sequential
from mpipipe.nn.layers.layer import Layer, RopeTables, first_leaf
from mpipipe.nn.lora import copy_plain, merge
from mpipipe.nn.parameters import FlatBuffer, decay_ranges
from mpipipe.nn.position import Position

# -- A stage: consecutive layers of the model on one rank, with one buffer of parameters and one of gradients ---------


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
    frozen : sequence of str
        Patterns of the names of parameters that stay as they are, as for `fnmatch`: ``0.*``, ``*.gain``. The last one
        that fits a name counts; one that begins with "!" keeps what it fits trained.

    Attributes
    ----------
    parameters, gradients : mapping of str to array
        Views of one buffer `.flat` each, with the same offsets. Frozen parameters lie elsewhere and have no gradient.
    frozen : set of str
        Names of the frozen ones.
    adapted : dict of str to Layer
        Names of matrices with adapters, and their layers. `merged` has the sums that these compute with; see nn.LoRA.
    buffers : Buffers
        Where all of them lie (see nn.freezing).
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
    headless : bool
        Whether a `Head` at the end leaves its product to a `HeadCrossEntropy` (set by the pipeline).
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
    decay_ranges : list of tuple
        (start, stop, decay) ranges of the flat buffers.
    index : int or None
        Logical stage number, set by the pipeline.
    before_write : list of callable
        Called without arguments before an optimizer or a load writes parameters (see nn.write_hooks).

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

    takes_branches = False  # one tree in, one tree out: a stage with skips is another one around it, or a subclass

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
        self.gpu = arrays.current_gpu() if self.device == "cuda" else None
        self.dtype = checked_dtype(dtype)
        arrays.check_computable(self.dtype, self.device)
        self.kernels = kernels.of(self.device, self.dtype)
        self.tables = RopeTables(self.kernels, self.dtype, self.device)
        self._plain = np.ndarray if self.device == "cpu" else None  # inputs of this type need no further look
        self.layers, self.first, self.seed = tuple(layers), first, seed
        self.position, self.headless = Position(), False
        self.poll: Callable[[], object] | None = None
        self.index: int | None = None
        self.before_write: list[Callable[[], object]] = []
        self.tied_copies: set[str] = set()
        self.ties: dict[str, list[str]] = {}
        self.owners: dict[str, tuple[Stage, str]] = {}
        self.parts: dict[str, Array] = {}
        self._keeps_compute = self._written = False
        self.merged: dict[str, Array] = {}
        self._bind(tuple(frozen))

    def _bind(self, patterns: Sequence[str]) -> None:
        for place, layer in enumerate(self.layers):
            if not isinstance(layer, Layer):
                raise ArgumentError(
                    f"layers[{place}] is not a layer", found=type(layer).__name__, expected="an instance of nn.Layer"
                )
        named = [pair for i, layer in enumerate(self.layers) for pair in layer.walk(str(self.first + i))]
        declared = {f"{name}.{key}": p for name, layer in named for key, p in layer.declared.items()}
        self.frozen = frozen_names(declared, patterns)
        self.buffers = make_buffers(declared, self.frozen, self.dtype, self.device, self.seed)
        self.parameters, self.gradients, self.compute = self.buffers[:3]
        for name, parameter in declared.items():
            if parameter.tie is not None:
                self.ties.setdefault(parameter.tie, []).append(name)
        self.refresh()
        decays = {name: p.decay for name, p in declared.items() if name in self.gradients}
        self.decay_ranges = decay_ranges(self.parameters.offsets, decays, self.parameters.flat.size)
        for name, layer in named:
            layer.bind(self, name)
        self._bind_adapted(named)
        mark_frozen(named)
        places = {f"{name}.{key}": (layer, key) for name, layer in named for key in layer.declared}
        self.layer_of = {name: place for name, place in places.items() if name in self.gradients}
        self._chain = Sequential(self.layers)
        self._chain.stage = self
        self.first_layer = first_leaf(self._chain)
        self.end_backward(self.first_layer.uploads_integers)  # which have no gradient

    def _bind_adapted(self, named: Sequence[tuple[str, Layer]]) -> None:
        """Let layers with adapters compute with the sums of their matrices and adapters."""
        self.adapted = {f"{name}.{key}": layer for name, layer in named for key in layer.adapters}
        shapes = {name: self.parameters[name].shape for name in self.adapted}
        halves = self.compute is not self.parameters  # in memory of their own then
        apart = self.compute if halves else FlatBuffer(shapes, self.dtype, self.device)
        self.merged = {name: apart[name] for name in shapes}
        for name, layer in self.adapted.items():
            setattr(layer, name.rpartition(".")[2], self.merged[name])
        if self.adapted:
            self.before_write.append(self._note_write)
            self._merge_anew()

    def _merge_anew(self) -> None:
        copy_plain(self, self.merged)
        merge(self, self.merged)

    def _note_write(self) -> None:
        self._written = True

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

    @property
    def on_layer_done(self) -> Callable[[Layer], object] | None:
        """Called with each of `layers` that has added its part to the gradients; set by a pipeline."""
        return self._chain.on_layer_done

    @on_layer_done.setter
    def on_layer_done(self, done: Callable[[Layer], object] | None) -> None:
        self._chain.on_layer_done = done

    def refresh(self) -> None:
        """Let layers compute with the parameters as they are now. A pipeline does this at the start of each call."""
        if not self._keeps_compute:
            self.sync_compute()
        elif self._written:
            self._written = False
            merge(self, self.merged)

    def sync_compute(self) -> None:
        """Do what `refresh` does, after `optimizer_writes_compute` too: for whoever has set parameters nevertheless."""
        held = self.buffers.held, self.buffers.held_compute
        for wide, compute in ((self.parameters, self.compute), held):
            if compute is not wide and wide.flat.size:
                self.kernels.cast(wide.flat, compute.flat)
        self._merge_anew()

    def optimizer_writes_compute(self) -> None:
        """From now on let optimizers write `compute`, and `refresh` do nothing: nobody else may write parameters."""
        self.refresh()
        self._keeps_compute = self.compute is not self.parameters or bool(self.adapted)

    @property
    def kept_copy(self) -> Array | None:
        """What optimizers write besides the parameters: `compute.flat` after `optimizer_writes_compute`."""
        return self.compute.flat if self._keeps_compute and self.compute is not self.parameters else None

    def end_backward(self, ends: bool) -> None:
        """Let backwards end with the lowest layer that is trained, if nobody asks for the gradient of the input.

        Parameters
        ----------
        ends : bool
            Whether nobody asks. From then on backwards return None for that gradient where they end early.
        """
        trained = [place for place, layer in enumerate(self.layers) if not layer.frozen]
        self._chain.end_backward_at(trained[0] if ends and trained and self.frozen else 0)

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


# -- The input of a stage: what is accepted, and brought to its device ------------------------------------------------


class AcceptingStage(Protocol):
    """What is asked of the stage; see nn.Stage."""

    dtype: np.dtype
    device: str
    index: int | None
    first_layer: Layer


def accepted_input(stage: AcceptingStage, x: Array) -> Array:
    """Return an input on the stage's device, checked. An Embedding checks integers before it uploads them."""
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
    integers = x.dtype.kind in "iu"
    if x.dtype != stage.dtype and not (integers and stage.first_layer.takes_integers):
        raise ArgumentError(
            "the input of a stage has the wrong dtype",
            stage=stage.index,
            found=str(x.dtype),
            expected=f"{stage.dtype}, or integers for an Embedding",
            remedy="hand over real and imaginary parts as features, or let a stage of your own compute with them"
            if x.dtype.kind == "c"
            else f"convert it with astype({str(stage.dtype)!r}) or build the stage with dtype={str(x.dtype)!r}",
        )
    if device == "cuda" and not x.flags.c_contiguous:
        raise ArgumentError(
            "the input of a stage on a GPU is not contiguous",
            stage=stage.index,
            found=f"shape {x.shape}, strides {x.strides}",
            remedy="pass cupy.ascontiguousarray(x)",
        )
    stays = device == stage.device or (integers and stage.first_layer.uploads_integers)
    return x if stays else arrays.upload(x)
