"""Versions of what a measurement depends on."""

from __future__ import annotations

import platform
from importlib import metadata

from mpipipe import __version__

PACKAGES = ("numpy", "cupy-cuda12x", "cupy-cuda13x", "cupy-rocm-7-0", "nvidia-cudnn-frontend", "nvidia-cudnn-cu12",
            "nvidia-cudnn-cu13", "mpi4py", "torch")  # fmt: skip


def versions() -> dict[str, str]:
    """Return the versions of Python, of mpipipe, and of each of PACKAGES that is installed."""
    found = {"python": platform.python_version(), "mpipipe": __version__}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
