"""Attention on one device: one module for each library that computes it, all with the functions of `interface.py`.

The environment variable MPIPIPE_ATTENTION chooses, whenever attention is computed. For host arrays:

    host (default)   host.py, numpy alone
    torch            torch_cpu.py, PyTorch's flash kernel, if PyTorch is installed

For device arrays the default is cudnn if it is installed and does such arrays, else cupy:

    cudnn            cudnn.py, cuDNN's fused kernels, for half precision
    cupy             cupy.py, matrix products and kernels of our own, for everything

A choice for one kind of device leaves the other at its default.
"""

from mpipipe.attention.kernels.choose import MODULES, VARIABLE, check_choice, chosen, describe, load

# isort: off
from mpipipe.attention.kernels.interface import AttentionAccumulator, AttentionKernel, Gradients, KVBlock, OutLse
from mpipipe.attention.kernels.interface import no_poll
