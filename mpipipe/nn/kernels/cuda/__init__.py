"""The kernels on a GPU: CUDA C++ beside this file, and cuBLAS.

Each source is compiled for the dtype of the arrays and the widest word of memory that their addresses and sizes allow.
Nothing waits for the device, no sum depends on timing, and the partial sums of a matrix do not depend on the GPU.
"""

from __future__ import annotations

from mpipipe.nn.kernels.cuda.elementwise import (
    accumulate,
    add,
    cast,
    copy,
    dropout,
    dropout_backward,
    gelu,
    gelu_backward,
    scale,
    swiglu,
    swiglu_backward,
)
from mpipipe.nn.kernels.cuda.layers import (
    add_layer_norm,
    add_parts,
    add_rms_norm,
    apply_rope,
    embed,
    embed_backward,
    layer_norm,
    layer_norm_backward,
    linear,
    linear_backward_input,
    linear_backward_weight,
    mean_squared_error,
    rms_norm,
    rms_norm_backward,
    rope_table,
    softmax_cross_entropy,
    sum_rows,
)
from mpipipe.nn.kernels.cuda.optimizer import adamw, sgd, sums_of_squares

__all__ = [
    "accumulate",
    "adamw",
    "add",
    "add_layer_norm",
    "add_parts",
    "add_rms_norm",
    "apply_rope",
    "cast",
    "copy",
    "dropout",
    "dropout_backward",
    "embed",
    "embed_backward",
    "gelu",
    "gelu_backward",
    "layer_norm",
    "layer_norm_backward",
    "linear",
    "linear_backward_input",
    "linear_backward_weight",
    "mean_squared_error",
    "rms_norm",
    "rms_norm_backward",
    "rope_table",
    "scale",
    "sgd",
    "softmax_cross_entropy",
    "sum_rows",
    "sums_of_squares",
    "swiglu",
    "swiglu_backward",
]
