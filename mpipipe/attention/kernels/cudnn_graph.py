"""cuDNN's graphs for one call of attention: requests for them in plain values, and a bounded store of their plans."""

from __future__ import annotations

import threading
import warnings
from collections import OrderedDict
from typing import Any, NamedTuple

from mpipipe import arrays
from mpipipe.arrays import DeviceArray
from mpipipe.attention.kernels import cudnn_library

KEPT = 256  # plans of one thread
UIDS = {name: number for number, name in enumerate(
    ("q", "k", "v", "out", "lse", "dout", "dq", "dk", "dv", "q_lengths", "k_lengths"), 1
)}  # fmt: skip
INPUTS = {"forward": ("q", "k", "v"), "backward": ("q", "k", "v", "out", "dout")}


class Request(NamedTuple):
    """What a graph is to do.

    direction : "forward" or "backward"
    dtype : float16 or bfloat16
    shapes : (name, (batch, heads, seq, dim), strides in elements of these axes) of each array, as cuDNN counts axes
    low, high : row i sees key j if low <= j - i <= high; None is no bound
    padded : with a mask of padding and all lengths full; the graph then needs q_lengths and k_lengths
    deterministic : for a backward, whether repeated calls must give the same bits
    """

    direction: str
    dtype: str
    shapes: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]
    scale: float
    low: int | None
    high: int | None
    padded: bool = False
    deterministic: bool = False


def build(cudnn: Any, request: Request, handle: Any = None, **options: Any) -> Any:
    """The validated graph of a request; raises what cuDNN raises if it refuses the request.

    `options` go to cudnn.pygraph. sm_version=90 names the GPU's compute capability: without it the package opens the
    CUDA runtime to ask for it, which fails where that library is not on the loader's path.
    """
    half = {"float16": cudnn.data_type.HALF, "bfloat16": cudnn.data_type.BFLOAT16}[request.dtype]
    single = cudnn.data_type.FLOAT
    if handle is not None:
        options["handle"] = handle
    graph = cudnn.pygraph(io_data_type=half, intermediate_data_type=single, compute_data_type=single, **options)
    shapes = {name: (dims, strides) for name, dims, strides in request.shapes}

    def tensor(name: str, dtype: Any = half) -> Any:
        dims, strides = shapes[name]
        return graph.tensor(name=name, dim=list(dims), stride=list(strides), data_type=dtype, uid=UIDS[name])

    def result(array: Any, name: str, dtype: Any = half) -> None:
        dims, strides = shapes[name]
        array.set_uid(UIDS[name]).set_output(True).set_dim(list(dims)).set_stride(list(strides)).set_data_type(dtype)

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
    inputs = {name: tensor(name) for name in INPUTS[request.direction]}
    if request.direction == "forward":
        out, lse = graph.sdpa(**inputs, generate_stats=True, **asked)
        result(out, "out")
        result(lse, "lse", single)
    else:
        given = dict(q=inputs["q"], k=inputs["k"], v=inputs["v"], o=inputs["out"], dO=inputs["dout"])
        asked["use_deterministic_algorithm"] = request.deterministic
        gradients = graph.sdpa_backward(**given, stats=tensor("lse", single), **asked)
        for array, name in zip(gradients, ("dq", "dk", "dv")):
            result(array, name)
    graph.validate()
    return graph


def make_plan(request: Request) -> Plan:
    """A new plan for a request on the current GPU; raises what cuDNN raises if it refuses the request."""
    cudnn = cudnn_library.library()
    graph = build(cudnn, request, cudnn_library.handle(), sm_version=arrays.compute_capability())
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    graph.check_support()
    graph.build_plans()
    return Plan(graph, graph.get_workspace_size())


class Plan(NamedTuple):
    """A graph that is ready to run, and the bytes of working memory that it needs."""

    graph: Any
    workspace: int


class Counts(NamedTuple):
    """Plans of this thread: how many were found ready, were built, and are kept now."""

    hits: int
    built: int
    kept: int


class _Store(threading.local):
    """A thread's plans by device and request, oldest first, and its counts."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.plans: OrderedDict[tuple, Plan | None] = OrderedDict()
        self.hits = self.built = 0


_store = _Store()


def counts() -> Counts:
    """Return the counts of this thread so far."""
    return Counts(_store.hits, _store.built, len(_store.plans))


def clear() -> None:
    """Drop this thread's plans, and start its counts from 0."""
    _store.clear()


def plan(request: Request) -> Plan | None:
    """The plan for a request on the current GPU; None if cuDNN refuses the request, with one warning."""
    cudnn = cudnn_library.library()
    key = cudnn, arrays.cupy().cuda.runtime.getDevice(), request
    plans = _store.plans
    if key in plans:
        _store.hits += 1
        plans.move_to_end(key)
        return plans[key]
    _store.built += 1
    try:
        made: Plan | None = make_plan(request)
    except (cudnn.cudnnGraphNotSupportedError, RuntimeError) as error:
        made = None
        warnings.warn(f"cuDNN refuses attention that it should do, CuPy does it: {error} ({request})", stacklevel=2)
    plans[key] = made
    if len(plans) > KEPT:
        plans.popitem(last=False)
    return made


def run(ready: Plan, given: dict[str, DeviceArray]) -> None:
    """Put a plan on the current stream; `given` are the device arrays by name."""
    arrays.hold(ready)
    workspace = arrays.empty(ready.workspace, arrays.dtype("uint8"), "cuda") if ready.workspace else None
    pointers = {UIDS[name]: int(arrays.address(array)) for name, array in given.items()}
    # Addresses instead of arrays: the package would import torch and convert arrays by DLPack, which waits for the GPU.
    ready.graph.execute(pointers, arrays.address(workspace) if ready.workspace else 0, handle=cudnn_library.handle())
