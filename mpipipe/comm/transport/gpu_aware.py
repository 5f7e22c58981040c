"""Whether MPI may be handed addresses in device memory: by evidence only, since a wrong yes ends in a crash.

Evidence, in this order:

1. MPIPIPE_GPU_DIRECT;
2. the memory kinds of the communicator, which MPI 4.1 names;
3. the library's own answer (MPIX_Query_cuda_support, or MPIX_Query_rocm_support for AMD's GPUs);
4. the variables by which a user turns GPU support on in libraries that do not answer.

Without evidence messages are staged through the host, which works everywhere.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from mpipipe import arrays
from mpipipe.job import GPU_DIRECT, Communicator, RankGroup, group_of, runtime

OVERRIDE = GPU_DIRECT.name


class Platform(NamedTuple):
    """How MPI libraries name a platform of GPUs."""

    kind: str  # among the memory kinds of MPI 4.1
    # functions that answer 1 or 0, the first that the library has is asked: Open MPI's, MPICH's
    questions: tuple[str, ...]
    number: int  # for MPIX_GPU_query_support, in MPICH's mpi.h
    layer: str  # Cray's library beneath MPI that moves device memory
    switches: Mapping[str, str]  # variable that turns support on -> how the library that reads it names itself
    in_ucx: tuple[str, ...]  # names in UCX_TLS, one of which must be there

    @property
    def question(self) -> str:
        return " or ".join(self.questions)


CUDA = Platform(
    "cuda",
    ("MPIX_Query_cuda_support",),
    0,
    "libmpi_gtl_cuda",
    {"MV2_USE_CUDA": "MVAPICH", "MVP_USE_CUDA": "MVAPICH", "PSP_CUDA": "ParaStation|psmpi"},
    ("cuda_copy", "cuda", "all"),
)
ROCM = Platform(
    "rocm",
    ("MPIX_Query_rocm_support", "MPIX_Query_hip_support"),
    2,
    "libmpi_gtl_hsa",
    {"MV2_USE_ROCM": "MVAPICH"},
    ("rocm_copy", "rocm", "all"),
)


class GpuAwareness(NamedTuple):
    """Whether device arrays go to MPI directly, and why or why not."""

    direct: bool
    reason: str


def detect(comm: Communicator, group: RankGroup | None = None) -> GpuAwareness:
    """The verdict for all ranks of `comm`, direct only where each rank says so; collective.

    The ranks agree in `group`, by default in that of `comm`.
    """
    group = group_of(comm) if group is None else group
    what, mine = "asking whether MPI takes device memory", GpuAwareness(False, "the ranks are threads of one process")
    with group.raise_together(what):
        platform = ROCM if arrays.is_amd() else CUDA
        if not runtime.in_process(comm):
            mine = judge(
                runtime.mpi().Get_library_version(),
                os.environ,
                _loaded_libraries(),
                _query(platform),
                _memory_kinds(comm),
                _allocator_is_async(),
                platform,
            )
    return combine(group.gather(what, mine))


def combine(verdicts: Sequence[GpuAwareness]) -> GpuAwareness:
    """One verdict for all ranks, with the reason of the first rank that is against."""
    for rank, verdict in enumerate(verdicts):
        if not verdict.direct:
            everywhere = all(other == verdict for other in verdicts)
            return GpuAwareness(False, verdict.reason if everywhere else f"on rank {rank}: {verdict.reason}")
    return verdicts[0]


def judge(
    library_version: str,
    environment: Mapping[str, str],
    maps_text: str,
    query: int | None,
    kinds: str,
    async_pool: bool,
    platform: Platform = CUDA,
) -> GpuAwareness:
    """Return the verdict of one rank.

    `maps_text` is /proc/self/maps, which names the libraries that are loaded, `query` what the library said about this
    platform, None if it was not asked, `kinds` the value of the info key mpi_memory_alloc_kinds, and `async_pool`
    whether CuPy allocates stream-ordered or managed memory, which MPI cannot map.
    """
    override = environment.get(OVERRIDE)
    GPU_DIRECT.check(override)
    if override == "0":
        return _no(f"{OVERRIDE}=0")
    if async_pool:
        return _no(
            "CuPy's allocator is an asynchronous or managed one, whose memory MPI cannot share "
            "(use cupy.cuda.MemoryPool())"
        )
    if override == "1":
        return _yes(f"{OVERRIDE}=1")
    if any(kind.strip().split(":")[0] == platform.kind for kind in kinds.split(",")):
        evidence = _yes(f"mpi_memory_alloc_kinds is {kinds}")
    else:
        evidence = _of_library(library_version, environment, maps_text, query, platform)
    if evidence.direct and not _ucx_takes(platform, environment):
        left_out = f"UCX_TLS={environment['UCX_TLS']} leaves out {platform.in_ucx[0]}"
        return _no(f"{left_out} (but: {evidence.reason})")
    return evidence


_no, _yes = partial(GpuAwareness, False), partial(GpuAwareness, True)


def _of_library(
    version: str, environment: Mapping[str, str], maps_text: str, query: int | None, platform: Platform
) -> GpuAwareness:
    if query:
        return _trusted(version, environment, platform)
    if "CRAY MPICH" in version.upper():
        return _cray(environment, maps_text, platform)
    if "Intel(R) MPI" in version:
        return _intel(environment, maps_text, platform)
    for variable, library in platform.switches.items():
        if _is_on(environment.get(variable)) and re.search(library, version, re.IGNORECASE):
            return _yes(f"{variable}={environment[variable]}")
    return _no("this MPI does not say that it takes device memory" if query is None else f"{platform.question} says no")


def _trusted(library_version: str, environment: Mapping[str, str], platform: Platform) -> GpuAwareness:
    """Where the library says yes. Open MPI before 5 says how it was built for CUDA, not what is switched on."""
    version = re.search(r"Open MPI v(\d+)", library_version)
    setting = environment.get("OMPI_MCA_opal_cuda_support")
    if platform is CUDA and version and int(version[1]) < 5 and not _is_on(setting):
        if setting:
            return _no(f"OMPI_MCA_opal_cuda_support={setting}")
        if "CONDA_PREFIX" in environment:
            return _no("conda's Open MPI 4 has CUDA switched off unless OMPI_MCA_opal_cuda_support=true")
    return _yes(f"{platform.question} says yes")


def _cray(environment: Mapping[str, str], maps_text: str, platform: Platform) -> GpuAwareness:
    if not _is_on(environment.get("MPICH_GPU_SUPPORT_ENABLED")):
        return _no("Cray MPICH without MPICH_GPU_SUPPORT_ENABLED=1")
    if platform.layer not in maps_text:
        return _no(
            f"Cray MPICH without its GPU transport layer ({platform.layer}): build mpi4py with the "
            "craype-accel module loaded, or preload that library"
        )
    return _yes(f"MPICH_GPU_SUPPORT_ENABLED=1 and {platform.layer} is loaded")


def _intel(environment: Mapping[str, str], maps_text: str, platform: Platform) -> GpuAwareness:
    """Intel MPI takes Level Zero where it finds it, CUDA otherwise, unless it is told which."""
    if platform is not CUDA:
        return _no("Intel MPI does not take the memory of AMD GPUs")
    if not _is_on(environment.get("I_MPI_OFFLOAD")):
        return _no("Intel MPI without I_MPI_OFFLOAD=1 (and I_MPI_OFFLOAD_MODE=cuda)")
    mode = environment.get("I_MPI_OFFLOAD_MODE", "")
    if mode == "cuda" or (not mode and "libcuda.so" in maps_text and "libze_loader" not in maps_text):
        return _yes(f"I_MPI_OFFLOAD={environment['I_MPI_OFFLOAD']}, which found CUDA")
    return _no(f"I_MPI_OFFLOAD for {mode or 'a library that is not CUDA'}: set I_MPI_OFFLOAD_MODE=cuda")


def _ucx_takes(platform: Platform, environment: Mapping[str, str]) -> bool:
    """Whether UCX, if it is what MPI uses, may move device memory."""
    text = environment.get("UCX_TLS", "")
    if not text:
        return True
    names = text.lstrip("^").split(",")
    return text.startswith("^") != any(name.strip() in platform.in_ucx for name in names)


def _is_on(value: str | None) -> bool:
    return (value or "0").strip().lower() not in ("0", "false", "no", "off", "disable")


# -- facts ------------------------------------------------------------------------------------------------------------


def _query(platform: Platform) -> int | None:
    """The library's own answer, found through mpi4py's extension, which is linked to the very library in use."""
    MPI = runtime.mpi()
    library = ctypes.CDLL(MPI.__file__)
    if asks_by_type(MPI.Get_library_version()):
        ask = getattr(library, "MPIX_GPU_query_support", None)
        flag = ctypes.c_int(0)
        return None if ask is None or ask(platform.number, ctypes.byref(flag)) else flag.value
    found = (getattr(library, name, None) for name in platform.questions)
    ask = next((function for function in found if function is not None), None)
    return None if ask is None else ask()


def asks_by_type(library_version: str) -> bool:
    """Whether this is an MPICH before 4, whose MPIX_Query_cuda_support fails an assertion where it has no GPU support.

    Cray MPICH is derived from 3.4, whatever its own version is.
    """
    version = re.search(r"(?<!CRAY )MPICH Version:\s*(\d+)", library_version)
    return "CRAY MPICH" in library_version.upper() or (version is not None and int(version[1]) < 4)


def _memory_kinds(comm: Communicator) -> str:
    info = runtime.mpi().Comm.Get_info(comm)
    try:
        return info.Get("mpi_memory_alloc_kinds") or ""
    finally:
        info.Free()


def _loaded_libraries() -> str:
    try:
        return Path("/proc/self/maps").read_text()
    except OSError:
        return ""


def _allocator_is_async() -> bool:
    """Whether CuPy allocates other memory than that of plain cudaMalloc."""
    if not arrays.device_count():
        return False
    cuda = arrays.cupy().cuda
    allocator = cuda.get_allocator()
    kinds = [getattr(cuda, name, None) for name in ("malloc_async", "malloc_managed")]
    return allocator in kinds or isinstance(getattr(allocator, "__self__", None), cuda.MemoryAsyncPool)
