"""Counter-based random numbers: a stream is named by what it is for, never by who draws it or when.

So initial values and dropout masks are the same on any number of ranks and chunks. Philox gives
independent streams for every (key, counter) (Salmon et al., "Parallel random numbers: as easy as 1,
2, 3", SC11).
"""

from __future__ import annotations

import hashlib
import sys

import numpy as np


def random_key(*names: object) -> np.ndarray:
    """Return a 128-bit Philox key for the given names, equal in every process."""
    return np.frombuffer(_digest(names), "<u8").astype(np.uint64)


def random_seed(*names: object) -> int:
    """Return 63 bits of a key for the given names, for generators of other libraries."""
    return int.from_bytes(_digest(names)[:8], "little") >> 1


def _digest(names: tuple[object, ...]) -> bytes:
    return hashlib.blake2b("\0".join(map(str, names)).encode(), digest_size=16).digest()


def initial_generator(seed: int, name: str) -> np.random.Generator:
    """Return the generator that draws the initial values of the parameter (or tie) `name`."""
    return np.random.Generator(np.random.Philox(key=random_key("initial", seed, name)))


def random_bits(
    stream: np.ndarray, counter: tuple[int, int, int], count: int, first: int = 0
) -> np.ndarray:
    """Return `count` random 16-bit integers of the stream of a key at `counter`.

    A counter is three integers below 2**64.

    They begin with number `first`, a multiple of 16, since 16 come from one step of the counter.
    """
    start = np.array([first // 16, *counter], np.uint64)
    words = np.random.Philox(key=stream, counter=start).random_raw(-(-count // 4))
    if sys.byteorder == "big":
        words = words.byteswap()  # the same integers in the same order on every machine
    return words.view("<u2")[:count]
