"""Attention on one device: one module for each library that can do it, with the same functions.

The environment variable MPIPIPE_ATTENTION chooses the one for host arrays, whenever attention is computed:

    host (default)   kernels/host.py, numpy alone
    torch            kernels/torch_cpu.py, PyTorch's flash kernel, where PyTorch is installed
"""

from __future__ import annotations

import os
from importlib import import_module
from types import ModuleType

from mpipipe.errors import ArgumentError, BackendError

VARIABLE = "MPIPIPE_ATTENTION"
MODULES = {"host": "mpipipe.attention.kernels.host", "torch": "mpipipe.attention.kernels.torch_cpu"}


def chosen() -> ModuleType:
    """The module whose `forward` and `backward` to use.

    Raises ArgumentError where the variable names no kernel, BackendError where PyTorch is asked for and not installed.
    """
    name = os.environ.get(VARIABLE, "") or "host"
    if name not in MODULES:
        raise ArgumentError(
            f"{VARIABLE} names no attention kernel", found=repr(name), expected=" or ".join(MODULES),
            remedy=f"unset {VARIABLE}, or set it to one of these",
        )
    try:
        return import_module(MODULES[name])
    except ModuleNotFoundError as missing:
        if missing.name != "torch":
            raise
        raise BackendError(
            f"{VARIABLE}={name} asks for PyTorch, which is not installed",
            remedy=f"pip install torch, or unset {VARIABLE} to use the numpy kernel",
        ) from None
