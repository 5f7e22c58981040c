"""Exact attention: on one rank, and over a sequence that is spread over a ring of ranks."""

from __future__ import annotations

from mpipipe.attention.cache import Cached, KVCache
from mpipipe.attention.decode import decode_attention
from mpipipe.attention.layout import Layout
from mpipipe.attention.local import Local
from mpipipe.attention.ring import Ring, ring_attention, ring_attention_backward

__all__ = [
    "Cached",
    "KVCache",
    "Layout",
    "Local",
    "Ring",
    "decode_attention",
    "ring_attention",
    "ring_attention_backward",
]
