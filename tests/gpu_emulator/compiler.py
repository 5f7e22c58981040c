"""cupy.RawModule: CUDA C++ compiled by g++ for the host, with the types of all arguments checked."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import mmap
import os
import re
import shutil
import subprocess
import tempfile
import threading
from functools import cache
from pathlib import Path

import numpy as np

from . import toolkit
from .array import ndarray
from .machine import CUDARuntimeError, HiddenAccess, machine
from .streams import get_current_stream

HERE = Path(__file__).parent
CHECKS = "alignment,null,bounds,shift,integer-divide-by-zero,signed-integer-overflow"
FLAGS = ["-std=c++17", "-O1", "-g0", "-w", "-fPIC", "-ffp-contract=off", "-fno-strict-aliasing", "-U_FORTIFY_SOURCE",
         f"-fsanitize={CHECKS}", "-fvisibility-inlines-hidden"]  # fmt: skip
COMMENTS = re.compile(r'//[^\n]*|/\*.*?\*/|("(?:\\.|[^"\\])*")', re.S)
DYNAMIC = re.compile(r"extern\s+__shared__\s+((?:alignas|__align__)\s*\([^)]*\)\s*)?([\w:<> ]+?)\s+(\w+)\s*\[\s*\]\s*;")
BOUNDS = r"__launch_bounds__\s*\([^()]*(?:\([^()]*\)[^()]*)*\)\s*"
KERNEL = re.compile(rf'extern\s*"C"\s+(?:__global__\s+|void\s+|{BOUNDS})+(\w+)\s*\(')
SHARED = re.compile(r"\b__shared__\s+([^;]+);")
OPTIONS = {"--std=c++17", "-std=c++17"}
DTYPES = {"h___half": "float16", "h___nv_bfloat16": "bfloat16", "b1": "bool"}


STACKS = 1024 * 128 << 10  # bytes: one for each thread of a block


@cache
def _stacks() -> ctypes.Array:
    """The stacks on which the threads of kernels run."""
    memory = mmap.mmap(-1, STACKS, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0))
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    return (ctypes.c_char * STACKS).from_buffer(memory)


_loading = threading.Lock()  # a library tells signatures in memory of its own


def compiler() -> str | None:
    return shutil.which("g++")


@cache
def without_comments(code: str) -> str:
    """The same code on the same lines."""
    return COMMENTS.sub(lambda found: found[1] or " " + "\n" * found[0].count("\n"), code)


def _declared(text: str) -> list[str]:
    """The names in `float a[4], b[N + 1]`: each stands before a bracket, a comma or the end, outside of brackets."""
    flat, inside = [], ""
    for letter in text:
        if letter in "([{" or (letter == "<" and "[" not in inside):
            inside += letter
            flat.append(" ")
        elif letter in ")]}" or (letter == ">" and inside.endswith("<")):
            inside = inside[:-1]
        elif not inside:
            flat.append(letter)
    return [re.findall(r"\w+", part)[-1] for part in "".join(flat).split(",")]


def on_host(code: str) -> tuple[str, list[str]]:
    """The source with shared memory taken from the emulator, and the names of its kernels."""
    code = without_comments(code)
    number = 0

    def static(found):
        nonlocal number
        number += 1
        names = "".join(f" auto& {name} = shared_{number}.{name};" for name in _declared(found[1]))
        lines = "\n" * found[0].count("\n")
        return (
            f"struct Shared_{number} {{ {found[1].strip()}; }}; static char key_{number}; auto& shared_{number} = "
            f"*(Shared_{number}*)emulated::place(&key_{number}, sizeof(Shared_{number}), alignof(Shared_{number}));"
            f"{names}{lines}"
        ).replace("\n", " ") + lines

    code = DYNAMIC.sub(lambda found: f"auto* const {found[3]} = ({found[2]}*)emulated::dynamic();", code)
    code = SHARED.sub(static, code)
    return code, KERNEL.findall(code)


def cache_folder() -> Path:
    folder = Path(tempfile.gettempdir(), f"mpipipe-emulator-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to somebody else")
    return folder


@cache
def _environment() -> str:
    headers = [path.read_text() for path in sorted([*HERE.glob("*.h"), *(HERE / "include").iterdir()])]
    version = subprocess.run([compiler() or "g++", "--version"], capture_output=True, text=True, check=True).stdout
    return "\n".join([version, *FLAGS, *headers])


@cache
def compiled(code: str, amd: bool = False) -> tuple[Path, list[str]]:
    """The shared library of a source, compiled once for all processes, and the names of its kernels."""
    text, names = on_host(code)
    platform = "#define EMULATED_AMD\n" if amd else ""
    text = f'{platform}#include "cuda_on_host.h"\n#line 1 "kernel"\n{text}\n' + "".join(
        f"EMULATED_ENTRY({name})\n" for name in names
    )
    return library_of(text), names


def library_of(text: str) -> Path:
    """The shared library of a C++ source, compiled once for all processes."""
    key = hashlib.sha256(f"{_environment()}\n{text}".encode()).hexdigest()[:24]
    library = cache_folder() / f"{key}.so"
    if library.exists():
        return library
    with open(library.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            source, part = library.with_suffix(".cpp"), library.with_suffix(".part")
            source.write_text(text)
            build(source, part)
            part.rename(library)
    return library


def build(source: Path, target: Path):
    """Compile with the compiler's checks, and link without their library: cuda_on_host.h takes the reports."""
    unit = target.with_suffix(".o")
    include = [f"-I{HERE}", f"-I{HERE / 'include'}"]
    command = [compiler() or "g++", *FLAGS, *include, "-c", str(source), "-o", str(unit)]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode == 0:
        link = [command[0], "-shared", "-Wl,-Bsymbolic", "-Wl,--no-undefined", str(unit), "-o", str(target)]
        result = subprocess.run(link, capture_output=True, text=True)
    unit.unlink(missing_ok=True)
    if result.returncode:
        raise toolkit.CompileException(f"g++ refuses this source (kept in {source}):\n{result.stderr[:8000]}")


