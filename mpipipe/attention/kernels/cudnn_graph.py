"""cuDNN's graphs for one call of attention, and a bounded store of their plans."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import warnings
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from mpipipe import arrays
from mpipipe.arrays import Array, DeviceArray, Shape, element_strides
from mpipipe.attention.mask import Slice
from mpipipe.errors import BackendError

KEPT = 256  # plans of one thread
NAMES = ("q", "k", "v", "out", "lse", "dout", "dq", "dk", "dv", "q_lengths", "k_lengths")
UIDS = {name: number for number, name in enumerate(NAMES, 1)}
# Arrays by the names of cuDNN's arguments.
INPUTS = {
    "forward": {"q": "q", "k": "k", "v": "v"},
    "backward": {"q": "q", "k": "k", "v": "v", "o": "out", "dO": "dout"},
}


class GraphRequest(NamedTuple):
    """What a graph is to do."""

    direction: str  # "forward" or "backward"
    dtype: str  # float16 or bfloat16
    # (name, (batch, heads, seq, dim), strides in elements) of each array.
    shapes: tuple[tuple[str, Shape, Shape], ...]
    scale: float
    low: int | None  # row i sees key j if low <= j - i <= high; None is no bound
    high: int | None
    # With a mask of padding and all lengths full: the graph then needs q_lengths and k_lengths.
    padded: bool = False


def build(cudnn: ModuleType, request: GraphRequest, handle: Any = None, **options: object) -> Any:
    """The validated graph of a request; raises what cuDNN raises if it refuses the request.

    `options` go to cudnn.pygraph. sm_version=90 names the GPU's compute capability: without it the
    package opens the CUDA runtime to ask for it, which fails where that library is not on the
    loader's path.
    """
    half = {"float16": cudnn.data_type.HALF, "bfloat16": cudnn.data_type.BFLOAT16}[request.dtype]
    single = cudnn.data_type.FLOAT
    if handle is not None:
        options["handle"] = handle
    graph = cudnn.pygraph(
        io_data_type=half, intermediate_data_type=single, compute_data_type=single, **options
    )
    shapes = {name: (dims, strides) for name, dims, strides in request.shapes}

    def tensor(name: str, dtype: Any = half) -> Any:
        dims, strides = shapes[name]
        return graph.tensor(
            name=name, dim=list(dims), stride=list(strides), data_type=dtype, uid=UIDS[name]
        )

    def result(array: Any, name: str, dtype: Any = half) -> None:
        dims, strides = shapes[name]
        array.set_uid(UIDS[name]).set_output(True).set_dim(list(dims)).set_stride(
            list(strides)
        ).set_data_type(dtype)

    asked: dict[str, Any] = dict(attn_scale=request.scale, name=request.direction)
    if request.low is not None or request.high is not None:
        asked["diagonal_alignment"] = cudnn.diagonal_alignment.TOP_LEFT
    if request.high is not None:
        asked["diagonal_band_right_bound"] = request.high  # hides keys j > i + bound
    if request.low is not None:
        asked["diagonal_band_left_bound"] = 1 - request.low  # hides keys j <= i - bound
    if request.padded:
        for option, name in (("seq_len_q", "q_lengths"), ("seq_len_kv", "k_lengths")):
            shapes[name] = (shapes["q"][0][0], 1, 1, 1), (1, 1, 1, 1)
            asked[option] = tensor(name, cudnn.data_type.INT32)
        asked["use_padding_mask"] = True
    inputs = {argument: tensor(name) for argument, name in INPUTS[request.direction].items()}
    if request.direction == "forward":
        out, lse = graph.sdpa(**inputs, generate_stats=True, **asked)
        result(out, "out")
        result(lse, "lse", single)
    else:
        gradients = graph.sdpa_backward(**inputs, stats=tensor("lse", single), **asked)
        for array, name in zip(gradients, ("dq", "dk", "dv")):
            result(array, name)
    graph.validate()
    return graph


def make_plan(request: GraphRequest) -> GraphPlan:
    """Make a plan for a request on the current GPU; raise what cuDNN raises."""
    cudnn = library()
    graph = build(cudnn, request, handle(), sm_version=arrays.compute_capability())
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    graph.check_support()
    graph.build_plans()
    return GraphPlan(graph, graph.get_workspace_size())


class GraphPlan(NamedTuple):
    """A graph that is ready to run, and the bytes of working memory that it needs."""

    graph: Any
    workspace: int


class _OfThread(threading.local):
    """What a thread keeps: its last plans by library, device and request, and its handles."""

    def __init__(self) -> None:
        self.plan = lru_cache(maxsize=KEPT)(_planned)
        self.handles: dict[tuple, Any] = {}  # keys are library, device and stream


def plan(request: GraphRequest) -> GraphPlan | None:
    """Return the plan for a request; None if cuDNN refuses it, with one warning."""
    return _mine.plan(library(), arrays.cupy().cuda.runtime.getDevice(), request)


def _planned(cudnn: ModuleType, _device: int, request: GraphRequest) -> GraphPlan | None:
    try:
        return make_plan(request)
    except (cudnn.cudnnGraphNotSupportedError, RuntimeError) as error:
        warnings.warn(
            f"cuDNN refuses attention that it should do, CuPy does it: {error} ({request})",
            stacklevel=3,
        )
        return None


_mine = _OfThread()


def run(ready: GraphPlan | None, given: dict[str, DeviceArray]) -> bool:
    """Put a plan on the current stream, False without one; `given` are device arrays by name."""
    if ready is None:
        return False
    arrays.keep_for_graph(ready)
    workspace = None
    if ready.workspace:
        workspace = arrays.empty(ready.workspace, arrays.dtype("uint8"), "cuda")
    pointers = {}
    for name, array in given.items():
        pointers[UIDS[name]] = int(arrays.address(array))
    # Addresses instead of arrays: the package would import torch and convert arrays by DLPack,
    # which waits for the GPU.
    ready.graph.execute(
        pointers, arrays.address(workspace) if ready.workspace else 0, handle=handle()
    )
    return True


# -- cuDNN by NVIDIA's Python package `cudnn`: whether it is installed, and its handles ------------


OLDEST = 91100  # 9.11.0; the attention of 9.10.0 and 9.10.1 gives wrong results
INSTALL = "pip install 'nvidia-cudnn-frontend>=1.27,<1.28' nvidia-cudnn-cu13 (or -cu12)"
# The package opens the CUDA runtime by it, since 1.26.
RUNTIME = "CUDNN_FRONTEND_CUDART_LIB_NAME"


class CudnnVerdict(NamedTuple):
    """Whether cuDNN is usable."""

    usable: bool
    reason: str  # its version in words, or what is missing
    version: tuple[int, ...] = ()  # (major, minor, patch); empty if the library cannot be loaded


def installed() -> CudnnVerdict:
    """Return True if package and library are there, and new enough; needs no GPU."""
    return _looked_up(sys.modules.get("cudnn"))


@lru_cache(maxsize=8)
def _looked_up(_module: ModuleType | None) -> CudnnVerdict:
    if arrays.is_amd():
        return CudnnVerdict(False, "AMD's GPUs have no cuDNN")
    try:
        import cudnn
    except Exception as error:  # a broken installation raises anything
        return CudnnVerdict(
            False, f"the Python package cudnn cannot be imported ({error}); {INSTALL}"
        )
    try:
        version = _version(cudnn)
    except Exception as error:
        return CudnnVerdict(
            False, f"the library libcudnn.so.9 cannot be loaded ({error}); {INSTALL}"
        )
    numbers = version // 10000, version // 100 % 100, version % 100
    text = f"cuDNN {'.'.join(map(str, numbers))}"
    if version < OLDEST:
        reason = f"{text} is too old, its attention has known errors: 9.11.0 or newer is needed"
        return CudnnVerdict(False, reason, numbers)
    return CudnnVerdict(True, text, numbers)


def _version(cudnn: ModuleType) -> int:
    try:
        return cudnn.backend_version()
    except Exception:
        # the package looks only in the interpreter's own site-packages, not in a user's or in those
        # beneath a venv
        found = None
        if find_spec("nvidia"):
            found = find_spec("nvidia.cudnn")
        for place in found.submodule_search_locations or [] if found else []:
            for file in sorted(Path(place).glob("lib/libcudnn.so.*")):
                ctypes.CDLL(str(file), ctypes.RTLD_GLOBAL)
                return cudnn.backend_version()
        raise


def library() -> ModuleType:
    """The module cudnn; call it only if `installed().usable`."""
    import cudnn

    return cudnn


def prepare() -> str:
    """Make the package find the CUDA runtime that CuPy would use; return why it cannot, or "".

    The package opens `libcudart` by name where it asks for a GPU itself, and to fill working
    memory. Of two versions on the loader's path it takes the older one, with a line on stderr. What
    the user has set stays.
    """
    try:
        library_file = arrays.load_cuda_runtime()
    except BackendError as error:
        return str(error)
    os.environ.setdefault(RUNTIME, library_file)
    return ""


def handle() -> Any:
    """CuDNN's handle for the current GPU, stream and thread."""
    key = library(), arrays.cupy().cuda.runtime.getDevice(), arrays.stream().ptr
    if key not in _mine.handles:
        made = library().create_handle()
        library().set_stream(handle=made, stream=key[2])
        _mine.handles[key] = made
    return _mine.handles[key]


