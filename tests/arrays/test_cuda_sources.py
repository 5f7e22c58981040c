"""Every CUDA source compiles for an NVIDIA GPU, with the compiler that CuPy uses and without a GPU."""

from __future__ import annotations

import ctypes
import glob
import os
import sysconfig
from functools import lru_cache
from itertools import product
from pathlib import Path

import numpy as np
import pytest

import mpipipe
from mpipipe import arrays
from mpipipe.arrays import cuda

PACKAGE = Path(mpipipe.__file__).parent
SOURCES = sorted(str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.cu"))
DTYPES = [np.dtype(np.float32), np.dtype(np.float64), np.dtype(np.float16), arrays.dtype("bfloat16")]
pytestmark = pytest.mark.nvrtc
OPTIONS = [b"--std=c++17", b"-ftz=true", b"--device-as-default-execution-space"]  # CuPy's
ARCHITECTURES = ["sm_80", "sm_90", "sm_100"]  # of A100, H100, B200
FLOAT32, INT32, INT64 = (np.dtype(kind) for kind in (np.float32, np.int32, np.int64))


def wide(*kinds) -> int:
    """How many elements make one word of 16 bytes of the widest of these dtypes."""
    return 16 // max(kind.itemsize for kind in kinds)


def words(kind):
    return [{"V": 1}, {"V": wide(kind)}]


def with_words(**choices):
    """Each combination of these constants, with and without words."""
    return lambda kind: [{**dict(zip(choices, picked)), "V": v}
                         for picked in product(*choices.values()) for v in (1, wide(kind))]  # fmt: skip


def of_both(kind):
    return {kind, arrays.accumulator(kind)}


# source: from T to all that it is compiled for besides T; none where it is not for T
CONSTANTS = {
    "attention/kernels/forward.cu": lambda kind: [{"O": out, "N": 8} for out in of_both(kind)],
    "attention/kernels/merge.cu": lambda kind: [
        {"O": out, "A": arrays.accumulator(kind), "V": v} for out in of_both(kind) for v in (1, 4)
    ],
    "arrays/strided.cu": lambda kind: [
        {"S": kind, "U": out, "I": index, "V": v}
        for out in of_both(kind)
        for index in (INT32, INT64)
        for v in (1, wide(kind, out))
    ],
    "nn/kernels/cuda/cast.cu": lambda kind: [{"S": source, "V": wide(source, kind)} for source in DTYPES],
    "nn/kernels/cuda/cross_entropy.cu": with_words(I=(INT32, INT64)),
    "nn/kernels/cuda/dropout.cu": words,
    "nn/kernels/cuda/elementwise.cu": words,
    "nn/kernels/cuda/embed.cu": with_words(I=(INT32, INT64)),
    "nn/kernels/cuda/linear.cu": words,
    "nn/kernels/cuda/norm.cu": lambda kind: [
        {"G": threads, "K": kept, "V": v}
        for threads, kept in ((32, 1), (64, 4), (256, 4), (512, 0))
        for v in (1, wide(kind))
    ],
    "nn/kernels/cuda/optimizer.cu": lambda kind: [] if arrays.is_half(kind) else words(kind),
    "nn/kernels/cuda/rope.cu": words,
    "nn/kernels/cuda/squared_error.cu": lambda kind: [
        {"S": target, "V": wide(kind, target)} for target in of_both(kind)
    ],
    "nn/kernels/cuda/squares.cu": words,
    "nn/kernels/cuda/sums.cu": words,
    "nn/kernels/cuda/swiglu.cu": words,
}


def variants(source: str, kind: np.dtype) -> list[dict]:
    """The constants of each way to compile a source for one dtype."""
    return [{"T": kind, **more} for more in CONSTANTS.get(source, lambda kind: [{}])(kind)]


def first_existing(*patterns) -> str | None:
    return next((found for pattern in patterns for found in sorted(glob.glob(pattern))), None)


@lru_cache(maxsize=1)
def nvrtc():
    """(library, folder of the CUDA headers); skips where one is missing."""
    packages = sysconfig.get_path("purelib")
    toolkits = [os.environ.get("CUDA_PATH", ""), os.environ.get("CUDA_HOME", ""), "/usr/local/cuda"]
    library = first_existing(
        f"{packages}/nvidia/cu1[2-9]/lib/libnvrtc.so.1[0-9]",
        f"{packages}/nvidia/cuda_nvrtc/lib/libnvrtc.so.1[0-9]",
        *(f"{toolkit}/lib64/libnvrtc.so" for toolkit in toolkits if toolkit),
    )
    header = first_existing(
        f"{packages}/nvidia/cu1[2-9]/include/cuda_fp16.h",
        f"{packages}/nvidia/cuda_runtime/include/cuda_fp16.h",
        *(f"{toolkit}/include/cuda_fp16.h" for toolkit in toolkits if toolkit),
    )
    if library is None:
        return "no libnvrtc: pip install nvidia-cuda-nvrtc"
    if header is None:
        return "no cuda_fp16.h: pip install nvidia-cuda-runtime"
    return ctypes.CDLL(library), str(Path(header).parent)


def compile_for_gpu(code: str, architecture: str = "sm_90") -> str:
    """What NVRTC says against a source, "" where it compiles."""
    found = nvrtc()
    if isinstance(found, str):
        pytest.skip(found)
    library, include = found
    program = ctypes.c_void_p()
    library.nvrtcCreateProgram(ctypes.byref(program), code.encode(), b"kernel.cu", 0, None, None)
    options = [*OPTIONS, b"--gpu-architecture=" + architecture.encode(), b"-I" + include.encode()]
    try:
        status = library.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
        size = ctypes.c_size_t()
        library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        library.nvrtcGetProgramLog(program, log)
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))
    return f"nvrtc status {status}\n{log.value.decode()}" if status else ""


def whole_source(source: str, constants: dict) -> str:
    return "\n".join([cuda.COMMON.read_text(), *arrays.cuda_declarations(constants), (PACKAGE / source).read_text()])


@pytest.mark.parametrize("kind", DTYPES, ids=lambda kind: kind.name)
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_compiles_for_a_gpu(source, kind, architecture):
    for constants in variants(source, kind):
        code = whole_source(source, constants)
        assert compile_for_gpu(code, architecture) == "", (constants, "in the table of this test")


def test_a_wrong_source_does_not_compile():
    assert "undefined" in compile_for_gpu("__global__ void f(float* x) { x[0] = nothing; }")


def test_the_table_names_sources_that_exist():
    assert set(CONSTANTS) <= set(SOURCES)
