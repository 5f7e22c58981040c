"""The one door to array libraries: numpy on the host, CuPy on a GPU.

Nothing else imports cupy, and this module does so only when a device is asked for, so that everything works without it.
Code above asks here for memory, copies, dtypes by name, streams, events and compiled CUDA functions. Of CuPy's many
functions only memory, views, streams, events, the compiler and cuBLAS are used: what computes on the device is source
in this package, and nothing here waits for the device unless its name says so (`download`, `synchronize`).

Device work is in the order of CuPy's current stream of the calling thread.
"""

from mpipipe.arrays.cuda import cuda_function, cuda_source_facts
from mpipipe.arrays.devices import check_device, cupy, current_gpu, describe_gpus, device_count, use_gpu
from mpipipe.arrays.dtypes import (
    accumulator,
    device_of,
    dtype,
    is_array,
    is_device,
    is_floating,
    is_half,
    plain,
    refuse_mask,
)
from mpipipe.arrays.memory import (
    address,
    aligned_empty,
    concatenate,
    copy,
    copy_into,
    empty,
    empty_like,
    set_zero,
    shares_memory,
    zeros,
)
from mpipipe.arrays.streams import annotated, is_done, record, seconds_between, side_stream, stream, wait_for
from mpipipe.arrays.transfer import copy_to_device, copy_to_host, download, pinned, upload
from mpipipe.arrays.types import Array, DeviceArray, Shape, Tree

__all__ = [
    "Array",
    "DeviceArray",
    "Shape",
    "Tree",
    "accumulator",
    "address",
    "aligned_empty",
    "annotated",
    "check_device",
    "concatenate",
    "copy",
    "copy_into",
    "copy_to_device",
    "copy_to_host",
    "cuda_function",
    "cuda_source_facts",
    "cupy",
    "current_gpu",
    "describe_gpus",
    "device_count",
    "device_of",
    "download",
    "dtype",
    "empty",
    "empty_like",
    "is_array",
    "is_device",
    "is_done",
    "is_floating",
    "is_half",
    "pinned",
    "plain",
    "record",
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
]
