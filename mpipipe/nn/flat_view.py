"""Named pieces of one flat array, where the array and its names are a user's own: what FlatBuffer has by itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import copy
from typing import Any

from mpipipe import arrays
from mpipipe.arrays import Array
from mpipipe.errors import ArgumentError

WHOLE = "flat"  # name of all parameters together, where their stage gives them none


class FlatView(Mapping[str, Array]):
    """A flat array as named arrays. One of complex numbers is seen as pairs of real ones, with an axis more.

    Parameters
    ----------
    flat : one-dimensional and contiguous
    offsets : where each named array starts in it
    shapes : of the named arrays

    Attributes
    ----------
    parts : numbers in `flat` for one of the given array: 2 for complex ones
    """

    def __init__(self, flat: Array, offsets: Mapping[str, int], shapes: Mapping[str, arrays.Shape]):
        pair = (2,) if flat.dtype.kind == "c" else ()
        self._given = flat.dtype, flat.size
        self.flat, self.parts = arrays.as_reals(flat).reshape(-1), 1 + len(pair)
        self.offsets = {name: self.parts * start for name, start in offsets.items()}
        self._shapes = {name: (*shape, *pair) for name, shape in shapes.items()}

    @classmethod
    def of(cls, holder: Any) -> FlatView:
        """Return the view of a user's `parameters`: an object with `flat`, and a mapping of names where it has any.

        Raises ArgumentError if `flat` is no flat array, or a named array lies elsewhere.
        """
        flat = flat_of(holder, "the parameters of a stage")
        if not isinstance(holder, Mapping) or not holder:
            return cls(flat, {WHOLE: 0}, {WHOLE: flat.shape})
        offsets = {name: _offset(name, array, flat) for name, array in holder.items()}
        return cls(flat, offsets, {name: array.shape for name, array in holder.items()})

    def like(self, holder: Any) -> FlatView:
        """Return the view of a user's `gradients`, which lie in their flat array as the parameters do in theirs."""
        flat = flat_of(holder, "the gradients of a stage")
        if (flat.dtype, flat.size) != self._given:
            raise ArgumentError(
                "parameters and gradients of a stage differ",
                found=f"gradients.flat: {flat.dtype}[{flat.size}]",
                expected="{}[{}], as parameters.flat is".format(*self._given),
            )
        view = copy(self)
        view.flat = arrays.as_reals(flat).reshape(-1)
        return view

    @property
    def decay_ranges(self) -> list[tuple[int, int, bool]]:
        """(start, stop, decay) of the flat array: matrices decay and vectors do not; without names all of it does."""
        places = sorted(
            (start, len(self._shapes[name]) > self.parts or name == WHOLE)
            for name, start in self.offsets.items()
            if self[name].size
        )
        edges = [0, *(start for start, _ in places[1:]), self.flat.size]  # gaps go with what is before them
        return [(start, stop, decay) for (_, decay), start, stop in zip(places, edges, edges[1:]) if stop > start]

    def __getitem__(self, name: str) -> Array:
        start, shape = self.offsets[name], self._shapes[name]
        size = 1
        for extent in shape:
            size *= extent
        return self.flat[start : start + size].reshape(shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self.offsets)

    def __len__(self) -> int:
        return len(self.offsets)


def flat_if_any(holder: Any) -> Array | None:
    """Return `holder.flat` where that is a one-dimensional contiguous array; None elsewhere."""
    flat: Any = getattr(holder, "flat", None)
    return flat if arrays.is_array(flat) and flat.ndim == 1 and flat.flags.c_contiguous else None


def flat_of(holder: Any, what: str) -> Array:
    """Return `holder.flat`; raises ArgumentError if that is no flat array."""
    flat = flat_if_any(holder)
    if flat is None:
        raise ArgumentError(
            what,
            found=f"{type(holder).__name__} without a one-dimensional contiguous array `flat`",
            expected="an object with `flat`, or None for a stage without parameters",
        )
    return flat


def _offset(name: str, array: Any, flat: Array) -> int:
    """Where a named array starts in the flat one."""
    if arrays.is_array(array) and array.dtype == flat.dtype and array.flags.c_contiguous:
        start, rest = divmod(arrays.address(array) - arrays.address(flat), flat.dtype.itemsize)
        if array.size == 0:
            return 0
        if rest == 0 and 0 <= start and start + array.size <= flat.size:
            return start
    raise ArgumentError(
        f"the parameter {name} does not lie in parameters.flat",
        found=f"{array.dtype}{list(array.shape)} elsewhere" if arrays.is_array(array) else type(array).__name__,
        expected=f"a contiguous view of parameters.flat, {flat.dtype}[{flat.size}]",
        remedy="make the named arrays views of one array, as nn.FlatBuffer does",
    )
