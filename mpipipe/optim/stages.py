"""Stages as optimizers and norms see them: an nn.Stage as it is, any other with flat parameters and gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from mpipipe import arrays
from mpipipe.arrays import Array
from mpipipe.errors import ArgumentError
from mpipipe.nn import Stage, kernels
from mpipipe.nn.kernels import Kernels
from mpipipe.stages import FlatView, flat_if_any


class Named(Protocol):
    """A flat array with named views: nn.FlatBuffer, or a FlatView."""

    @property
    def flat(self) -> Array: ...
    @property
    def offsets(self) -> Mapping[str, int]: ...
    def __getitem__(self, name: str) -> Array: ...
    def __iter__(self) -> Any: ...
    def items(self) -> Any: ...


class Updated(Protocol):
    """What optimizers and norms ask of a stage."""

    @property
    def index(self) -> int | None: ...
    @property
    def gpu(self) -> int | None: ...
    @property
    def kernels(self) -> Kernels: ...
    @property
    def parameters(self) -> Named: ...
    @property
    def gradients(self) -> Named: ...
    @property
    def decay_ranges(self) -> list[tuple[int, int, bool]]: ...
    @property
    def kept_copy(self) -> Array | None: ...
    @property
    def tied_copies(self) -> set[str]: ...
    @property
    def owners(self) -> Mapping[str, tuple[Any, str]]: ...
    @property
    def before_write(self) -> list[Callable[[], object]]: ...


class FlatStage:
    """A stage of a user's own whose `parameters` and `gradients` have an array `flat` each; see FlatView for names.

    Complex parameters are seen as pairs of real ones: gradients are dRe + i dIm, so each part has its own.

    It may have `index`, `decay_ranges` and `before_write` as an nn.Stage has. Both buffers are asked for each time.
    """

    def __init__(self, given: Any):
        self.given = given
        self._views: tuple[tuple[int, int], FlatView] | None = None

    @property
    def parameters(self) -> FlatView:
        """The parameters by name; the names are looked up again where the array is another one."""
        flat = flat_if_any(getattr(self.given, "parameters", None))
        key = (0, 0) if flat is None else (arrays.address(flat), flat.size)
        if self._views is None or self._views[0] != key:
            self._views = key, self._named()
        return self._views[1]

    def _named(self) -> FlatView:
        holder = getattr(self.given, "parameters", None)
        if holder is None and getattr(self.given, "gradients", None) is None:
            if not hasattr(self.given, "gradients") and not hasattr(self.given, "parameters"):
                raise ArgumentError(
                    "a stage without flat parameters and gradients",
                    found=type(self.given).__name__,
                    expected="attributes `parameters` and `gradients`, each None or an object with an array `flat`",
                    remedy="make both of nn.FlatBuffer; a stage around others: give its inner_stages",
                )
            return FlatView(np.zeros(0, np.float32), {}, {})
        return FlatView.of(holder)

    @property
    def gradients(self) -> FlatView:
        own = self.parameters
        return own if not own and not own.flat.size else own.like(getattr(self.given, "gradients", None))

    @property
    def index(self) -> int | None:
        found: int | None = getattr(self.given, "index", None)
        return found

    @property
    def gpu(self) -> int | None:
        return arrays.current_gpu() if arrays.is_device(self.parameters.flat) else None

    @property
    def kernels(self) -> Kernels:
        return kernels.of_array(self.parameters.flat)

    @property
    def decay_ranges(self) -> list[tuple[int, int, bool]]:
        found: list[tuple[int, int, bool]] | None = getattr(self.given, "decay_ranges", None)
        own = self.parameters
        return own.decay_ranges if found is None else [(own.parts * a, own.parts * b, decay) for a, b, decay in found]

    @property
    def kept_copy(self) -> None:
        return None

    @property
    def tied_copies(self) -> set[str]:
        return set()

    @property
    def owners(self) -> Mapping[str, tuple[Any, str]]:
        return {}

    @property
    def before_write(self) -> list[Callable[[], object]]:
        return getattr(self.given, "before_write", [])


def measured(stages: Sequence[Any]) -> list[Updated]:
    """Return the stages as a norm sees them."""
    return [given if isinstance(given, (Stage, FlatStage)) else FlatStage(given) for given in stages]


def updated(stages: Sequence[Any]) -> list[Updated]:
    """Return the stages as an optimizer sees them; raises ArgumentError for parameters that it should not update."""
    found = measured(stages)
    for number, each in enumerate(found):
        own, gradients = each.parameters.flat, each.gradients.flat
        if own.size and (own.dtype not in (np.float32, np.float64) or gradients.dtype != own.dtype):
            raise ArgumentError(
                f"parameters of the optimizer's stage {number} are in {own.dtype}",
                stage=each.index,
                found=f"parameters in {own.dtype}, gradients in {gradients.dtype}",
                expected="float32 or float64: in half precision most updates are lost when they are rounded",
                remedy="keep parameters in float32 and compute in half precision, by torch.autocast or a cast in JAX",
            )
    return found
