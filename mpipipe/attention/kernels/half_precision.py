"""Kernels that compute in float32 or float64 take half precision too: they upcast once and round once."""

from __future__ import annotations

from functools import wraps

import numpy as np

from mpipipe.arrays import aligned_empty, is_half


def upcast_halves(function):
    """For a kernel's `forward` or `backward` on host arrays: arguments in half precision become float32 ones.

    Those that it sets come back rounded to their dtype; in half precision they are never added to.
    """

    @wraps(function)
    def wide(*arguments, **options):
        kind = arguments[0].dtype
        if not is_half(kind):
            return function(*arguments, **options)
        count = RESULTS[function.__name__]
        given = [x.astype(np.float32) if _is_half_array(x) else x for x in arguments]
        for at in count:
            if _is_half_array(arguments[at]):
                given[at] = aligned_empty(arguments[at].shape, np.dtype(np.float32))
        function(*given, **options)
        for at in count:
            if given[at] is not arguments[at]:
                arguments[at][...] = given[at]

    return wide


RESULTS = {"forward": (5,), "backward": (8, 9, 10)}  # where out stands, and where dq, dk and dv stand


def _is_half_array(x) -> bool:
    return isinstance(x, np.ndarray) and is_half(x.dtype)
