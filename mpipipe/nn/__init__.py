"""Layers, stages and losses on plain arrays.

stage         consecutive layers of the model on one rank, bound to flat buffers
parameters    descriptions of arrays, initial values, flat buffers, frozen parameters
layers/       layer, the base class; containers, linear, norm, embedding
layers/       attention, and attend, what it attends with
layers/       convolution, spectral and field, for fields
layers/       head_slices, a head cut into slices of the vocabulary
layers/       names, by which layers give and take values of a micro-batch
rope          rotary positions: scalings of their frequencies, and tables
lora          low-rank adapters
loss          losses; one of them makes the product of the head itself
write_hooks   before parameters are written; when a layer has completed its gradients
kernels/      the arithmetic: interface states it, host holds it for numpy and cuda for GPUs
random        random numbers that depend on what they are for alone

What does not fit what a docstring here says of it raises ArgumentError.
"""

from mpipipe.nn.checks import check_slice_count
from mpipipe.nn.gradient_check import check_gradients
from mpipipe.nn.kernels.cuda.optimizer import clip_factor, rescale
from mpipipe.nn.layers.attend import Attend, ForwardAndBackward, as_attend
from mpipipe.nn.layers.attention import SelfAttention
from mpipipe.nn.layers.containers import PreNormResidual, Recompute, Residual, Sequential
from mpipipe.nn.layers.convolution import Conv
from mpipipe.nn.layers.embedding import Embedding, Head, LearnedPositions
from mpipipe.nn.layers.field import Patches
from mpipipe.nn.layers.head_slices import HeadSlice, check_slices
from mpipipe.nn.layers.layer import (
    LORA_A,
    LORA_B,
    Differentiable,
    Layer,
    Pending,
    Position,
    Saved,
    mixes,
)
from mpipipe.nn.layers.linear import FeedForward, Gelu, Linear, SwiGLU
from mpipipe.nn.layers.names import (
    AdaptiveNorm,
    Join,
    Keep,
    ends_of_names,
    handed,
    names_of,
    names_within,
    no_branches_error,
    sum_of,
)
from mpipipe.nn.layers.norm import Dropout, LayerNorm, RMSNorm
from mpipipe.nn.layers.spectral import SpectralConv
from mpipipe.nn.lora import LoRA, is_adapter, without_adapters
from mpipipe.nn.loss import (
    HeadCrossEntropy,
    mean_of_losses,
    mean_squared_error,
    softmax_cross_entropy,
    worth_tiles,
)
from mpipipe.nn.parameters import (
    FlatBuffer,
    Parameter,
    decay_ranges,
    divide_buffer,
    frozen_names,
    partly_frozen_error,
    unite_buffer,
    zeros,
)
from mpipipe.nn.random import random_key, random_seed
from mpipipe.nn.rope import (
    ROPE_SCALINGS,
    LinearScaling,
    Llama3Scaling,
    RopeScaling,
    YarnScaling,
    scaling_of,
)
from mpipipe.nn.stage import Stage, accepted_input
from mpipipe.nn.write_hooks import announce_write

__all__ = [  # the rest is for other rooms of the package
    "AdaptiveNorm",
    "Conv",
    "Dropout",
    "Embedding",
    "FeedForward",
    "FlatBuffer",
    "Gelu",
    "Join",
    "Keep",
    "Layer",
    "LayerNorm",
    "Linear",
    "Llama3Scaling",
    "LoRA",
    "Parameter",
    "Patches",
    "Position",
    "PreNormResidual",
    "RMSNorm",
    "Recompute",
    "Residual",
    "SelfAttention",
    "Sequential",
    "SpectralConv",
    "Stage",
    "SwiGLU",
    "YarnScaling",
    "check_gradients",
    "mean_of_losses",
    "mean_squared_error",
    "softmax_cross_entropy",
]
__dir__ = __all__.copy
