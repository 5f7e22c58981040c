"""The protocol of a layer: a pair of array functions, whose backward can be split in two."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike

from mpipipe import arrays
from mpipipe.arrays import Array
from mpipipe.errors import ArgumentError
from mpipipe.nn.kernels.interface import Kernels
from mpipipe.nn.layers.weight_gradients import WeightGradients
from mpipipe.nn.parameters import Parameter
from mpipipe.nn.rope import RopeScaling

# -- Functions that do the work of another one in a better way, and classes that redefine that other one --------------


def keep_redefined(cls: type, base: type, passed: Mapping[str, tuple[str, ...]]) -> None:
    """Give a new class the functions of `base` again where inherited ones would go past what the class redefines.

    Parameters
    ----------
    cls : type
        A subclass of `base`; called by `__init_subclass__`.
    base : type
        Its functions call the ones that subclasses redefine.
    passed : mapping of str to tuple of str
        Name of a function to the names of those that may do without it.
    """
    for name, others in passed.items():
        for other in others:
            if _place(cls, name) < _place(cls, other):
                setattr(cls, other, getattr(base, other))


def _place(cls: type, name: str) -> int:
    """Return how far from a class the class is that defines a name."""
    return next(place for place, each in enumerate(cls.__mro__) if name in vars(each))


# -- Sums of two arrays that one layer leaves to the next, so that the kernel which reads a sum can also make it ------
#
# y = x + f(x) is one pass over memory, and the norm of y in the next layer is another. A layer that can leave its
# output as two arrays says so (`defers_add`); a container hands both to the next layer, and a norm takes them in one
# pass. The backward has a sum too, of the gradient that goes past f and the one that comes through it: the norm at the
# beginning of f is given the former. Each layer can do all of this, by an addition of its own where it has nothing
# better. The bits are those of separate passes.


# what a layer redefines, and the functions here that would go past it
PASSED = {
    "forward": ("forward_sum", "forward_unadded"),
    "backward_input": ("backward_input_add", "backward_add"),
    "backward": ("backward_add",),
}


class Sums(ABC):
    """What a layer does with sums of two arrays; a Layer that defines `forward` and `backward_input` has it all.

    A class that redefines one of the functions in `PASSED`, and not what stands beside it, gets the latter anew from
    here: so a subclass of a norm is never passed by.

    Attributes
    ----------
    defers_add : bool
        Whether `forward_unadded` returns an output in two arrays, or may do so.
    """

    defers_add = False
    stage: Any

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        keep_redefined(cls, Sums, PASSED)

    @abstractmethod
    def forward(self, x: Array) -> tuple[Array, Any]:
        """As `Layer.forward`."""

    @abstractmethod
    def backward_input(self, dy: Array, saved: Any) -> tuple[Any, Any]:
        """As `Layer.backward_input`."""

    @abstractmethod
    def backward(self, dy: Array, saved: Any) -> Any:
        """As `Layer.backward`."""

    def forward_sum(self, x: Array, more: Array) -> tuple[Array, Array, Any]:
        """Compute the output for the input x + more.

        Parameters
        ----------
        x, more : array
            Of one shape, of the stage's dtype and device.

        Returns
        -------
        total : array
            x + more.
        y : array
            The output.
        saved : object
            As from `forward` of `total`.
        """
        total = self.stage.kernels.add(x, more)
        return (total, *self.forward(total))

    def forward_unadded(self, x: Array, more: Array | None) -> tuple[Array, Array, Array | None, Any]:
        """Compute the output for the input x, or x + more, and perhaps leave it as a sum.

        Parameters
        ----------
        x : array
            The input, as for `forward`.
        more : array or None
            What is still to be added to it.

        Returns
        -------
        total : array
            The whole input.
        y : array
            The output, or a part of it.
        rest : array or None
            The other part, which is to be added to y.
        saved : object
            As from `forward` of `total`.
        """
        if more is None:
            y, saved = self.forward(x)
            return x, y, None, saved
        total, y, saved = self.forward_sum(x, more)
        return total, y, None, saved

    def backward_input_add(self, dy: Array, saved: Any, more: Array) -> tuple[Array, Any]:
        """Do `backward_input`, and add the gradient of the input to `more`.

        Parameters
        ----------
        dy : array
            Gradient of the output.
        saved : object
            What `forward` saved.
        more : array
            In the shape of the input; stays as it is, and may be dy.

        Returns
        -------
        dx : array
            more + the gradient of the input.
        pending : object
            As from `backward_input`.
        """
        dx, pending = self.backward_input(dy, saved)
        return self.stage.kernels.add(more, dx), pending

    def backward_add(self, dy: Array, saved: Any, more: Array) -> Array:
        """Do `backward`, and add the gradient of the input to `more`.

        Parameters
        ----------
        dy : array
            Gradient of the output.
        saved : object
            What `forward` saved.
        more : array
            In the shape of the input; stays as it is, and may be dy.

        Returns
        -------
        array
            more + the gradient of the input.
        """
        return self.stage.kernels.add(more, self.backward(dy, saved))


# -- The protocol of a layer: a pair of array functions, whose backward can be split in two ---------------------------


class StageOfLayer(Protocol):
    """What a layer asks of the stage that binds it; see nn.Stage."""

    position: Any

    @property
    def headless(self) -> bool: ...
    @property
    def kernels(self) -> Kernels: ...
    @property
    def tables(self) -> RopeTables: ...
    @property
    def device(self) -> str: ...
    @property
    def seed(self) -> int: ...
    @property
    def poll(self) -> Callable[[], object] | None: ...
    @property
    def compute(self) -> Mapping[str, Any]: ...
    @property
    def gradients(self) -> Mapping[str, Any]: ...


class Layer(Sums, WeightGradients):
    """Arrays in, arrays out. A layer holds parameters, but nothing of any micro-batch.

    A layer is a description until a `Stage` binds it. It says which arrays it needs in `declared` and which layers it
    contains in `children`. Binding gives it an attribute for each declared name (`self.weight`, in the dtype of
    activations) and one for its gradient (`self.weight_grad`, in the dtype of parameters): views of the stage's flat
    buffers. It also sets `stage` and `name`, and then calls `bound`.

    A layer that computes with the functions of `stage.kernels` alone works in every dtype and on every device.

    The contract of `forward` and the backward functions:

    - `forward` never writes x. The backward functions never write dy, x or what forward saved.
    - Results may be views of arguments.
    - Gradients are added to `*_grad`. An x of integers has no gradient: dx is None.
    - Equal inputs give equal bits, and `backward` gives the bits of `backward_input` and `backward_weight` together.

    Attributes
    ----------
    declared : mapping of str to Parameter
        The arrays that the layer needs.
    children : mapping of str to Layer
        The layers that it contains.
    stage : Stage
        The stage that bound it.
    name : str
        Its name in the model, such as `"3"` or `"3.layer"`.
    takes_integers : bool
        Whether it can be the first layer of a stage whose input is integers.
    uploads_integers : bool
        Whether it looks at integers on the host, and copies them to the GPU by itself.
    freezes_parts : bool
        Whether the layer can do with some of its parameters frozen: it leaves out a gradient that is None. Subclasses
        do not inherit it. A layer whose parameters are all frozen is never asked for `backward_weight`.
    frozen : bool
        Whether all parameters in it are frozen, set when it is bound.
    recordable : bool
        Whether CUDA graphs may record the layer: with inputs of the same shapes it does the same device work each time,
        and never lets the host wait for the device. Subclasses do not inherit it either.

    Examples
    --------
    >>> import numpy as np
    >>> from mpipipe import nn
    >>> class Shift(nn.Layer):
    ...     def __init__(self, dim):
    ...         self.declared = {"shift": nn.Parameter((dim,), lambda generator, shape: np.ones(shape))}
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
    stage: StageOfLayer = None  # type: ignore[assignment]  # set by bind, before anything asks for it
    name: str = ""
    takes_integers = True
    uploads_integers = False
    recordable = False
    freezes_parts = False
    frozen = False

    @abstractmethod
    def forward(self, x: Array) -> tuple[Array, Any]:
        """Compute the output of one micro-batch.

        Parameters
        ----------
        x : array
            The input, of the stage's dtype and device, or integers.

        Returns
        -------
        y : array
            The output.
        saved : object
            All that the backward of this micro-batch needs.
        """

    def upload(self, x: Array) -> Array:
        """Bring an input on the host to the device of the stage; asked of the first layer.

        Parameters
        ----------
        x : array
            An input that `forward` takes.

        Returns
        -------
        array
            The input on the device of the stage.
        """
        return x if arrays.is_device(x) or self.stage.device == "cpu" else arrays.upload(x)

    @abstractmethod
    def backward_input(self, dy: Array, saved: Any) -> tuple[Any, Any]:
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

    def backward_weight(self, pending: Any) -> None:
        """Add this micro-batch's part to the gradients of the parameters.

        Parameters
        ----------
        pending : object
            What `backward_input` returned.
        """

    def backward(self, dy: Array, saved: Any) -> Any:
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
        dx, pending = self.backward_input(dy, saved)
        self.backward_weight(pending)
        return dx

    def unrecordable(self) -> str:
        """Return why CUDA graphs cannot record this layer, where its class says that they can.

        Returns
        -------
        str
            A reason in words, or "" where there is none.
        """
        return ""

    def bound(self) -> None:
        """Prepare what needs the stage or the arrays.

        Called by `bind`, when they are there, and again where a pipeline lets a tied parameter share the storage of
        another place: then `self.<name>` is another array.
        """

    def bind(self, stage: StageOfLayer, name: str) -> None:
        """Become part of a stage. Called by Stage.

        Parameters
        ----------
        stage : Stage
            The stage.
        name : str
            The name of the layer in the model.

        Raises
        ------
        ArgumentError
            The layer belongs to a stage already.
        """
        if self.stage is not None:
            raise ArgumentError(
                f"layer {name} ({type(self).__name__}) already belongs to a stage, as {self.name}",
                remedy="make one layer object for each place; Parameter(tie=...) shares values between places",
            )
        self.stage, self.name = stage, name
        for key in self.declared:
            setattr(self, key, stage.compute[f"{name}.{key}"])
            setattr(self, f"{key}_grad", stage.gradients.get(f"{name}.{key}"))
        self.bound()

    def walk(self, name: str) -> Iterator[tuple[str, Layer]]:
        """Iterate over this layer and all within it.

        Parameters
        ----------
        name : str
            The name of this layer.

        Yields
        ------
        (str, Layer)
            The full name of each layer, and the layer.
        """
        yield name, self
        for key, child in self.children.items():
            yield from child.walk(f"{name}.{key}")