# -- What cuDNN's attention does, and how it is asked ----------------------------------------------


TILE = 128  # rows and columns of cuDNN's tiles
# head dimension; the second if values have another one than keys
WIDEST = 256
WIDEST_MIXED = 128
# of backwards, by the major number of the compute capability
HOPPER = 9
WIDEST_BACK = 256
WIDEST_BACK_ELSEWHERE = 128
# the cuDNN from which its backward does dimension 256, and no other > 128
BLACKWELL = 10
WIDE_ON_BLACKWELL = (9, 23)
OLDEST_CAPABILITY = 80
WORD = 16  # bytes: rows begin at multiples of this


def refusal(q: Array, k: Array, v: Array) -> str:
    """Why cuDNN does not do attention of these arrays; empty if it does."""
    dim = q.shape[3]
    width = v.shape[3]
    if not arrays.is_half(q.dtype):
        return f"cuDNN computes attention in float16 and bfloat16, not in {q.dtype}"
    if dim % 8 or width % 8:
        return f"head dimensions {dim} (keys) and {width} (values) are not both multiples of 8"
    widest = WIDEST_MIXED
    if dim == width:
        widest = WIDEST
    if max(dim, width) > widest:
        return f"head dimensions {dim} (keys) and {width} (values) are above {widest}"
    return ""