class RawModule:
    """A source and its kernels."""

    def __init__(self, code=None, *, path=None, options=(), backend="nvrtc", translate_cucomplex=False,
                 enable_cooperative_groups=False, name_expressions=None, jitify=None):  # fmt: skip
        if not isinstance(code, str) or backend != "nvrtc" or not set(options) <= OPTIONS or name_expressions:
            raise HiddenAccess(f"RawModule: only source text for nvrtc with {OPTIONS} is used here")
        self._code, self._library, self._names = code, None, []

    def compile(self, log_stream=None):
        toolkit.compile_check()
        with _loading:
            if self._library is None:
                path, self._names = compiled(self._code, machine().amd)
                self._library = ctypes.CDLL(str(path))

    def get_function(self, name: str) -> Function:
        self.compile()
        with _loading:
            if name not in self._names:
                raise CUDARuntimeError(f'CUDA_ERROR_NOT_FOUND: no extern "C" kernel {name!r} among {self._names}')
            return Function(self._library, name, self._code)


@cache
def _fits(kind: str, dtype: np.dtype) -> bool:
    """Whether elements of this dtype are the C type `kind` (f4, i8, u1, h___half, ...)."""
    if kind in DTYPES:
        return dtype.name == DTYPES[kind] or (kind == "b1" and dtype == np.uint8)
    if kind == "u1" and dtype == np.bool_:
        return True
    return dtype.name not in ("float16", "bfloat16") and f"{dtype.kind}{dtype.itemsize}" == kind


