"""Layers, stages and losses on plain arrays."""

from __future__ import annotations

from mpipipe.nn.layers.activation import Gelu, SwiGLU
from mpipipe.nn.layers.attention import SelfAttention
from mpipipe.nn.layers.containers import Residual, Sequential
from mpipipe.nn.layers.dropout import Dropout
from mpipipe.nn.layers.embedding import Embedding
from mpipipe.nn.layers.layer import Layer
from mpipipe.nn.layers.linear import Linear
from mpipipe.nn.layers.norm import LayerNorm, RMSNorm
from mpipipe.nn.layers.recompute import Recompute
from mpipipe.nn.loss import mean_squared_error, softmax_cross_entropy
from mpipipe.nn.parameters import Parameter
from mpipipe.nn.position import Position
from mpipipe.nn.stage import Stage

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
