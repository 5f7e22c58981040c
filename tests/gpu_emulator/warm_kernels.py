"""python -m gpu_emulator.warm_kernels [PROCESSES]: compile the package's kernels into CuPy's cache, in processes.

Tests and measurements need some two hundred compiled sources; one process compiles a few in a second. What is compiled
is what tests/arrays/test_cuda_sources.py compiles. CuPy keeps the results below CUPY_CACHE_DIR (~/.cupy/kernel_cache).
"""

from __future__ import annotations

import sys
from concurrent.futures import ProcessPoolExecutor
from importlib.util import module_from_spec, spec_from_file_location
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter

TESTS = Path(__file__).resolve().parents[1]


def sources():
    """(path in the package, constants) of each module to compile."""
    spec = spec_from_file_location("cuda_sources", TESTS / "arrays" / "test_cuda_sources.py")
    table = module_from_spec(spec)
    spec.loader.exec_module(table)
    return [
        (str(table.PACKAGE / source), tuple(constants.items()))
        for source in table.SOURCES
        for kind in table.DTYPES
        for constants in table.variants(source, kind)
    ]


def compile_one(work) -> str:
    """What the compiler says against one module, "" where it compiles."""
    from mpipipe import arrays
    from mpipipe.arrays import cuda

    path, constants = work
    try:
        cuda._module(Path(path), constants, arrays.current_gpu()).compile()
    except Exception as error:
        return f"{path} {dict(constants)}: {type(error).__name__}: {error}"
    return ""


def main(processes: int) -> int:
    start, work = perf_counter(), sources()
    if processes == 1:
        said = list(map(compile_one, work))
    else:
        with ProcessPoolExecutor(processes, get_context("spawn")) as pool:  # CUDA does not survive a fork
            said = list(pool.map(compile_one, work, chunksize=2))
    failed = [text for text in said if text]
    print("\n".join([*failed, f"{len(work) - len(failed)} of {len(work)} sources compiled by {processes} processes in "
                     f"{perf_counter() - start:.1f} s"]))  # fmt: skip
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 1))
