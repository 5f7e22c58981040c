"""A layer: a pair of array functions, whose backward can be split in two.

docs/layers.md says how to write one: a subclass of `Layer` with `declared`, `forward`,
`backward_input` and `backward_weight`. It is registered nowhere: `nn.Stage` takes it as it is. One
that comes into the package also stands in `__all__` of mpipipe/nn/__init__.py, in a table of that
page, and in a test (CONTRIBUTING.md).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from mpipipe import arrays
from mpipipe.arrays import Array, Shape
from mpipipe.errors import ArgumentError
from mpipipe.nn.parameters import Parameter

if TYPE_CHECKING:
    from mpipipe.nn.stage import Stage

# What a forward leaves for its backward, and `backward_input` for `backward_weight`: any object.
Saved: TypeAlias = Any
Pending: TypeAlias = Any
# What the two return: an output, or the gradient of an input, with that.
WithSaved: TypeAlias = "tuple[Array, Saved]"
WithPending: TypeAlias = "tuple[Array, Pending]"


class Position(NamedTuple):
    """Where a training stands, as far as layers that draw random numbers must know.

    Parameters
    ----------
    step, microbatch, replica : int
        Numbers of the training step, of the micro-batch in it (or of the unit, where sequences come
        in slices), and of the replica.
    training : bool
        Whether this is a training step: otherwise `Dropout` is the identity.
    keeps : bool
        Whether a backward of this micro-batch follows on its stage, for which slices of a sequence
        are kept.
    recompute : str
        "later" for a forward that is run again for its backward, "now" for the second run, "" for
        all others. Whoever has a state finds in the second run that of the first.
    """

    step: int = 0
    microbatch: int = 0
    replica: int = 0
    training: bool = True
    keeps: bool = True
    recompute: str = ""


# -- Projections, which are rows of a matrix, and their low-rank adapters (nn/lora.py) -------------


LORA_A = "lora_A"
LORA_B = "lora_B"


class Projection(NamedTuple):
    """Rows of the parameter `key` that are a projection: from `start` to before `stop`."""

    key: str
    start: int
    stop: int


class Adapter(NamedTuple):
    """A low-rank adapter of some rows of a matrix; see nn.LoRA.

    Its parameters are `<target>.lora_A` and `.lora_B`.
    """

    target: str
    start: int
    stop: int
    scale: float


def stacked_projections(key: str, rows: Mapping[str, int]) -> dict[str, Projection]:
    """Return projections that lie one above the other in a matrix, from their numbers of rows."""
    stacked = {}
    start = 0
    for name, count in rows.items():
        stacked[name] = Projection(key, start, start + count)
        start += count
    return stacked


class Differentiable(ABC):
    """A function of arrays with a backward that can be split in two, as layers and stages are."""

    @abstractmethod
    def forward(self, x: Array) -> WithSaved:
        """Compute the output of one micro-batch.

        The input has the stage's dtype and device, or is of integers.

        Returns
        -------
        y : array
            The output.
        saved : object
            All that the backward of this micro-batch needs.
        """

    @abstractmethod
    def backward_input(self, dy: Array, saved: Saved) -> WithPending:
        """Compute the gradient of the input from that of the output.

        Returns
        -------
        dx : array or None
            Gradient of the input; None for integers.
        pending : object
            All that `backward_weight` needs.
        """

    @property
    def direct(self) -> Differentiable:
        """What runs micro-batches whose input `forward` has accepted once."""
        return self

    def backward_weight(self, pending: Pending) -> None:  # noqa: B027  # many have no parameters
        """Add this micro-batch's part to the gradients of the parameters."""

    def backward(self, dy: Array, saved: Saved) -> Array:
        """Do `backward_input` and `backward_weight` at once.

        Returns
        -------
        array or None
            Gradient of the input; None for integers.
        """
        dx, pending = self.backward_input(dy, saved)
        self.backward_weight(pending)
        return dx


