"""Numbers of bytes as text: 8G is 8 * 2^30."""

from __future__ import annotations

import math
import re

from mpipipe.errors import ArgumentError

UNITS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}  # powers of two


def parse_bytes(text: str) -> int:
    """Read a number of bytes.

    Parameters
    ----------
    text : str
        A number of at least 0, and perhaps K, M, G or T, or KiB, MiB, GiB or TiB: 2^10, 2^20, 2^30 or 2^40 bytes.

    Returns
    -------
    int
        Bytes, rounded down.

    Raises
    ------
    ArgumentError
        The text is something else, such as a negative number or NaN.

    Examples
    --------
    >>> from mpipipe.planning import parse_bytes
    >>> parse_bytes("1.5K")
    1536
    """
    short = re.sub("(?<=[KMGT])IB$", "", str(text).strip().upper())
    unit = short[-1:] if short[-1:] in UNITS and short[-1:] else ""
    try:
        count = float(short.removesuffix(unit))
    except ValueError:
        count = math.nan
    if not 0 <= count < math.inf:
        raise ArgumentError(
            "no number of bytes", found=repr(text), expected="a finite number of at least 0, such as 900M or 1.5G"
        )
    return int(count * 2 ** UNITS[unit])
