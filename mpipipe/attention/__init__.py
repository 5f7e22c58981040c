"""Exact attention: on one rank, and over a sequence that is spread over a ring of ranks.

local                 over a sequence that lies wholly on this rank
ring  ring_pass       over a sequence that is spread over a ring; `ring_pass` is the algorithm
ulysses               the same by all-to-all over heads
sliced                over a sequence that comes in slices, one after the other
ring_plan             what each rank does in a pass, its messages, what the ranks agree on
layout  mask          who holds which positions; parts of shards that see each other
cache                 few queries over many cached keys, for models that decode
kernels/  merge       attention on one device by numpy, cuDNN or CuPy; partial results become one
cost                  bytes on the wire, and when computation hides the transfers

`kernels` has a face of its own.
"""

from mpipipe.attention.cache import KVCache
from mpipipe.attention.cost import slice_lengths
from mpipipe.attention.layout import Layout
from mpipipe.attention.local import Local
from mpipipe.attention.ring import Ring, ring_attention, ring_attention_backward
from mpipipe.attention.sliced import Sliced
from mpipipe.attention.ulysses import Ulysses

__all__ = [
    "KVCache",
    "Layout",
    "Local",
    "Ring",
    "Sliced",
    "ring_attention",
    "ring_attention_backward",
    "slice_lengths",
]
__dir__ = __all__.copy
