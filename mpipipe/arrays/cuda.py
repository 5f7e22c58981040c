"""CUDA C++ functions of this package, compiled when they are first called."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np

from mpipipe.arrays.devices import cupy
from mpipipe.arrays.dtypes import DeviceArray

COMMON = Path(__file__).parent / "common.cuh"  # goes before every source
C_TYPES = dict(
    float32="float",
    float64="double",
    float16="fp16",
    bfloat16="bf16",
    int32="int",
    int64="long long",
)


# The names and values of constants that a source is compiled with.
Constants: TypeAlias = "tuple[tuple[str, np.dtype | int], ...]"


@cache
def _module(path: Path, constants: Constants, _device: int) -> Any:
    # not by #include and -D: CuPy's cache of compiled code does not look into included files, and
    # macros reach headers
    code = "\n".join([COMMON.read_text(), *cuda_declarations(dict(constants)), path.read_text()])
    return cupy().RawModule(code=code, options=("--std=c++17",), backend="nvrtc")


@cache
def _function(path: Path, name: str, constants: Constants, device: int) -> Callable:
    return _module(path, constants, device).get_function(name)


def cuda_declarations(constants: Mapping[str, np.dtype | int]) -> list[str]:
    """Write constants as C++ declarations: 'typedef float T;', 'constexpr int N = 4;'."""
    lines = []
    for name, value in constants.items():
        line = f"constexpr int {name} = {value};"
        if isinstance(value, np.dtype):
            line = f"typedef {C_TYPES[value.name]} {name};"
        lines.append(line)
    return lines


def cuda_function(path: Path, name: str, **constants: np.dtype | int) -> Callable:
    """Return an `extern "C"` function of a CUDA source file, compiled once for a GPU.

    The constants are part of what it is compiled for.

    A dtype declares a type of that name in front of the source (`T=array.dtype`), an integer a
    `constexpr int`. The function takes (grid, block, arguments), and by keyword `shared_mem`, the
    bytes of dynamic shared memory. Arguments are device arrays and numpy scalars, whose dtypes must
    be the C types of the parameters.
    """
    return _function(path, name, tuple(constants.items()), cupy().cuda.runtime.getDevice())


# -- The start of kernels over flat arrays: the width of their words, and their grids --------------


WORD = 16  # bytes: the widest load of one thread
BLOCK = 256  # threads of a block without a reason for another number
# Of one grid: the threads of a kernel with more to do come back for it.
MOST_BLOCKS = 1 << 20


class Launch(NamedTuple):
    """A launch without its arrays."""

    function: Callable  # returned by `cuda_function`
    grid: tuple[int, ...]
    block: tuple[int, ...]
    numbers: tuple[object, ...] = ()  # the parameters after the arrays, in their types

    def launch(self, inputs: tuple[DeviceArray, ...], varying: tuple[object, ...] = ()) -> None:
        """Launch with these arrays, and with more numbers after its own."""
        self.function(self.grid, self.block, (*inputs, *self.numbers, *varying))


def vector_width(*arrays: DeviceArray, divides: int = 0) -> int:
    """Return how many elements move as one word of memory: a power of two, of `divides`.

    All addresses must allow it. A word has at most 16 bytes of the widest dtype.
    """
    limits = divides
    widest = 1
    for array in arrays:
        limits |= array.data.ptr // array.itemsize
        widest = max(widest, array.itemsize)
    limits |= WORD // widest
    return limits & -limits


def bitwise_or(*groups: Iterable[int]) -> int:
    """Bitwise OR of all numbers. A power of two divides it exactly if it divides each of them."""
    bits = 0
    for group in groups:
        for number in group:
            bits |= number
    return bits


def grid(count: int, per_block: int) -> tuple[int]:
    """Return the grid for `count` items, where one block takes `per_block` at a time."""
    return (min(-(-count // per_block), MOST_BLOCKS),)


def scalar_type(dtype: np.dtype) -> type:
    """Return the numpy type of a kernel's numbers for `dtype`: that of its accumulator."""
    if dtype.itemsize == 8:
        return np.float64
    return np.float32


def launch(
    source: Path,
    name: str,
    size: int,
    arguments: tuple[object, ...],
    *,
    V: int,
    words: int = 2,
    **dtypes: np.dtype,
) -> None:
    """Start a kernel over `size` elements: a thread takes `words` words of V elements.

    The source is compiled for V and the dtypes, as `cuda_function` says.
    """
    call = over(source, name, size, arguments, V=V, words=words, **dtypes)
    if call is not None:
        call.launch(())


def over(
    source: Path,
    name: str,
    size: int,
    numbers: tuple[object, ...] = (),
    *,
    V: int,
    words: int = 2,
    **dtypes: np.dtype,
) -> Launch | None:
    """Return the call of a kernel over `size` elements, or None for 0 elements.

    The numbers come after its arrays.
    """
    if not size:
        return None
    return Launch(
        cuda_function(source, name, **dtypes, V=V),
        grid(-(-size // V), words * BLOCK),
        (BLOCK,),
        numbers,
    )


# -- Launches that are packed once for each combination of shapes, and then want addresses alone ---
#
# What a launch needs besides addresses follows from a few facts of its arrays: shape, strides,
# dtype, and how far the address allows wide words. Checks, the choice of the compiled function, its
# grid, and numbers in the types of the kernel's parameters cost several microseconds of Python; a
# model asks for the same ones in every micro-batch.


# Packed calls that one kernel keeps; where shapes never repeat, all are dropped at once.
MOST = 4096


C = TypeVar("C", bound="Launch | None")


class Packed(Generic[C]):
    """The calls of one kernel, or of several that differ by options.

    The parameters of a kernel are its arrays, then the numbers of the call, then numbers that vary
    between launches. `pack` takes the arrays of a launch and its options, checks them, and returns
    the Launch; None if there is nothing to do. It is called once for each combination of facts,
    options and GPU, so it must look at nothing else. Its errors are raised again the next time.
    """

    def __init__(self, pack: Callable[..., C]):
        self._pack = pack
        self._known: dict[tuple, C] = {}

    def __call__(
        self,
        inputs: tuple[DeviceArray, ...],
        fresh: tuple[DeviceArray, ...] = (),
        options: tuple[object, ...] = (),
        varying: tuple[object, ...] = (),
        launch: bool = True,
    ) -> C:
        """Launch, and return the call for these arrays; without `launch` nothing is launched.

        inputs : arrays by whose facts the call is known
        fresh : more arrays, whose shapes and dtypes follow from those of `inputs` and the options;
            either just allocated, so that they start on a boundary of words, or among `inputs` too
        varying : numpy scalars for the last parameters
        """
        facts: list[object] = [options, _current_gpu()()]
        for x in inputs:
            facts += x.shape, x.strides, x.dtype, x.data.ptr % WORD
        key = tuple(facts)
        call = self._known.get(key)
        if call is None:  # or there is nothing to do
            call = self._pack(*inputs, *fresh, *options)
            if len(self._known) >= MOST:
                self._known.clear()
            self._known[key] = call
        if launch and call is not None:
            call.function(call.grid, call.block, (*inputs, *fresh, *call.numbers, *varying))
        return call

    def cache_clear(self) -> None:
        """Forget all calls."""
        self._known.clear()


@cache
def _current_gpu() -> Callable[[], int]:
    """Return the function that returns the current GPU."""
    return cupy().cuda.runtime.getDevice
