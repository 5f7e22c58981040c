"""The one door to array libraries: numpy on the host, CuPy on a GPU.

Code above asks here for memory, copies, dtypes by name, streams, events and compiled CUDA
functions. CuPy is imported when a device is asked for, so everything else works without it. Of its
many functions only memory, views, streams, events, the compiler and cuBLAS are used: what computes
on the device is source in this package. Device work is in the order of CuPy's current stream of the
calling thread. Nothing here waits for the device but `download`, and `upload` of large arrays.

    devices  device_checks     which GPUs there are, and whether kernels compile on one
    dtypes  trees              arrays and dtypes that are accepted; tuples and dicts of arrays
    memory  transfer           new arrays and copies on one device; copies between host and device
    streams  graphs            the order of device work; work that is recorded once
    cuda  products  strided    kernels: sources and launches, products, copies with strides
    half_precision  nccl       host functions that upcast once; NCCL's names
    torch_memory               PyTorch's tensors on the memory of arrays
"""

from mpipipe.arrays.cuda import (
    BLOCK,
    WORD,
    Launch,
    Packed,
    bitwise_or,
    cuda_function,
    grid,
    launch,
    over,
    scalar_type,
    vector_width,
)
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
    HALVES,
    Array,
    DeviceArray,
    Event,
    Shape,
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
from mpipipe.arrays.graphs import Graph, keep_for_graph, record_graph
from mpipipe.arrays.half_precision import (
    faster_rounding,
    float32_like,
    round_into,
    upcast,
    upcast_halves,
)
from mpipipe.arrays.memory import (
    ALIGNMENT,
    address,
    aligned_empty,
    copy,
    copy_into,
    empty,
    empty_like,
    memory_shortage,
    set_zero,
    shares_any,
    shares_memory,
    zeros,
    zeros_like,
)
from mpipipe.arrays.nccl import bus_id, nccl, nccl_type
from mpipipe.arrays.products import batched_gemm, gemm, graphs_refused
from mpipipe.arrays.streams import (
    is_done,
    own_stream,
    record,
    seconds_between,
    side_stream,
    stream,
    wait_for,
)
from mpipipe.arrays.strided import (
    THREADS,
    blocks_of,
    cast,
    concatenate,
    copied,
    element_strides,
    fill,
    in_c_order,
    strided_copy,
    strided_copy_views,
)
from mpipipe.arrays.torch_memory import array_of, share_threads, tensor_of
from mpipipe.arrays.transfer import (
    Download,
    copy_to_device,
    copy_to_host,
    download,
    download_all,
    host_pieces,
    on_host,
    pinned,
    upload,
)
from mpipipe.arrays.trees import (
    Branches,
    Forked,
    Structure,
    flatten,
    mapped,
    named_leaves,
    read_only,
    unflatten,
)