class Layer(Differentiable):
    """Arrays in, arrays out. A layer holds parameters, but nothing of any micro-batch.

    A layer is a description until a `Stage` binds it. It says which arrays it needs in `declared`
    and which layers it contains in `children`. Binding gives it an attribute for each declared name
    (`self.weight`, in the dtype of activations) and one for its gradient (`self.weight_grad`, in
    the dtype of parameters): views of the stage's flat buffers. It also sets `stage` and `name`,
    and then calls `bound`.

    A layer that computes with the functions of `stage.kernels` alone works in every dtype and on
    every device.

    The contract of `forward` and the backward functions:

    - `forward` never writes x. The backward functions never write dy, x or what forward saved.
    - Results may be views of arguments.
    - Gradients are added to `*_grad`. An x of integers has no gradient: dx is None.
    - Equal inputs give equal bits, and `backward` gives the bits of `backward_input` and
      `backward_weight` together.

    Attributes
    ----------
    declared, children : mapping of str to Parameter, mapping of str to Layer
        The arrays that the layer needs, and the layers that it contains.
    state : mapping of str to array
        Arrays for checkpoints that are not parameters, by their names within the layer.
    stage, name : Stage, str
        The stage that bound it, and its name in the model, such as `"3"` or `"3.layer"`.
    takes, gives : tuple of str
        Names of values that it asks the stage for by `taken`, and of those that it hands over by
        `give`; see nn.Stage.
    takes_any : bool
        Whether it takes arrays of any dtype, trees of them, and numbers that have no gradient.
    takes_integers : bool
        Whether it can be the first layer of a stage whose input is integers.
    uploads_integers : bool
        Whether it looks at integers on the host, and copies them to the GPU by itself.
    frozen : bool
        Whether all parameters in it are frozen, set when it is bound. `backward_weight` is never
        called then.
    adapters : mapping of str to list of Adapter
        Low-rank adapters, by the name of their matrix.
    recordable : bool
        Whether CUDA graphs may record the layer: with inputs of the same shapes it does the same
        device work each time, and never lets the host wait for the device. Subclasses do not
        inherit it.
    mixes_positions : bool
        Whether y at a position, along axis 1, depends on x at others, and the layer needs whole
        sequences for that. A class says False where positions stand for themselves; subclasses do
        not inherit that.
    has_backward : bool
        False in a stage whose backwards end before they come to this layer, set by the stage.
    ends : bool
        Whether nobody asks for the gradient of its input, so that dx may be None. Set by the stage
        of a first layer whose own class has the attribute; without parameters such a layer then has
        no backward at all.

    Examples
    --------
    >>> import numpy as np
    >>> from mpipipe import nn
    >>> class Shift(nn.Layer):
    ...     def __init__(self, dim):
    ...         draw = lambda generator, shape: np.ones(shape)
    ...         self.declared = {"shift": nn.Parameter((dim,), draw)}
    ...     def forward(self, x):
    ...         return x + self.shift, None
    ...     def backward_input(self, dy, saved):
    ...         return dy, dy
    ...     def backward_weight(self, pending):
    ...         self.shift_grad += pending.sum(0)
    >>> stage = nn.Stage([Shift(2)], dtype="float64")
    >>> y, saved = stage.forward(np.zeros((3, 2)))
    >>> dx = stage.backward(np.ones((3, 2)), saved)
    >>> stage.gradients["0.shift"]
    array([3., 3.])
    """

    declared: Mapping[str, Parameter] = MappingProxyType({})
    children: Mapping[str, Layer] = MappingProxyType({})
    adapters: Mapping[str, list[Adapter]] = MappingProxyType({})
    state: Mapping[str, Array] = MappingProxyType({})
    stage: Stage = None  # type: ignore[assignment]  # set by bind, before anything asks for it
    name: str = ""
    takes: tuple[str, ...] = ()
    gives: tuple[str, ...] = ()
    takes_integers = True
    uploads_integers = False
    recordable = False
    frozen = False
    mixes_positions = True
    takes_any = False
    has_backward = True
    ends = False

    def __setattr__(self, name: str, value: object) -> None:
        # CUDA graphs have read the attributes. A pipeline knows of those that it sets in steps.
        is_gradient = name.endswith("_grad") and name[:-5] in self.declared
        if self.stage is not None and not is_gradient:
            if vars(self).get(name, self) is not value:
                self.stage.names.version += 1
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        parts = [f"{name} {parameter.shape}" for name, parameter in self.declared.items()]
        parts += map(repr, self.children.values())
        return f"{type(self).__name__}({', '.join(parts)})"

    def upload(self, x: Array) -> Array:
        """Bring an input of the first layer from the host to the device of the stage."""
        if arrays.is_device(x) or self.stage.device == "cpu":
            return x
        return arrays.upload(x)

    def unrecordable(self) -> str:
        """Return why CUDA graphs cannot record this layer after all; "" if they can."""
        return ""

    def begin_call(self) -> None:
        """Prepare for a call of the pipeline."""

    def projections(self) -> dict[str, Projection]:
        """Name the projections of the layer that can have adapters.

        Returns
        -------
        dict of str to Projection
            By the names that the ecosystem has for them, such as "q_proj".
        """
        return {}

    def bound(self) -> None:
        """Prepare what needs the stage or the arrays.

        Called by `bind`, when they are there, and again where a pipeline lets a tied parameter
        share the storage of another place: then `self.<name>` is another array.
        """

    def bind(self, stage: Stage, name: str) -> None:
        """Become part of one stage, under this name of the layer in the model."""
        if self.stage is not None:
            raise ArgumentError(
                f"layer {name} ({type(self).__name__}) already belongs to a stage, as {self.name}",
                remedy="make one layer object for each place; Parameter(tie=...) shares values "
                "between places",
            )
        self.stage = stage
        self.name = name
        for key in self.declared:
            setattr(self, key, stage.compute[full_name(name, key)])
            setattr(self, f"{key}_grad", stage.gradients.get(full_name(name, key)))
        self.bound()

    def walk(self, name: str) -> Iterator[tuple[str, Layer]]:
        """Iterate over this layer, of this name, and all within it.

        Yields
        ------
        (str, Layer)
            The full name of each layer, and the layer.
        """
        yield name, self
        for key, child in self.children.items():
            yield from child.walk(f"{name}.{key}")

    def _empty(self, shape: Shape, dtype: np.dtype) -> Array:
        return arrays.empty(shape, dtype, self.stage.device)

    def _copied(self, x: Array) -> Array:
        """Return a copy in C order, which the threads of the rank make."""
        copy = self._empty(x.shape, x.dtype)
        self.stage.kernels.copy(x, copy)
        return copy

    # -- how layers of the package add to gradients, which may be frozen or have adapters

    def _add(self, key: str, kernel: Callable[..., None], *parts: Array) -> None:
        """Add to a gradient by a kernel that takes it last, where it is there and not frozen."""
        gradient = self.__dict__.get(f"{key}_grad")  # set by `bind`
        if gradient is not None:
            kernel(*parts, gradient)

    def _add_product(self, key: str, dy: Array, x: Array, bias: str = "") -> None:
        """Add dy^T x to the gradient of a matrix, or to those of its adapters.

        The gradient of a `bias` of this name is the sum of the rows of dy.

        Of an adapter: dB = scale dy^T (x A^T), dA = scale (dy B)^T x, with the columns of dy that
        it stands for.
        """
        kernels = self.stage.kernels
        gradient = self.__dict__[f"{key}_grad"]
        if gradient is not None:
            kernels.linear_backward_weight(dy, x, gradient)
        gradient = self.__dict__.get(f"{bias}_grad")
        if gradient is not None:
            kernels.sum_rows(dy, gradient)
        for target, start, stop, scale in self.adapters.get(key, ()):
            a = getattr(self, f"{target}.{LORA_A}")
            b = getattr(self, f"{target}.{LORA_B}")
            da = getattr(self, f"{target}.{LORA_A}_grad")
            db = getattr(self, f"{target}.{LORA_B}_grad")
            columns = dy
            if stop - start < dy.shape[1]:
                columns = dy[:, start:stop]
                if arrays.is_device(dy):  # products there take whole rows
                    columns = arrays.copied(columns)
            # One of them may be frozen.
            if db is not None:
                inner = kernels.linear(x, a)
                kernels.linear_backward_weight(columns, kernels.scale(inner, scale, inner), db)
            if da is not None:
                inner = kernels.linear_backward_input(columns, b)
                kernels.linear_backward_weight(kernels.scale(inner, scale, inner), x, da)


def full_name(name: str, key: str) -> str:
    """Return the name in the model of what a layer of this name calls `key`.

    A layer of PyTorch or JAX may have the empty name.
    """
    if name:
        return f"{name}.{key}"
    return key


def mixes(layer: Layer) -> bool:
    """Return False if the class of the layer says that positions stand for themselves."""
    return "mixes_positions" not in vars(type(layer)) or layer.mixes_positions


def leaf(layer: Layer, place: int) -> Layer:
    """Return the innermost layer that is called first (0) or last (-1)."""
    while layer.children:
        layer = list(layer.children.values())[place]
    return layer
