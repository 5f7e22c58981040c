"""Layers, stages and losses on plain arrays."""

from __future__ import annotations

from mpipipe.nn.layers.attention import SelfAttention
from mpipipe.nn.layers.containers import PreNormResidual, Recompute, Residual, Sequential
from mpipipe.nn.layers.embedding import Embedding, Head, LearnedPositions
from mpipipe.nn.layers.layer import Layer, Position
from mpipipe.nn.layers.linear import FeedForward, Gelu, Linear, SwiGLU
from mpipipe.nn.layers.norm import Dropout, LayerNorm, RMSNorm
from mpipipe.nn.lora import LoRA
from mpipipe.nn.loss import HeadCrossEntropy, mean_squared_error, softmax_cross_entropy
from mpipipe.nn.parameters import FlatBuffer, Parameter
from mpipipe.nn.rope import LinearScaling, Llama3Scaling, RopeScaling, YarnScaling
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
    "PreNormResidual",
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
