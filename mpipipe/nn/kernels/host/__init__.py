"""The arithmetic on the host, with numpy: `any_dtype` for every dtype, `full_precision` for float32 and float64.

Work on large arrays is cut into pieces that stay in a core's cache from the first pass to the last.
"""

from __future__ import annotations

ELEMENTS = 32768  # 128 KiB of float32: a handful of such pieces fit in 1 MiB of second-level cache


def blocks(count: int, width: int = 1) -> list[slice]:
    """Return slices that cut `count` rows of `width` elements into pieces of about `ELEMENTS` elements."""
    step = max(1, ELEMENTS // max(1, width))
    if 0 < count <= step:
        return [slice(0, count)]
    return [slice(start, min(start + step, count)) for start in range(0, count, step)]
