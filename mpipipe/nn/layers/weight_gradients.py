"""How a layer adds to the gradients of its parameters: whether they are trained, frozen, or have adapters."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from mpipipe import arrays
from mpipipe.arrays import Array

LORA_A, LORA_B = "lora_A", "lora_B"


class Projection(NamedTuple):
    """Rows of a matrix that are a projection of their own: from `start` to before `stop` of the parameter `key`."""

    key: str
    start: int
    stop: int


class Adapter(NamedTuple):
    """A low-rank adapter of some rows of a matrix; see nn.LoRA. Its parameters are `<target>.lora_A` and `.lora_B`."""

    target: str
    start: int
    stop: int
    scale: float


def projections_of_rows(key: str, rows: Mapping[str, int]) -> dict[str, Projection]:
    """Return projections that lie one above the other in a matrix."""
    found, start = {}, 0
    for name, count in rows.items():
        found[name] = Projection(key, start, start + count)
        start += count
    return found


class WeightGradients:
    """What each layer inherits to add its part of a micro-batch to `<key>_grad`."""

    stage: Any
    name: str
    adapters: Mapping[str, list[Adapter]] = MappingProxyType({})  # by the matrix that they belong to

    def projections(self) -> dict[str, Projection]:
        """Name the projections of the layer that can have adapters.

        Returns
        -------
        dict of str to Projection
            By the names that the ecosystem has for them, such as "q_proj".
        """
        return {}

    def trains(self, key: str) -> bool:
        """Tell whether a matrix takes part in the training.

        Parameters
        ----------
        key : str
            Name of the matrix.

        Returns
        -------
        bool
            Whether `add_product` does anything for it.
        """
        return getattr(self, f"{key}_grad") is not None or key in self.adapters

    def add_product(self, key: str, dy: Array, x: Array) -> None:
        """Add dy^T x to the gradient of a matrix (outputs, inputs), or to those of its adapters, unless it is frozen.

        Parameters
        ----------
        key : str
            Name of the matrix.
        dy : array
            (rows, outputs).
        x : array
            (rows, inputs).
        """
        gradient = getattr(self, f"{key}_grad")
        if gradient is not None:
            self.stage.kernels.linear_backward_weight(dy, x, gradient)
        for adapter in self.adapters.get(key, ()):
            self._add_to_adapter(adapter, dy, x)

    def _add_to_adapter(self, adapter: Adapter, dy: Array, x: Array) -> None:
        """Add dB = scale dy^T (x A^T) and dA = scale (dy B)^T x, with the columns of dy that the adapter stands for."""
        kernels, (target, start, stop, scale) = self.stage.kernels, adapter
        a, b = (getattr(self, f"{target}.{part}") for part in (LORA_A, LORA_B))
        da, db = (getattr(self, f"{target}.{part}_grad") for part in (LORA_A, LORA_B))
        if stop - start != dy.shape[1]:
            dy = dy[:, start:stop]
            if arrays.is_device(dy):  # whose products take whole rows alone
                whole = arrays.empty(dy.shape, dy.dtype, "cuda")
                kernels.copy(dy, whole)
                dy = whole
        inner = kernels.linear(x, a)
        kernels.linear_backward_weight(dy, kernels.scale(inner, scale, inner), db)
        inner = kernels.linear_backward_input(dy, b)
        kernels.linear_backward_weight(kernels.scale(inner, scale, inner), x, da)

    def add_parts(self, key: str, parts: Array) -> None:
        """Add the sum of the rows of parts to the gradient of a vector, unless that is frozen.

        Parameters
        ----------
        key : str
            Name of the vector.
        parts : array
            (count, width), as for `kernels.add_parts`.
        """
        gradient = getattr(self, f"{key}_grad")
        if gradient is not None:
            self.stage.kernels.add_parts(parts, gradient)

    def add_rows(self, key: str, dy: Array) -> None:
        """Add the sum of the rows of dy to the gradient of a bias, unless that is frozen or there is none.

        Parameters
        ----------
        key : str
            Name of the bias.
        dy : array
            (rows, outputs).
        """
        gradient = getattr(self, f"{key}_grad")
        if gradient is not None:
            self.stage.kernels.sum_rows(dy, gradient)
