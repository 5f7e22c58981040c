"""CUDA C++ functions of this package, compiled when they are first called."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from mpipipe.arrays.devices import AMD_UNTRIED, cupy, use_gpu, visible_gpus
from mpipipe.arrays.dtypes import DeviceArray
from mpipipe.errors import BackendError

COMMON = Path(__file__).parent / "common.cuh"  # goes before every source
C_TYPES = {
    "float32": "float",
    "float64": "double",
    "float16": "fp16",
    "bfloat16": "bf16",
    "int32": "int",
    "int64": "long long",
}


@cache
def _module(path: Path, constants: tuple[tuple[str, np.dtype | int], ...], _device: int) -> Any:
    # not by #include and -D: CuPy's cache of compiled code does not look into included files, and macros reach headers
    code = "\n".join([COMMON.read_text(), *cuda_declarations(dict(constants)), path.read_text()])
    return cupy().RawModule(code=code, options=("--std=c++17",), backend="nvrtc")


@cache
def _function(path: Path, name: str, constants: tuple[tuple[str, np.dtype | int], ...], device: int) -> Callable:
    return _module(path, constants, device).get_function(name)


def cuda_declarations(constants: Mapping[str, np.dtype | int]) -> tuple[str, ...]:
    """Write the C++ declarations of the constants that `cuda_function` takes.

    Parameters
    ----------
    constants : mapping of str to numpy.dtype or int
        Types and integers by name.

    Returns
    -------
    tuple of str
        One declaration for each constant.

    Examples
    --------
    >>> from mpipipe import arrays
    >>> arrays.cuda_declarations({"T": arrays.dtype("float32"), "N": 4})
    ('typedef float T;', 'constexpr int N = 4;')
    """
    return tuple(
        f"typedef {C_TYPES[value.name]} {name};" if isinstance(value, np.dtype) else f"constexpr int {name} = {value};"
        for name, value in constants.items()
    )


def cuda_function(path: Path, name: str, **constants: np.dtype | int) -> Callable:
    """Return an `extern "C"` function of a CUDA source file, compiled once for the current GPU and these constants.

    Parameters
    ----------
    path : Path
        The source file.
    name : str
        Name of the function.
    **constants : numpy.dtype or int
        A dtype declares a type of that name in front of the source (`T=array.dtype`), an integer a `constexpr int`.

    Returns
    -------
    callable
        Takes `(grid, block, arguments)`, and by keyword `shared_mem`, the bytes of dynamic shared memory. `grid` and
        `block` are tuples of integers. `arguments` is a tuple of device arrays and numpy scalars, whose
        dtypes must be the C types of the parameters.

    Raises
    ------
    BackendError
        CuPy is not installed.
    """
    return _function(path, name, tuple(constants.items()), cupy().cuda.runtime.getDevice())


# -- The start of kernels over flat arrays: how wide their words of memory are, and how large their grids -------------


WORD = 16  # bytes: the widest load of one thread
BLOCK = 256  # threads of a block without a reason for another number
MOST_BLOCKS = 1 << 20  # of one grid; the threads of a kernel with more to do come back for it


class Call(NamedTuple):
    """A launch without its arrays.

    function : as `cuda_function` returns it
    numbers : the parameters behind the arrays, in their types
    """

    function: Callable
    grid: tuple[int, ...]
    block: tuple[int, ...]
    numbers: tuple[Any, ...] = ()

    def launch(self, given: tuple[DeviceArray, ...], varying: tuple[Any, ...] = ()) -> None:
        """Launch with these arrays, and with more numbers behind its own."""
        self.function(self.grid, self.block, (*given, *self.numbers, *varying))


def vector_width(first: DeviceArray, *others: DeviceArray, divides: int = 0) -> int:
    """Return how many elements of these arrays can move as one word of memory: a power of two that divides `divides`.

    All addresses must allow it. A word has at most 16 bytes of the widest dtype.
    """
    limits, widest = divides | first.data.ptr // first.itemsize, first.itemsize
    for array in others:
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
    """Return the grid for `count` items, of which one block takes `per_block` at a time."""
    return (min(-(-count // per_block), MOST_BLOCKS),)


def scalar_type(dtype: np.dtype) -> Any:
    """Return the numpy type of the numbers that a kernel for arrays of `dtype` takes: that of its accumulator."""
    return np.float64 if dtype.itemsize == 8 else np.float32


def launch(
    source: Path, name: str, size: int, arguments: tuple[Any, ...], *, V: int, words: int = 2, **dtypes: np.dtype
) -> None:
    """Start a kernel over `size` elements, where a thread takes `words` words of V elements at a time.

    The source is compiled for V and the dtypes, as `cuda_function` says.
    """
    call = over(source, name, size, arguments, V=V, words=words, **dtypes)
    if call is not None:
        call.launch(())


def over(
    source: Path, name: str, size: int, numbers: tuple[Any, ...] = (), *, V: int, words: int = 2, **dtypes: np.dtype
) -> Call | None:
    """Return the call of a kernel over `size` elements, with these numbers behind its arrays; None for 0 elements."""
    if not size:
        return None
    return Call(cuda_function(source, name, **dtypes, V=V), grid(-(-size // V), words * BLOCK), (BLOCK,), numbers)


# -- Launches that are packed once for each combination of shapes, and then want addresses alone ----------------------
#
# What a launch needs besides addresses follows from a few facts of its arrays: shape, strides, dtype, and how far the
# address allows wide words. Checks, the choice of the compiled function, its grid, and numbers in the types of the
# kernel's parameters cost several microseconds of Python; a model asks for the same ones in every micro-batch.


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


# -- Whether a device can be used: a driver, a GPU, and what compiles and multiplies on it ----------------------------
#
# CuPy's wheel brings none of the CUDA toolkit. What is missing would show at the first kernel or the first product, in
# the middle of a step, on the rank that comes to it first. So the first use of a GPU looks for all of it at once.


PROBE = Path(__file__).with_name("fill.cu")  # a short one; common.cuh in front of it includes all headers
NO_DRIVER = "run on a node with an NVIDIA GPU and its driver (nvidia-smi must answer), or use device='cpu'"
NO_GPU = "ask the batch system for GPUs (--gpus-per-node), look at CUDA_VISIBLE_DEVICES, or use device='cpu'"


def check_device(device: str) -> str:
    """Accept a device that exists and on which kernels can be compiled and matrices multiplied.

    The first call for a GPU compiles a kernel of one line and takes cuBLAS's memory.

    Parameters
    ----------
    device : str
        `"cpu"`; `"cuda"`, the current GPU of this process; `"cuda:1"`, which becomes the current one; or `"auto"`, the
        GPU where there is one.

    Returns
    -------
    str
        `"cpu"` or `"cuda"`.

    Raises
    ------
    BackendError
        The device is not there, or parts of CUDA that it needs are missing: a line for each. Nothing is simulated.

    Examples
    --------
    >>> from mpipipe import arrays
    >>> arrays.check_device("cpu")
    'cpu'
    """
    name, colon, number = device.partition(":") if isinstance(device, str) else ("", "", "")
    if name not in ("cpu", "cuda", "auto") or (colon and (name != "cuda" or not number.isdigit())):
        raise BackendError("unknown device", found=repr(device), expected="'cpu', 'cuda', 'cuda:N' or 'auto'")
    if name == "auto":
        name = "cuda" if visible_gpus() else "cpu"  # a CuPy that is too old is no reason to take the CPU in silence
    if name == "cuda":
        _check_gpu()
        if number:
            use_gpu(int(number))
        _check_toolkit()
    return name


def _check_gpu() -> None:
    library = cupy()
    try:
        count = library.cuda.runtime.getDeviceCount()
    except RuntimeError as error:
        raise BackendError(f"device 'cuda' was asked for, and no GPU can be used ({error})", remedy=NO_DRIVER) from None
    if count == 0:
        raise BackendError("device 'cuda' was asked for, and this process sees no GPU", found="0 GPUs", remedy=NO_GPU)


def missing_parts() -> list[str]:
    """List what of the CUDA toolkit is missing or does not work on the current GPU.

    Returns
    -------
    list of str
        A line for each part: what it is, what CuPy said. Empty if nothing is missing.

    Raises
    ------
    BackendError
        CuPy cannot be imported.
    """
    return list(_missing(cupy()))


def _check_toolkit() -> None:
    missing = _looked_for(cupy(), cupy().cuda.runtime.getDevice())
    if missing:
        untried = f". {AMD_UNTRIED}" if cupy().cuda.runtime.is_hip else ""
        raise BackendError(
            f"device 'cuda' was asked for, and parts of the GPU's toolkit that CuPy needs cannot be used{untried}",
            found="".join(f"\n    {line}" for line in missing),
            remedy=_remedy(cupy().cuda.runtime),
        )


def _remedy(runtime: Any) -> str:
    if runtime.is_hip:
        return "load the ROCm module of this site, and set ROCM_HOME where CuPy does not find it"
    major = runtime.runtimeGetVersion() // 1000  # of the runtime within CuPy
    return f"pip install 'cupy-cuda{major}x[ctk]', or load the CUDA {major} module of this site, and no other"


@lru_cache(maxsize=64)
def _looked_for(library: ModuleType, device: int) -> tuple[str, ...]:
    return tuple(_missing(library))


def _missing(library: ModuleType) -> Iterator[str]:
    works, why = _works(lambda: cuda_function(PROBE, "fill", T=np.dtype(np.float32)))
    if not works:
        # where CuPy compiles, it has all it needs, wherever that lies; hipRTC and ROCm's headers come as a whole
        reasons = [] if library.cuda.runtime.is_hip else list(_missing_for_kernels(library))
        yield from reasons or [f"the first kernel does not compile{_versions(library)}: {why}"]
    works, why = _works(lambda: (library.cuda.cublas, library.cuda.device.get_cublas_handle()))
    if not works:
        yield f"the library cuBLAS: {why}"


def _missing_for_kernels(library: ModuleType) -> Iterator[str]:
    works, why = _works(library.cuda.nvrtc.getVersion)
    if not works:
        yield f"the compiler NVRTC: {why}"
    works, why = _works(_headers)
    if not works:
        yield f"the headers of CUDA (cuda_fp16.h): {why}"


def _works(attempt: Callable[[], object]) -> tuple[bool, str]:
    """Return whether an attempt raises nothing, and the first line of what it raised."""
    try:
        attempt()
    except Exception as error:  # what is missing is told in many ways: ImportError, RuntimeError, CompileException
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return False, lines[0] if lines else type(error).__name__
    return True, ""


def _headers() -> str:
    """Return the folder of CUDA's headers, found as CuPy finds it."""
    from cuda import pathfinder

    folder = pathfinder.find_nvidia_header_directory("cudart")
    if folder is None:
        raise BackendError("cuda.pathfinder finds no folder with them")
    return str(folder)


def _versions(library: ModuleType) -> str:
    """Return the versions in words where the compiler is of another CUDA than CuPy; empty if it is not."""
    if library.cuda.runtime.is_hip:
        return ""
    built = library.cuda.runtime.runtimeGetVersion() // 1000
    major, minor = library.cuda.nvrtc.getVersion()
    if major == built:
        return ""
    return f" (two CUDA versions are visible: NVRTC {major}.{minor} was found, and CuPy is built for CUDA {built})"
