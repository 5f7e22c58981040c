"""Attention on one rank, on the host or on a GPU, and its float64 reference."""

import numpy as np

from mpipipe import arrays, attention
from support.reference_attention import NAMES, dense
from support.reference_attention import agrees as near
from support.rings import arrays as host_arrays

DOCUMENTS = [5, 1, 14]


def make(dtype, seq=20, **sizes):
    """q, k, v, dout on the host."""
    return [x.astype(arrays.dtype(dtype)) for x in host_arrays(seq, **sizes)]


def agrees(found, expected, dtype):
    """`found` is of `dtype`, the log-sum-exp of its accumulator dtype, and both are near the reference."""
    kind = arrays.dtype(dtype)
    for name, one, other in zip(NAMES, found, expected):
        assert one.dtype == (arrays.accumulator(kind) if name == "lse" else kind) and one.shape == other.shape, name
    near(found, expected)


def through_local(whole, gpu=None, place=arrays.upload, **options):
    """(out, lse, dq, dk, dv) on the host, and what was launched; nothing may have waited for the device."""
    on_device = [place(x) for x in whole]
    attend = attention.Local(**options)
    if gpu is not None:
        gpu.reset()
    out, saved = attend.forward(*on_device[:3])
    gradients = attend.backward(on_device[3], saved)
    launched = [] if gpu is None else list(gpu.launches)
    assert gpu is None or not gpu.synchronisations
    return arrays.download(out, saved.lse, *gradients), launched


def reference(whole, causal=True, window=None, segments=None, scale=None):
    documents = None if segments is None else [0, *np.cumsum(segments)]
    return dense(*whole, causal, window, documents, scale)


CASES = [
    (dict(), dict()),
    (dict(causal=False), dict(seq=21, keys=13)),
    (dict(), dict(seq=9, keys=21)),
    (dict(), dict(seq=21, keys=9)),
    (dict(window=6), dict(seq=23)),
    (dict(window=3), dict(seq=12, keys=7)),
    (dict(segments=DOCUMENTS), dict()),
    (dict(segments=DOCUMENTS, causal=False), dict()),
    (dict(segments=DOCUMENTS, window=4), dict()),
    (dict(scale=0.7), dict(seq=17, value_dim=16)),
    (dict(), dict(seq=13, dim=5, value_dim=3)),
    (dict(), dict(seq=1)),
]  # fmt: skip


def opposed(dtype, seq, keys, **sizes):
    """Arrays whose log-sum-exps lie below -100: every key points away from every query."""
    q, k, v, dout = make("float64", seq, keys=keys, **sizes)
    direction = np.ones(q.shape[3])
    q, k = 12 * direction + 0.1 * q, -12 * direction + 0.1 * k
    return [x.astype(arrays.dtype(dtype)) for x in (q, k, v, dout)]
