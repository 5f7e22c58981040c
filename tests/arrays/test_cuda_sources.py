"""Every GPU source compiles for NVIDIA and for AMD, by the compilers that CuPy uses (NVRTC, hipRTC), without a GPU.

hipRTC is that of the machine's ROCm (ROCM_PATH, /opt/rocm), or the one that jobs/rocm_compiler.sh unpacks. Debian's is
that of ROCm 5.2, which has less than ROCm 7, the one of CuPy's wheel: no shuffles with masks, for instance.
"""

import ctypes
import glob
import hashlib
import os
import re
import sysconfig
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import pytest
from gpu_emulator.compiler import cache_folder

import mpipipe
from mpipipe import arrays
from mpipipe.arrays import cuda

PACKAGE = Path(mpipipe.__file__).parent
SOURCES = sorted(str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.cu"))
DTYPES = [np.dtype(np.float32), np.dtype(np.float64), np.dtype(np.float16), arrays.dtype("bfloat16")]
pytestmark = pytest.mark.nvrtc
OPTIONS = [b"--std=c++17", b"-ftz=true", b"--device-as-default-execution-space"]  # CuPy's
# sm_90 is the code of an H100, compute_80 and compute_100 are PTX of A100 and B200. PTX shows what GPUs change in the
# language. The assembler, which takes half of the time, is for what needs most registers and shared memory.
ARCHITECTURES = {  # of the last variant of a source, and of those before
    "float32": ("compute_100", "compute_80"),
    "float64": ("sm_90", "compute_80"),
    "float16": ("compute_80", "compute_100"),
    "bfloat16": ("sm_90", "compute_100"),
}
INT32, INT64 = np.dtype(np.int32), np.dtype(np.int64)


def wide(*kinds) -> int:
    """How many elements make one word of 16 bytes of the widest of these dtypes."""
    return 16 // max(kind.itemsize for kind in kinds)


def words(kind):
    return [{"V": 1}, {"V": wide(kind)}]


def indexed(kind):
    return [{"I": INT32, "V": 1}, {"I": INT64, "V": wide(kind)}]


def of_both(kind):
    return {kind, arrays.accumulator(kind)}


# source: from T to what it is compiled for besides T, so that each choice occurs; none where it is not for T
CONSTANTS = {
    "attention/kernels/forward.cu": lambda kind: [{"O": out, "N": 8} for out in of_both(kind)],
    "attention/kernels/merge.cu": lambda kind: [
        {"O": out, "A": arrays.accumulator(kind), "V": v} for out, v in zip([kind, arrays.accumulator(kind)], (1, 4))
    ],
    "arrays/strided.cu": lambda kind: [
        {"S": kind, "U": kind, "I": INT32, "V": 1},
        {"S": kind, "U": kind, "I": INT32, "V": wide(kind)},
        {"S": kind, "U": arrays.accumulator(kind), "I": INT64, "V": wide(kind, arrays.accumulator(kind))},
    ],
    "nn/kernels/cuda/clipping.cu": lambda kind: [] if arrays.is_half(kind) else words(kind),
    "nn/kernels/cuda/cross_entropy.cu": indexed,
    "nn/kernels/cuda/dropout.cu": words,
    "nn/kernels/cuda/elementwise.cu": words,
    "nn/kernels/cuda/embed.cu": indexed,
    "nn/kernels/cuda/linear.cu": words,
    # rows kept in registers, and longer ones
    "nn/kernels/cuda/norm.cu": lambda kind: [
        {"G": 32, "K": 1, "V": 1},
        {"G": 64, "K": 4, "V": wide(kind)} if arrays.is_half(kind) else {"G": 512, "K": 0, "V": wide(kind)},
    ],
    "nn/kernels/cuda/optimizer.cu": lambda kind: [
        {"H": copy, "V": v} for copy in DTYPES if arrays.accumulator(copy) == kind for v in (1, wide(kind))
    ],
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
    """(library, folder of the CUDA headers), or what is missing."""
    packages = f"{sysconfig.get_path('purelib')}/nvidia"
    toolkits = [os.environ.get("CUDA_PATH", ""), os.environ.get("CUDA_HOME", ""), "/usr/local/cuda"]
    toolkits = [toolkit for toolkit in toolkits if toolkit]
    libraries = [f"{packages}/{folder}/lib/libnvrtc.so.1[0-9]" for folder in ("cu1[2-9]", "cuda_nvrtc")]
    library = first_existing(*libraries, *(f"{toolkit}/lib64/libnvrtc.so" for toolkit in toolkits))
    folders = [f"{packages}/cu1[2-9]", f"{packages}/cuda_runtime", *toolkits]
    header = first_existing(*(f"{folder}/include/cuda_fp16.h" for folder in folders))
    if library is None:
        return "no libnvrtc: pip install nvidia-cuda-nvrtc"
    if header is None:
        return "no cuda_fp16.h: pip install nvidia-cuda-runtime"
    return ctypes.CDLL(library), str(Path(header).parent)


def once(files: list[str], options: list[bytes], code: str, compile_it) -> str:
    """What a compiler says against a source; "" without asking it where it took the same before, on this machine.

    `files` are the compiler's: where one has another size or date, it is another compiler.
    """
    facts = [(name, os.stat(name).st_size, os.stat(name).st_mtime_ns) for name in files]
    key = hashlib.sha256(repr((facts, options, code)).encode()).hexdigest()[:24]
    taken = cache_folder() / f"{key}.compiles"
    if taken.exists():
        return ""
    said = compile_it(options, code)
    if not said:
        taken.touch()
    return said


def compile_for_gpu(code: str, architecture: str = "sm_90") -> str:
    """What NVRTC says against a source, "" where it compiles."""
    found = nvrtc()
    if isinstance(found, str):
        pytest.skip(found)
    library, include = found
    options = [*OPTIONS, b"--gpu-architecture=" + architecture.encode(), b"-I" + include.encode()]
    return once([library._name, f"{include}/cuda_fp16.h"], options, code, partial(compiled_by, "nvrtc", library))


def compiled_by(name: str, library, options: list[bytes], code: str) -> str:
    """What "nvrtc" or "hiprtc" says against a source; both have the same functions under their names."""

    def call(function: str, *arguments) -> int:
        return getattr(library, f"{name}{function}")(*arguments)

    program, size = ctypes.c_void_p(), ctypes.c_size_t(1)
    call("CreateProgram", ctypes.byref(program), code.encode(), b"kernel.cu", 0, None, None)
    try:
        status = call("CompileProgram", program, len(options), (ctypes.c_char_p * len(options))(*options))
        call("GetProgramLogSize", program, ctypes.byref(size))
        log = ctypes.create_string_buffer(max(1, size.value))
        call("GetProgramLog", program, log)
        if name == "hiprtc":
            call("GetCodeSize", program, ctypes.byref(size))
    finally:
        call("DestroyProgram", ctypes.byref(program))
    nothing = name == "hiprtc" and not size.value
    return f"{name} status {status}\n{log.value.decode()}" if status or nothing else ""


def whole_source(source: str, constants: dict) -> str:
    return "\n".join([cuda.COMMON.read_text(), *cuda.cuda_declarations(constants), (PACKAGE / source).read_text()])


@pytest.mark.long
@pytest.mark.parametrize("kind", DTYPES, ids=lambda kind: kind.name)
@pytest.mark.parametrize("source", SOURCES)
def test_compiles_for_gpus(source, kind):
    every, (last, before) = variants(source, kind), ARCHITECTURES[kind.name]
    for constants in every:
        said = compile_for_gpu(whole_source(source, constants), last if constants is every[-1] else before)
        assert said == "", (constants, "in the table of this test")


AMD_OPTIONS = [b"--std=c++17", b"-fcuda-flush-denormals-to-zero", b"--offload-arch=gfx90a"]  # CuPy's, for an MI250X
ON_NVIDIA_ONLY = re.compile(r"__(shfl\w*_sync|syncwarp|ballot_sync|stcs|half|nv_bfloat16)\b|warpSize|\basm\b")


@lru_cache(maxsize=1)
def hiprtc():
    """The library that holds hipRTC; a reason where there is none."""
    unpacked = PACKAGE.parent / ".rocm/usr/lib/x86_64-linux-gnu"
    toolkits = [os.environ.get("ROCM_PATH", ""), "/opt/rocm"]
    library = first_existing(
        *(f"{toolkit}/lib/libhiprtc.so" for toolkit in toolkits if toolkit),
        f"{unpacked}/libamdhip64.so.5",
        "/usr/lib/x86_64-linux-gnu/libhiprtc.so*",
        "/usr/lib/x86_64-linux-gnu/libamdhip64.so*",
    )
    if library is None:
        return "no hipRTC: bash jobs/rocm_compiler.sh"
    try:  # what it needs lies beside it, where the loader does not look
        for name in ("hsakmt.so.1", "hsa-runtime64.so.1", "amd_comgr.so.2", "hiprtc-builtins.so.5"):
            if (Path(library).parent / f"lib{name}").exists():
                ctypes.CDLL(str(Path(library).parent / f"lib{name}"))
        return ctypes.CDLL(library)
    except OSError as error:
        return f"hipRTC cannot be loaded: {error}"


def compile_for_amd(code: str) -> str:
    """What hipRTC says against a source, "" where it compiles for gfx90a."""
    library = hiprtc()
    if isinstance(library, str):
        pytest.skip(library)
    return once([library._name], AMD_OPTIONS, code, partial(compiled_by, "hiprtc", library))


@pytest.mark.long
@pytest.mark.parametrize("kind", DTYPES, ids=lambda kind: kind.name)
@pytest.mark.parametrize("source", SOURCES)
def test_compiles_for_an_amd_gpu(source, kind):
    for constants in variants(source, kind):
        assert compile_for_amd(whole_source(source, constants)) == "", (constants, "in the table of this test")


@pytest.mark.parametrize("source", SOURCES)
def test_what_platforms_say_differently_is_said_in_common_cuh(source):
    assert not ON_NVIDIA_ONLY.search((PACKAGE / source).read_text())


def test_a_wrong_source_does_not_compile():
    assert "undefined" in compile_for_gpu("__global__ void f(float* x) { x[0] = nothing; }")


def test_the_table_names_sources_that_exist():
    assert set(CONSTANTS) <= set(SOURCES)