def first_leaf(layer: Layer) -> Layer:
    """Return the layer within this one that is called first and has none within itself."""
    while layer.children:
        layer = next(iter(layer.children.values()))
    return layer


def last_leaf(layer: Layer) -> Layer:
    """Return the layer within this one that is called last and has none within itself."""
    while layer.children:
        layer = list(layer.children.values())[-1]
    return layer


# -- The rotary tables of one stage, made where it computes; layers that turn the same positions share one ------------


TABLES = 16  # of one stage at most, each for its own positions


class RopeTables:
    """Tables for `kernels.apply_rope` on arrays of one dtype and device, kept for the next use."""

    def __init__(self, kernels: Kernels, dtype: np.dtype, device: str):
        self.kernels, self.dtype, self.device = kernels, dtype, device
        self._kept = lru_cache(maxsize=TABLES)(self._make)

    def of(self, positions: ArrayLike, head_dim: int, base: float, scaling: RopeScaling | None = None) -> Array:
        """Return the table of any positions: its i-th row turns the i-th row of the sequence."""
        return self._held(np.ascontiguousarray(positions, np.int64).tobytes(), head_dim, base, scaling)

    def first(self, seq: int, head_dim: int, base: float, scaling: RopeScaling | None = None) -> Array:
        """Return the table of the positions 0 ... seq - 1, a part of that of the next power of two."""
        length = 1 << max(seq - 1, 0).bit_length()
        return self._held(length, head_dim, base, scaling)[:seq]

    def _held(self, positions: int | bytes, head_dim: int, base: float, scaling: RopeScaling | None) -> Array:
        """Return a table that is kept, and that lives as long as a graph which is recorded now."""
        return arrays.keep_for_graph(self._kept(positions, head_dim, base, scaling))

    def _make(self, positions: int | bytes, head_dim: int, base: float, scaling: RopeScaling | None) -> Array:
        """Make the table of the first positions, or of those whose int64 values these bytes are."""
        numbers = np.arange(positions) if isinstance(positions, int) else np.frombuffer(positions, np.int64)
        return self.kernels.rope_table(numbers, head_dim, base, self.dtype, self.device, scaling)
