"""A permutation of 0 ... count - 1, of which any place is computed by itself, without memory for the others.

A Feistel network permutes numbers of 2 b bits: the halves (left, right) become (right, left xor f(right)), `ROUNDS`
times, whatever f is (Luby and Rackoff, "How to construct pseudorandom permutations from pseudorandom functions", 1988).
A number that comes out too large goes in again until it is small enough, which keeps it a permutation (Black and
Rogaway, "Ciphers with arbitrary finite domains", 2002). There are at most 4 count numbers of 2 b bits,
so that takes 4 passes on average at most.
"""

from __future__ import annotations

from hashlib import blake2b

ROUNDS = 6


def shuffled(place: int, count: int, key: bytes) -> int:
    """Return what stands at `place` of a permutation of 0 ... count - 1 that follows from `key`, at most 64 bytes."""
    half = max(1, -(-max(1, count - 1).bit_length() // 2))
    mask, number = (1 << half) - 1, place
    while True:
        left, right = number >> half, number & mask
        for turn in range(ROUNDS):
            content = blake2b(right.to_bytes(8, "little") + bytes([turn]), key=key, digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(content, "little") & mask)
        number = left << half | right
        if number < count:
            return number
