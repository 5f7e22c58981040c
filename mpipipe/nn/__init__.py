"""Layers, stages and losses on plain arrays."""

from __future__ import annotations

from mpipipe.nn.head_loss import HeadCrossEntropy
from mpipipe.nn.layers.activation import Gelu, SwiGLU
from mpipipe.nn.layers.attention import SelfAttention
from mpipipe.nn.layers.containers import Residual, Sequential
from mpipipe.nn.layers.dropout import Dropout
from mpipipe.nn.layers.embedding import Embedding
from mpipipe.nn.layers.feed_forward import FeedForward
from mpipipe.nn.layers.head import Head
from mpipipe.nn.layers.layer import Layer
from mpipipe.nn.layers.learned_positions import LearnedPositions
from mpipipe.nn.layers.linear import Linear
from mpipipe.nn.layers.norm import LayerNorm, RMSNorm
from mpipipe.nn.layers.recompute import Recompute
from mpipipe.nn.lora import LoRA
from mpipipe.nn.loss import mean_squared_error, softmax_cross_entropy
from mpipipe.nn.parameters import FlatBuffer, Parameter
from mpipipe.nn.position import Position
from mpipipe.nn.rope_scaling import LinearScaling, Llama3Scaling, RopeScaling, YarnScaling
from mpipipe.nn.stage import Stage

__all__ = [
    "Dropout",
    "Embedding",
    "FeedForward",
    "FlatBuffer",
    "Gelu",
    "Head",
    "HeadCrossEntropy",
    "Layer",
    "LayerNorm",
    "LearnedPositions",
    "Linear",
    "LinearScaling",
    "Llama3Scaling",
    "LoRA",
    "Parameter",
    "Position",
    "RMSNorm",
    "Recompute",
    "Residual",
    "RopeScaling",
    "SelfAttention",
    "Sequential",
    "Stage",
    "SwiGLU",
    "YarnScaling",
    "mean_squared_error",
    "softmax_cross_entropy",
]
