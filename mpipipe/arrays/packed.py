"""Launches that are packed once for each combination of shapes, and then want addresses alone.

What a launch needs besides addresses follows from a few facts of its arrays: shape, strides, dtype, and how far the
address allows wide words. Checks, the choice of the compiled function, its grid, and numbers in the types of the
kernel's parameters cost several microseconds of Python; a model asks for the same ones in every micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Generic, TypeVar

from mpipipe.arrays.devices import cupy
from mpipipe.arrays.launch import WORD, Call
from mpipipe.arrays.types import DeviceArray

MOST = 4096  # packed calls that one kernel keeps; where shapes never repeat, all are dropped at once
LOW = WORD - 1


C = TypeVar("C", bound="Call | None")


class Packed(Generic[C]):
    """The calls of one kernel, or of several that differ by options.

    The parameters of a kernel are its arrays, then the numbers of the call, then numbers that vary between launches.

    Parameters
    ----------
    pack : callable
        Takes the arrays of a launch and its options, checks them, and returns the Call; None if there is nothing to
        do. It is asked once for each combination of facts, options and GPU, so it must look at nothing else. What it
        raises is raised again the next time.
    """

    def __init__(self, pack: Callable[..., C]):
        self._pack = pack
        self._known: dict[tuple, C] = {}

    def __call__(
        self,
        given: tuple[DeviceArray, ...],
        fresh: tuple[DeviceArray, ...] = (),
        options: tuple[Any, ...] = (),
        varying: tuple[Any, ...] = (),
    ) -> None:
        """Launch; see `call`. `varying` are numpy scalars for the last parameters."""
        call = self.call(given, fresh, options)
        if call is not None:
            call.function(call.grid, call.block, (*given, *fresh, *call.numbers, *varying))

    def call(
        self, given: tuple[DeviceArray, ...], fresh: tuple[DeviceArray, ...] = (), options: tuple[Any, ...] = ()
    ) -> C:
        """Return the call for these arrays.

        Parameters
        ----------
        given : arrays by whose facts the call is known
        fresh : more arrays, whose shapes and dtypes follow from those of `given` and the options; either just
            allocated, so that they start on a boundary of words, or among `given` too
        options : hashable values
        """
        facts: list[Any] = [options, _current_gpu()()]
        for x in given:
            facts += x.shape, x.strides, x.dtype, x.data.ptr & LOW
        key = tuple(facts)
        try:
            return self._known[key]
        except KeyError:
            pass
        call = self._pack(*given, *fresh, *options)
        if len(self._known) >= MOST:
            self._known.clear()
        self._known[key] = call
        return call

    def cache_clear(self) -> None:
        """Forget all calls."""
        self._known.clear()


@cache
def _current_gpu() -> Callable[[], int]:
    """Return the function that tells the current GPU."""
    return cupy().cuda.runtime.getDevice