def widest_backward(capability: int) -> tuple[int, ...]:
    """Return the head dimensions of backwards on a GPU: the largest, and single ones beyond.

    From sdpa_support_surface.h and scaled_dot_product_flash_attention.h of cudnn-frontend 1.27.
    """
    major = capability // 10
    beyond: tuple[int, ...] = ()
    if major == BLACKWELL and installed().version >= WIDE_ON_BLACKWELL:
        beyond = (256,)
    return WIDEST_BACK if major == HOPPER else WIDEST_BACK_ELSEWHERE, *beyond


def fits(x: DeviceArray) -> bool:
    """Whether cuDNN takes an array as it lies in memory."""
    distances = [arrays.address(x) or WORD]
    for stride, extent in zip(x.strides[:3], x.shape):
        if extent > 1:
            distances.append(stride)
    aligned = all(distance > 0 and distance % WORD == 0 for distance in distances)
    return aligned and (x.strides[3] == x.itemsize or x.shape[3] == 1)


def request_for(
    direction: str, given: dict[str, DeviceArray], scale: float, part: Slice
) -> GraphRequest | None:
    """What to ask of cuDNN for one slice; None if cuDNN is known not to do it."""
    seq = given["q"].shape[1]
    keys = given["k"].shape[1]
    back = direction == "backward"
    if (back and seq == keys == 1) or (part.high is not None and part.high < 0):
        return None
    dim = given["q"].shape[3]
    limit, *beyond = widest_backward(arrays.compute_capability()) if back else (WIDEST,)
    if dim > limit and dim not in beyond:
        return None
    if part.low is not None and (part.low > 0 or seq > keys):
        return None
    if part.low is not None and installed().version == (9, 14, 0):  # windows are wrong in 9.14.0
        return None
    # Hopper's backward gives NaN for rows of very negative log-sum-exp and an odd number of half
    # tiles of keys, unless there is a mask of padding (NVIDIA/cudnn-frontend#628, #1072)
    padded = back and (keys % TILE != 0 or seq < TILE)
    shapes = tuple((name, *_described(name, x)) for name, x in given.items())
    dtype = given["q"].dtype.name
    return GraphRequest(direction, dtype, shapes, float(scale), part.low, part.high, padded)


