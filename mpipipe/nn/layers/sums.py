"""Sums of two arrays that one layer leaves to the next, so that the kernel which reads a sum can also make it.

y = x + f(x) is one pass over memory, and the norm of y in the next layer is another. A layer that can leave its output
as two arrays says so (`leaves_sum`); a container hands both to the next layer, and a norm takes them in one pass. The
backward has a sum too, of the gradient that goes past f and the one that comes through it: the norm at the beginning of
f is given the former. Each layer can do all of this, by an addition of its own where it has nothing better. The bits
are those of separate passes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from mpipipe.arrays import Array
from mpipipe.nn.layers.redefined import keep_redefined

# what a layer redefines, and the functions here that would go past it
PASSED = {
    "forward": ("forward_sum", "forward_apart"),
    "backward_input": ("backward_input_add", "backward_add"),
    "backward": ("backward_add",),
}


class Sums(ABC):
    """What a layer does with sums of two arrays; a Layer that defines `forward` and `backward_input` has it all.

    A class that redefines one of the functions in `PASSED`, and not what stands beside it, gets the latter anew from
    here: so a subclass of a norm is never passed by.

    Attributes
    ----------
    leaves_sum : bool
        Whether `forward_apart` returns an output in two arrays, or may do so.
    """

    leaves_sum = False
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

    def forward_apart(self, x: Array, more: Array | None) -> tuple[Array, Array, Array | None, Any]:
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