class Function:
    """A kernel: call it with (grid, block, arguments, shared_mem=bytes)."""

    def __init__(self, library, name: str, code: str):
        self.name = name
        signature, self._launch = library[f"emulated_signature_{name}"], library[f"emulated_launch_{name}"]
        signature.restype = self._launch.restype = ctypes.c_char_p
        self._launch.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_ulonglong,
                                  ctypes.c_void_p]  # fmt: skip
        self.signature = signature().decode().split()
        self._keep = library
        self.max_dynamic_shared_size_bytes = 48 << 10
        head = re.search(rf"__launch_bounds__\s*\(\s*(\d+)[^)]*\)\s*(?:void\s+)?{name}\s*\(", without_comments(code))
        self.max_threads_per_block = int(head[1]) if head else 1024

    def __call__(self, grid, block, args, *, shared_mem=0, **unknown):
        if unknown:
            raise HiddenAccess(f"kernel options {list(unknown)} are not used here")
        shape = self._shape(grid, block, shared_mem)
        home, queue = machine(), get_current_stream().queue
        pointers, cells = self._arguments(home, args)
        seed = home.random.getrandbits(63)

        def run(cells=cells):  # pointers lead into them
            error = self._launch(pointers, shape, shared_mem, seed, _stacks())
            if error:
                raise CUDARuntimeError(error.decode(errors="replace"))

        home.launch(queue, self.name, run)

    def _shape(self, grid, block, shared_mem):
        if not (isinstance(grid, tuple) and isinstance(block, tuple)):
            raise TypeError("grid and block must be tuples")
        shape = [*grid, *[1] * (3 - len(grid)), *block, *[1] * (3 - len(block))]
        if not all(isinstance(extent, (int, np.integer)) for extent in shape) or len(shape) != 6:
            raise TypeError(f"grid {grid} and block {block} must be up to 3 integers each")
        limits = (2**31 - 1, 65535, 65535, 1024, 1024, 64)
        threads = shape[3] * shape[4] * shape[5]
        if not all(1 <= extent <= most for extent, most in zip(shape, limits)) or threads > 1024:
            raise CUDARuntimeError(f"CUDA_ERROR_INVALID_VALUE: {self.name} with grid {grid}, block {block}")
        if threads > self.max_threads_per_block:
            raise CUDARuntimeError(
                f"CUDA_ERROR_INVALID_VALUE: {self.name} takes {self.max_threads_per_block} threads, not {threads}"
            )
        if not 0 <= shared_mem <= self.max_dynamic_shared_size_bytes:
            raise CUDARuntimeError(
                f"CUDA_ERROR_INVALID_VALUE: {self.name} with {shared_mem} bytes of dynamic shared memory, more than "
                f"max_dynamic_shared_size_bytes = {self.max_dynamic_shared_size_bytes}"
            )
        return (ctypes.c_uint * 6)(*map(int, shape))

    def _arguments(self, home, args):
        if len(args) != len(self.signature):
            raise TypeError(f"{self.name} takes {len(self.signature)} arguments, not {len(args)}")
        cells = [self._cell(home, n, value, kind) for n, (value, kind) in enumerate(zip(args, self.signature))]
        pointers = (ctypes.c_void_p * max(len(cells), 1))(*[ctypes.addressof(cell) for cell in cells])
        return pointers, cells

    def _cell(self, home, n: int, value, kind: str):
        what = f"argument {n} of {self.name}, {kind}"
        if kind.startswith("*"):
            return ctypes.c_void_p(self._pointer(home, what, value, kind[1:]))
        if not isinstance(value, np.generic):
            raise TypeError(f"{what}: a numpy scalar of that type is needed, not {type(value).__name__}")
        if kind.startswith("V"):
            fits = value.dtype.kind == "V" and value.nbytes == int(kind[1:])
        else:
            fits = _fits(kind, value.dtype)
        if not fits:
            raise TypeError(f"{what}: a {value.dtype.name} was given")
        return (ctypes.c_ubyte * max(value.nbytes, 8)).from_buffer_copy(value.tobytes().ljust(8, b"\0"))

    def _pointer(self, home, what: str, value, kind: str) -> int:
        if value is None:
            return 0
        if not isinstance(value, ndarray):
            raise TypeError(f"{what}: a device array is needed, not {type(value).__name__}")
        if kind != "void" and not kind.startswith(("V", "*")) and not _fits(kind, value.dtype):
            raise TypeError(f"{what}: an array of {value.dtype.name} was given")
        if value.size and value.data.mem.home is not home:
            raise CUDARuntimeError(f"{what}: memory of an emulated device that is gone")
        if value.size and value.data.device_id != getattr(home.local, "device", 0):
            raise CUDARuntimeError(f"cudaErrorIllegalAddress: {what}: memory of device {value.data.device_id}")
        return value.data.ptr
