"""What a pipeline does with the gradients of a stage around a step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from mpipipe import arrays
from mpipipe.arrays import Array
from mpipipe.nn.layers.containers import Sequential
from mpipipe.nn.layers.layer import Layer
from mpipipe.nn.parameters import FlatBuffer


class StepGradients:
    """The gradients of an nn.Stage, which has the attributes below; see there."""

    gradients: FlatBuffer
    parts: dict[str, Array]
    unwritten: set[str]
    layer_of: dict[str, tuple[Layer, str]]
    _replaced: list[str]
    _chain: Sequential

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
