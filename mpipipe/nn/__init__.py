"""Layers, stages and losses on plain arrays.

stage         consecutive layers of the model on one rank, bound to flat buffers
parameters    what a layer says about an array before it exists, initial values, flat buffers, frozen parameters
layers/       layer, what each is; containers, linear, norm, embedding; attention, and attend, what it attends with
layers/       for fields: convolution, spectral, and field, with norm, sampling and patches
layers/       names, by which layers give and take values of a micro-batch
rope          rotary positions: scalings of their frequencies, and tables
lora          low-rank adapters
loss          losses; one of them makes the product of the head itself
write_hooks   before parameters are written; when a layer has completed its gradients
kernels/      the arithmetic: interface states it, host holds it for numpy and cuda for GPUs
random        random numbers that depend on what they are for alone
"""

from __future__ import annotations

from mpipipe.nn.gradient_check import check_gradients

# `x as x` is for other rooms of the package; what scripts use is in __all__
from mpipipe.nn.kernels.cuda.optimizer import clip_factor as clip_factor
from mpipipe.nn.kernels.cuda.optimizer import rescale as rescale
from mpipipe.nn.layers.attend import Attend as Attend
from mpipipe.nn.layers.attend import ForwardAndBackward as ForwardAndBackward
from mpipipe.nn.layers.attend import as_attend as as_attend
from mpipipe.nn.layers.attention import SelfAttention
from mpipipe.nn.layers.containers import PreNormResidual, Recompute, Residual, Sequential
from mpipipe.nn.layers.convolution import Conv
from mpipipe.nn.layers.embedding import Embedding, Head, LearnedPositions
from mpipipe.nn.layers.field import Downsample, GroupNorm, Patches, Upsample
from mpipipe.nn.layers.layer import LORA_A as LORA_A
from mpipipe.nn.layers.layer import LORA_B as LORA_B
from mpipipe.nn.layers.layer import Layer, Position
from mpipipe.nn.layers.linear import FeedForward, Gelu, Linear, SwiGLU
from mpipipe.nn.layers.names import AdaptiveNorm, Join, Keep
from mpipipe.nn.layers.names import check_links as check_links
from mpipipe.nn.layers.names import handed as handed
from mpipipe.nn.layers.names import names_of as names_of
from mpipipe.nn.layers.names import names_within as names_within
from mpipipe.nn.layers.names import or_zeros as or_zeros
from mpipipe.nn.layers.names import sum_of as sum_of
from mpipipe.nn.layers.norm import Dropout, LayerNorm, RMSNorm
from mpipipe.nn.layers.spectral import SpectralConv
from mpipipe.nn.lora import LoRA
from mpipipe.nn.lora import is_adapter as is_adapter
from mpipipe.nn.lora import without_adapters as without_adapters
from mpipipe.nn.loss import HeadCrossEntropy, mean_squared_error, softmax_cross_entropy
from mpipipe.nn.loss import worth_tiles as worth_tiles
from mpipipe.nn.parameters import FlatBuffer, Parameter
from mpipipe.nn.parameters import frozen_names as frozen_names
from mpipipe.nn.parameters import is_frozen as is_frozen
from mpipipe.nn.parameters import partly_frozen_error as partly_frozen_error
from mpipipe.nn.random import random_key as random_key
from mpipipe.nn.rope import ROPE_SCALINGS as ROPE_SCALINGS
from mpipipe.nn.rope import LinearScaling, Llama3Scaling, RopeScaling, YarnScaling
from mpipipe.nn.rope import scaling_of as scaling_of
from mpipipe.nn.stage import Stage
from mpipipe.nn.stage import accepted_input as accepted_input
from mpipipe.nn.write_hooks import GradientReady as GradientReady
from mpipipe.nn.write_hooks import announce_write as announce_write
from mpipipe.nn.write_hooks import gradient_ready as gradient_ready

__all__ = [
    "AdaptiveNorm",
    "Conv",
    "Downsample",
    "Dropout",
    "Embedding",
    "FeedForward",
    "FlatBuffer",
    "Gelu",
    "GroupNorm",
    "Head",
    "HeadCrossEntropy",
    "Join",
    "Keep",
    "Layer",
    "LayerNorm",
    "LearnedPositions",
    "Linear",
    "LinearScaling",
    "Llama3Scaling",
    "LoRA",
    "Parameter",
    "Patches",
    "Position",
    "PreNormResidual",
    "RMSNorm",
    "Recompute",
    "Residual",
    "RopeScaling",
    "SelfAttention",
    "Sequential",
    "SpectralConv",
    "Stage",
    "SwiGLU",
    "Upsample",
    "YarnScaling",
    "check_gradients",
    "mean_squared_error",
    "softmax_cross_entropy",
]
