"""The one door to array libraries: numpy on the host, CuPy on a GPU.

Code above asks here for memory, copies, dtypes by name, streams, events and compiled CUDA functions. CuPy is imported
when a device is asked for, so everything else works without it. Of its many functions only memory, views, streams,
events, the compiler and cuBLAS are used: what computes on the device is source in this package. Device work is in the
order of CuPy's current stream of the calling thread. Nothing here waits for the device but `download`, and `upload` of
large arrays.

    devices  device_checks     which GPUs there are, and whether kernels compile and matrices multiply on one
    dtypes  trees              arrays and dtypes that are accepted; tuples and dicts of arrays between stages
    memory  transfer           new arrays and copies on one device; copies between host and device, pinned memory
    streams  graphs            the order of device work; work that is recorded once and launched often
    cuda  gemm  strided        for code with kernels: compiled sources and their launches, products, copies with strides
    half_precision  nccl       host functions that upcast once; NCCL's names
"""

from mpipipe.arrays.cuda import cuda_declarations, cuda_function
from mpipipe.arrays.device_checks import check_device, missing_parts
from mpipipe.arrays.devices import (
    AMD_UNTRIED,
    check_computable,
    compute_capability,
    cupy,
    current_gpu,
    describe_gpus,
    device_count,
    is_amd,
    load_cuda_runtime,
    use_gpu,
)
from mpipipe.arrays.dtypes import (
    COMPUTE_DTYPES,
    Array,
    DeviceArray,
    Event,
    Shape,
    Stream,
    Tree,
    accumulator,
    as_reals,
    device_of,
    dtype,
    is_array,
    is_device,
    is_floating,
    is_half,
    refuse_mask,
    strip_subclass,
)
from mpipipe.arrays.gemm import graphs_refused
from mpipipe.arrays.graphs import Graph, keep_for_graph, record_graph
from mpipipe.arrays.memory import (
    Shortage,
    address,
    aligned_empty,
    concatenate,
    copy,
    copy_into,
    empty,
    empty_like,
    memory_shortage,
    set_zero,
    shares_memory,
    zeros,
    zeros_like,
)
from mpipipe.arrays.nccl import bus_id, multiprocessors, nccl, nccl_type
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
from mpipipe.arrays.transfer import (
    Download,
    copy_to_device,
    copy_to_host,
    download,
    download_all,
    host_pieces,
    pinned,
    upload,
)
from mpipipe.arrays.trees import Branches, Structure, flatten, read_only, unflatten

__all__ = [
    "AMD_UNTRIED",
    "COMPUTE_DTYPES",
    "Array",
    "Branches",
    "DeviceArray",
    "Download",
    "Event",
    "Graph",
    "Shape",
    "Shortage",
    "Stream",
    "Structure",
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
    "flatten",
    "graphs_refused",
    "host_pieces",
    "is_amd",
    "is_array",
    "is_device",
    "is_done",
    "is_floating",
    "is_half",
    "keep_for_graph",
    "load_cuda_runtime",
    "memory_shortage",
    "missing_parts",
    "multiprocessors",
    "nccl",
    "nccl_type",
    "own_stream",
    "pinned",
    "read_only",
    "record",
    "record_graph",
    "refuse_mask",
    "seconds_between",
    "set_zero",
    "shares_memory",
    "side_stream",
    "stream",
    "strip_subclass",
    "unflatten",
    "upload",
    "use_gpu",
    "wait_for",
    "zeros",
    "zeros_like",
]
