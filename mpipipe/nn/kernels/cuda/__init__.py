"""The kernels on a GPU: CUDA C++ next to this file, and cuBLAS.

Each source is compiled for the dtype of the arrays and the widest word of memory that their
addresses and sizes allow. Nothing waits for the device, no sum depends on timing, and the partial
sums of a matrix do not depend on the GPU.
"""

from mpipipe.arrays import strided_copy as copy
from mpipipe.nn.kernels.cuda.elementwise import (
    accumulate,
    add,
    dropout,
    dropout_backward,
    gelu,
    gelu_backward,
    scale,
    swiglu,
    swiglu_backward,
)
from mpipipe.nn.kernels.cuda.layers import (
    add_parts,
    apply_rope,
    embed,
    embed_backward,
    linear,
    linear_backward_input,
    linear_backward_weight,
    mean_squared_error,
    norm,
    norm_backward,
    products,
    rope_table,
    running_lse,
    running_lse_backward,
    softmax_cross_entropy,
    sum_rows,
)
from mpipipe.nn.kernels.cuda.optimizer import adamw, sgd, sums_of_squares
