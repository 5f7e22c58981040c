"""Attention on one device: one module for each library, all with the same functions.

    host     for host arrays, numpy alone
    cudnn    for device arrays in half precision, cuDNN's fused kernels
    cupy     for device arrays, matrix products and kernels of our own, for everything

For device arrays the default is cudnn if it is installed and does such arrays, else cupy. The
environment variable MPIPIPE_ATTENTION chooses one of the two, whenever attention is computed.
"""

from mpipipe.attention.kernels.choose import NAMES, check_choice, chosen, describe, load

# isort: off
from mpipipe.attention.kernels.interface import AttentionKernel, Gradients, KVBlock, OutLse
from mpipipe.attention.kernels.interface import check_arrays, no_poll
