"""CUDA C++ functions of this package, compiled when they are first called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from mpipipe.arrays.devices import cupy

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
