"""Layers, stages and losses on plain arrays."""

from __future__ import annotations

from mpipipe.nn.activation import Gelu, SwiGLU
from mpipipe.nn.attention import SelfAttention
from mpipipe.nn.containers import Residual, Sequential
from mpipipe.nn.dropout import Dropout
from mpipipe.nn.embedding import Embedding
from mpipipe.nn.layer import Layer
from mpipipe.nn.linear import Linear
from mpipipe.nn.loss import mean_squared_error, softmax_cross_entropy
from mpipipe.nn.norm import LayerNorm, RMSNorm
from mpipipe.nn.parameters import Parameter
from mpipipe.nn.recompute import Recompute
from mpipipe.nn.stage import Position, Stage

__all__ = [
    "Dropout",
    "Embedding",
    "Gelu",
    "Layer",
    "LayerNorm",
    "Linear",
    "Parameter",
    "Position",
    "RMSNorm",
    "Recompute",
    "Residual",
    "SelfAttention",
    "Sequential",
    "Stage",
    "SwiGLU",
    "mean_squared_error",
    "softmax_cross_entropy",
]
