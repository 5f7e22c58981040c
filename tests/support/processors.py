"""Processors as which this one can compute: `python tests/support/processors.py` prints a line for each.

    name kernels VARIABLE=value ...     the kernels that OpenBLAS then takes; "-" where numpy has another BLAS

Each has the kernels that OpenBLAS has for it, and those loops of numpy that it can run. OpenBLAS takes the kernels of
OPENBLAS_CORETYPE whether the processor has their instructions or not, so those that it lacks are left out. A build may
hold fewer kernels than there are processors: two names may give one architecture.
"""

import os
import subprocess
import sys

NEEDS = {"Prescott": (), "Haswell": ("X86_V3", "AVX2"), "Zen": ("X86_V3", "AVX2"), "SkylakeX": ("X86_V4", "AVX512_SKX")}
NEWER = {  # beginnings of the names of instructions that came after it
    "Prescott": ("",),
    "Haswell": ("AVX512", "X86_V4"),
    "Zen": ("AVX512", "X86_V4"),
    "SkylakeX": (),
    "any": ("",),
}


def features() -> dict[str, bool]:
    """Instructions for which numpy has loops of their own, and whether it takes them here and now."""
    try:
        from numpy._core._multiarray_umath import __cpu_dispatch__, __cpu_features__
    except ImportError:  # names of numpy 1
        from numpy.core._multiarray_umath import __cpu_dispatch__, __cpu_features__
    return {name: __cpu_features__[name] for name in __cpu_dispatch__}


def architectures() -> set[str]:
    """Kernels that the OpenBLAS of this process takes; empty where numpy has another BLAS."""
    import numpy as np
    from threadpoolctl import threadpool_info

    np.ones((2, 2)) @ np.ones((2, 2))
    return {library["architecture"] for library in threadpool_info() if library["internal_api"] == "openblas"}


def without(name: str, here: set[str]) -> list[str]:
    """The setting that leaves out what this processor has and that one has not, where there is something."""
    newer = sorted(feature for feature in here if feature.startswith(NEWER[name]))
    return [f"NPY_DISABLE_CPU_FEATURES={','.join(newer)}"] if newer else []


def main():
    here = {name for name, taken in features().items() if taken}
    if not architectures():
        print("any", "-", *without("any", here))
        return
    for name, one_of in NEEDS.items():
        if not one_of or here & set(one_of):
            told = {**os.environ, "OPENBLAS_CORETYPE": name}
            ask = [sys.executable, __file__, "architecture"]
            found = subprocess.run(ask, env=told, stdout=subprocess.PIPE, text=True).stdout.strip()
            print(name, found or "failed", f"OPENBLAS_CORETYPE={name}", *without(name, here))


if __name__ == "__main__":
    print(*sorted(architectures())) if sys.argv[1:] == ["architecture"] else main()
