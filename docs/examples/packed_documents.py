"""
A long sequence of packed documents
===================================

Documents of 300, 50, 900 and 150 positions are packed into one sequence of 1400. With
``segments`` a query sees only its own document, so few pairs are computed.
``pairs`` counts the (query, key) pairs of each rank: with documents the striped layout
is the most even one. With a window the contiguous layout needs the fewest ring steps.
The result for each document equals attention on only that document.

It prints::

    contiguous   pairs [46425, 61425, 183925, 171425]
    zigzag       pairs [48925, 168925, 122675, 122675]
    striped      pairs [115750, 116100, 115500, 115850]
    ring steps with a window of 100: contiguous 2, zigzag 4
    documents equal attention on each alone: True
"""

from itertools import pairwise

import numpy as np

import mpipipe
from mpipipe import attention

LENGTHS = [300, 50, 900, 150]
comm = mpipipe.world()
seq_len = sum(LENGTHS)
starts = np.cumsum([0, *LENGTHS]).tolist()
ranks = range(comm.size)
if comm.rank == 0:
    for kind in ("contiguous", "zigzag", "striped"):
        layout = attention.Layout(kind, comm.size, seq_len)
        work = [
            sum(
                part.pairs
                for k in ranks
                for part in layout.needs(q, k, documents=starts)
            )
            for q in ranks
        ]
        print(f"{kind:12} pairs {work}")
    steps = {
        kind: attention.Layout(kind, comm.size, seq_len).steps(True, 100)
        for kind in ("contiguous", "zigzag")
    }
    print(
        "ring steps with a window of 100:",
        ", ".join(f"{kind} {count}" for kind, count in steps.items()),
    )

random = np.random.default_rng(0)
q, k, v = random.standard_normal((3, 1, seq_len, 2, 16))
layout = attention.Layout("zigzag", comm.size, seq_len)
own_q, own_k, own_v = (layout.shard(array, comm.rank) for array in (q, k, v))
out, _ = attention.ring_attention(
    own_q, own_k, own_v, comm, layout=layout, segments=LENGTHS
)

shards = comm.allgather(out)
if comm.rank == 0:
    whole = layout.unshard(shards)
    equal = []
    for start, stop in pairwise(starts):
        own = [array[:, start:stop] for array in (q, k, v)]
        alone = attention.Local().forward(*own)[0]
        equal.append(np.abs(whole[:, start:stop] - alone).max() < 1e-12)
    print("documents equal attention on each alone:", all(equal))
# sphinx_gallery_thumbnail_path = "figures/layouts.svg"
