"""
Decoding with a cache of keys and values
========================================

A text grows by one position at a time. ``attention.Cached`` keeps the keys and values of all positions so far, spread
over the ranks; what travels in each call is the result of the new queries, not the cache. Every rank gets the same
bits. The result of each call equals causal attention over the whole sequence.

It prints::

    rank 0 keeps positions 0 to 15
    rank 1 keeps positions 16 to 31
    rank 2 keeps positions 32 to 47
    rank 3 keeps positions 48 to 63
    prompt of 40 and 20 more positions equal causal attention: True
    all ranks have the same bits: True
"""

from itertools import pairwise

import numpy as np

import mpipipe
from mpipipe import attention

PROMPT, TOTAL = 40, 60
comm = mpipipe.world()
random = np.random.default_rng(0)
q = random.standard_normal((1, TOTAL, 4, 8))
k, v = random.standard_normal((2, 1, TOTAL, 2, 8))

cache = attention.Cached(capacity=64, comm=comm)
cuts = [0, PROMPT, *range(PROMPT + 1, TOTAL + 1)]
parts = []
for start, stop in pairwise(cuts):
    out, _ = cache.forward(*(array[:, start:stop] for array in (q, k, v)))
    parts.append(out)
found = np.concatenate(parts, axis=1)

lines = comm.gather(f"rank {comm.rank} keeps positions {cache.first} to {cache.stop - 1}")
bits = comm.gather(found.tobytes())
if comm.rank == 0:
    print(*lines, sep="\n")
    expected, _ = attention.Local(causal=True).forward(q, k, v)
    print("prompt of 40 and 20 more positions equal causal attention:", bool(np.abs(found - expected).max() < 1e-12))
    print("all ranks have the same bits:", all(other == bits[0] for other in bits))
# sphinx_gallery_thumbnail_path = "figures/ring.svg"
