"""The kernels on a GPU: CUDA C++ next to this file, and cuBLAS.

Each source is compiled for the dtype of the arrays and the widest word of memory that their addresses and sizes allow.
Nothing waits for the device, no sum depends on timing, and the partial sums of a matrix do not depend on the GPU.
"""

from __future__ import annotations

from mpipipe.nn.kernels.cuda.elementwise import accumulate as accumulate
from mpipipe.nn.kernels.cuda.elementwise import add as add
from mpipipe.nn.kernels.cuda.elementwise import cast as cast
from mpipipe.nn.kernels.cuda.elementwise import copy as copy
from mpipipe.nn.kernels.cuda.elementwise import dropout as dropout
from mpipipe.nn.kernels.cuda.elementwise import dropout_backward as dropout_backward
from mpipipe.nn.kernels.cuda.elementwise import gelu as gelu
from mpipipe.nn.kernels.cuda.elementwise import gelu_backward as gelu_backward
from mpipipe.nn.kernels.cuda.elementwise import scale as scale
from mpipipe.nn.kernels.cuda.elementwise import swiglu as swiglu
from mpipipe.nn.kernels.cuda.elementwise import swiglu_backward as swiglu_backward
from mpipipe.nn.kernels.cuda.layers import add_parts as add_parts
from mpipipe.nn.kernels.cuda.layers import apply_rope as apply_rope
from mpipipe.nn.kernels.cuda.layers import embed as embed
from mpipipe.nn.kernels.cuda.layers import embed_backward as embed_backward
from mpipipe.nn.kernels.cuda.layers import layer_norm as layer_norm
from mpipipe.nn.kernels.cuda.layers import layer_norm_backward as layer_norm_backward
from mpipipe.nn.kernels.cuda.layers import linear as linear
from mpipipe.nn.kernels.cuda.layers import linear_backward_input as linear_backward_input
from mpipipe.nn.kernels.cuda.layers import linear_backward_weight as linear_backward_weight
from mpipipe.nn.kernels.cuda.layers import mean_squared_error as mean_squared_error
from mpipipe.nn.kernels.cuda.layers import products as products
from mpipipe.nn.kernels.cuda.layers import rms_norm as rms_norm
from mpipipe.nn.kernels.cuda.layers import rms_norm_backward as rms_norm_backward
from mpipipe.nn.kernels.cuda.layers import rope_table as rope_table
from mpipipe.nn.kernels.cuda.layers import softmax_cross_entropy as softmax_cross_entropy
from mpipipe.nn.kernels.cuda.layers import sum_rows as sum_rows
from mpipipe.nn.kernels.cuda.optimizer import adamw as adamw
from mpipipe.nn.kernels.cuda.optimizer import sgd as sgd
from mpipipe.nn.kernels.cuda.optimizer import sums_of_squares as sums_of_squares
