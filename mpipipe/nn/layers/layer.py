"""The protocol of a layer: a pair of array functions, whose backward can be split in two."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Protocol

from mpipipe import arrays
from mpipipe.arrays import Array
from mpipipe.errors import ArgumentError
from mpipipe.nn.kernels.interface import Kernels
from mpipipe.nn.layers.sums import Sums
from mpipipe.nn.layers.weight_gradients import WeightGradients
from mpipipe.nn.parameters import Parameter
from mpipipe.nn.rope_tables import RopeTables


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
    @property
    def unwritten(self) -> set[str]: ...


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
    replaced : tuple of str
        Names whose gradients the layer writes only as `adds` says. Subclasses do not inherit it: they may add to the
        gradients in other ways.
    freezes_parts : bool
        Whether the layer can do with some of its parameters frozen: it leaves out a gradient that is None. Subclasses
        do not inherit it. A layer whose parameters are all frozen is never asked for `backward_weight`.
    still : bool
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
    replaced: tuple[str, ...] = ()
    recordable = False
    freezes_parts = False
    still = False

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
