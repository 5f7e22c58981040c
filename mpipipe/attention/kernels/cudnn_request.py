"""What cuDNN's attention does, and how it is asked."""

from __future__ import annotations

import os

from mpipipe import arrays
from mpipipe.arrays import Array, DeviceArray, Shape
from mpipipe.arrays.strided import element_strides
from mpipipe.attention.kernels.cudnn_graph import Request
from mpipipe.attention.kernels.cudnn_library import installed
from mpipipe.attention.mask import Slice

DETERMINISTIC = "MPIPIPE_DETERMINISTIC"
TILE = 128  # rows and columns of cuDNN's tiles
WIDEST, WIDEST_MIXED = 256, 128  # head dimension; the second if values have another one than keys
WIDEST_BACK = {9: 256}  # of backwards, by the major number of the compute capability
WIDEST_BACK_ELSEWHERE = 128
BLACKWELL, WIDE_ON_BLACKWELL = 10, (9, 23)  # the cuDNN from which its backward does dimension 256, and no other > 128
OLDEST_CAPABILITY = 80
WORD = 16  # bytes: rows begin at multiples of this


def refusal(q: Array, k: Array, v: Array) -> str:
    """Why cuDNN does not do attention of these arrays; empty if it does."""
    dim, width = q.shape[3], v.shape[3]
    if not arrays.is_half(q.dtype):
        return f"cuDNN computes attention in float16 and bfloat16, not in {q.dtype}"
    if dim % 8 or width % 8:
        return f"head dimensions {dim} (keys) and {width} (values) are not both multiples of 8"
    widest = WIDEST if dim == width else WIDEST_MIXED
    if max(dim, width) > widest:
        return f"head dimensions {dim} (keys) and {width} (values) are above {widest}"
    capability = arrays.compute_capability()
    if capability < OLDEST_CAPABILITY:
        return f"this GPU's compute capability is {capability / 10}, below {OLDEST_CAPABILITY / 10}"
    return ""


def widest_backward(capability: int) -> tuple[int, ...]:
    """Head dimensions of backwards on a GPU of this compute capability: the largest, and single ones beyond it.

    From sdpa_support_surface.h and scaled_dot_product_flash_attention.h of cudnn-frontend 1.26.
    """
    major = capability // 10
    beyond = (256,) if major == BLACKWELL and installed().version >= WIDE_ON_BLACKWELL else ()
    return WIDEST_BACK.get(major, WIDEST_BACK_ELSEWHERE), *beyond


def fits(x: DeviceArray) -> bool:
    """Whether cuDNN takes an array as it lies in memory."""
    apart = [stride for stride, extent in zip(x.strides[:3], x.shape) if extent > 1]
    aligned = all(stride > 0 and stride % WORD == 0 for stride in (*apart, arrays.address(x) or WORD))
    return aligned and (x.strides[3] == x.itemsize or x.shape[3] == 1)


def deterministic() -> bool:
    """Whether MPIPIPE_DETERMINISTIC asks for the same bits in every run."""
    return os.environ.get(DETERMINISTIC, "") not in ("", "0")


def request_for(direction: str, given: dict[str, DeviceArray], scale: float, part: Slice) -> Request | None:
    """What to ask of cuDNN for one slice; None if cuDNN is known not to do it."""
    seq, keys = given["q"].shape[1], given["k"].shape[1]
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
    # Hopper's backward gives NaN for rows of very negative log-sum-exp and an odd number of half tiles of keys, unless
    # there is a mask of padding (NVIDIA/cudnn-frontend#628, #1072)
    padded = back and (keys % TILE != 0 or seq < TILE)
    shapes = tuple((name, *_described(name, x)) for name, x in given.items())
    low, high = (None if bound is None else int(bound) for bound in (part.low, part.high))
    what = direction, given["q"].dtype.name, shapes, float(scale)
    return Request(*what, low, high, padded=padded, deterministic=back and deterministic())


def _described(name: str, x: DeviceArray) -> tuple[Shape, Shape]:
    """(shape, strides) of an array in cuDNN's order of axes: batch, heads, seq, dim."""
    if name == "lse":
        batch, heads, seq = x.shape
        return (batch, heads, seq, 1), (heads * seq, seq, 1, 1)
    (batch, seq, heads, dim), (b, s, h, d) = x.shape, element_strides(x)
    return (batch, heads, seq, dim), (b, h, s, d)