def _described(name: str, x: DeviceArray) -> tuple[Shape, Shape]:
    """(shape, strides) of an array in cuDNN's order of axes: batch, heads, seq, dim."""
    if name == "lse":
        batch, heads, seq = x.shape
        return (batch, heads, seq, 1), (heads * seq, seq, 1, 1)
    (batch, seq, heads, dim), (b, s, h, d) = x.shape, element_strides(x)
    return (batch, heads, seq, dim), (b, h, s, d)


# -- Whether cuDNN attends on this GPU: it is asked for two small plans first ----------------------
#
# A library that is installed may still fail to make a single plan: without the CUDA runtime or its
# own engines, with another CUDA than the driver's, or with two of its versions in one process.


# what every cuDNN does on every GPU that it does at all
ROWS = 128
HEADS = 1
DIM = 64
ALONG = {"forward": ("q", "k", "v", "out", "lse"),
         "backward": ("q", "k", "v", "out", "dout", "lse", "dq", "dk", "dv")}  # fmt: skip


def available() -> CudnnVerdict:
    """Return True if cuDNN attends on the current GPU; tried once in a process."""
    verdict = installed()
    if verdict.usable:
        return _tried(library(), arrays.current_gpu())
    return verdict


@lru_cache(maxsize=64)
def _tried(_library: ModuleType, _device: int) -> CudnnVerdict:
    verdict = installed()
    if arrays.compute_capability() < OLDEST_CAPABILITY:
        reason = (
            f"{verdict.reason} computes attention on compute capability "
            f"{OLDEST_CAPABILITY / 10} and newer"
        )
        return CudnnVerdict(False, reason, verdict.version)
    missing = ""
    try:
        missing = prepare()
        for direction in ALONG:
            make_plan(request(direction))
    except Exception as error:  # the package raises classes of its own, and RuntimeError
        lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        why = f"{verdict.reason} is installed and makes no plan ({lines[0]}"
        reason = f"{why}{'; ' if missing else ''}{missing}); {INSTALL}"
        warnings.warn(f"attention on the GPU is computed by slower kernels: {reason}", stacklevel=2)
        return CudnnVerdict(False, reason, verdict.version)
    return verdict


def request(direction: str) -> GraphRequest:
    """A small causal request, "forward" or "backward"."""
    rows = np.empty((1, ROWS, HEADS, DIM))
    shapes = []
    for name in ALONG[direction]:
        x = rows[..., 0].swapaxes(1, 2) if name == "lse" else rows
        shapes.append((name, *_described(name, x)))
    return GraphRequest(direction, "bfloat16", tuple(shapes), DIM**-0.5, None, 0)
