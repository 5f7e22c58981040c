"""Exact attention: what SelfAttention attends with."""

from __future__ import annotations

from mpipipe.attention.local import Local

__all__ = ["Local"]
