"""The one door to array libraries: numpy on the host, CuPy on a GPU.

Code above asks here for memory, copies, dtypes by name, streams, events and compiled CUDA functions. CuPy is imported
when a device is asked for, so everything else works without it. Of its many functions only memory, views, streams,
events, the compiler and cuBLAS are used: what computes on the device is source in this package. Device work is in the
order of CuPy's current stream of the calling thread. Nothing here waits for the device but `download`, and `upload` of
large arrays.
"""

from mpipipe.arrays.cuda import cuda_declarations, cuda_function
from mpipipe.arrays.cuda_runtime import load_cuda_runtime
from mpipipe.arrays.devices import compute_capability, cupy, current_gpu, describe_gpus, device_count, use_gpu
from mpipipe.arrays.dtypes import (
    COMPUTE_DTYPES,
    accumulator,
    as_reals,
    device_of,
    dtype,
    is_array,
    is_device,
    is_floating,
    is_half,
    plain,
    refuse_mask,
)
from mpipipe.arrays.gemm_recorded import graphs_refused
from mpipipe.arrays.graphs import Graph, hold, record_graph
from mpipipe.arrays.memory import (
    address,
    aligned_empty,
    concatenate,
    copy,
    copy_into,
    empty,
    empty_like,
    read_only,
    set_zero,
    shares_memory,
    zeros,
    zeros_like,
)
from mpipipe.arrays.nccl import bus_id, multiprocessors, nccl, nccl_type
from mpipipe.arrays.pieces import host_pieces
from mpipipe.arrays.platform import AMD_UNTRIED, check_computable, is_amd
from mpipipe.arrays.shortage import Shortage, memory_shortage
from mpipipe.arrays.streams import (
    annotated,
    is_done,
    own_stream,
    record,
    seconds_between,
    side_stream,
    stream,
    wait_for,
)
from mpipipe.arrays.transfer import Download, copy_to_device, copy_to_host, download, download_all, pinned, upload
from mpipipe.arrays.types import Array, DeviceArray, Event, Shape, Stream, Tree
from mpipipe.arrays.usable import check_device, missing_parts

__all__ = [
    "AMD_UNTRIED",
    "COMPUTE_DTYPES",
    "Array",
    "DeviceArray",
    "Download",
    "Event",
    "Graph",
    "Shape",
    "Shortage",
    "Stream",
    "Tree",
    "accumulator",
    "address",
    "aligned_empty",
    "annotated",
    "as_reals",
    "bus_id",
    "check_computable",
    "check_device",
    "compute_capability",
    "concatenate",
    "copy",
    "copy_into",
    "copy_to_device",
    "copy_to_host",
    "cuda_declarations",
    "cuda_function",
    "cupy",
    "current_gpu",
    "describe_gpus",
    "device_count",
    "device_of",
    "download",
    "download_all",
    "dtype",
    "empty",
    "empty_like",
    "graphs_refused",
    "hold",
    "host_pieces",
    "is_amd",
    "is_array",
    "is_device",
    "is_done",
    "is_floating",
    "is_half",
    "load_cuda_runtime",
    "memory_shortage",
    "missing_parts",
    "multiprocessors",
    "nccl",
    "nccl_type",
    "own_stream",
    "pinned",
    "plain",
    "read_only",
    "record",
    "record_graph",
    "refuse_mask",
    "seconds_between",
    "set_zero",
    "shares_memory",
    "side_stream",
    "stream",
    "upload",
    "use_gpu",
    "wait_for",
    "zeros",
    "zeros_like",
]
