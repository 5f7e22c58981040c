"""Normalisation over the last axis, and dropout."""

from __future__ import annotations

from mpipipe.arrays import Array
from mpipipe.errors import ArgumentError
from mpipipe.nn.checks import check_features, check_positive, rows
from mpipipe.nn.layers.layer import Layer, Pending, Saved, WithPending, WithSaved
from mpipipe.nn.parameters import ones, vector
from mpipipe.nn.random import random_key


class _Norm(Layer):
    """What the norms share: the kernel centres rows where there is a bias."""

    takes_integers = False

    gain: Array
    bias: Array | None = None

    def __init__(self, dim: int, eps: float):
        check_positive(dim=dim)
        self.dim = dim
        self.eps = eps
        self.declared = {"gain": vector(dim, ones)}

    def forward(self, x: Array) -> WithSaved:
        check_features(self, x, self.dim)
        y, scale = self.stage.kernels.norm(rows(x), self.gain, self.bias, self.eps)
        return y.reshape(x.shape), (rows(x), scale)

    def backward_input(self, dy: Array, saved: Saved, more: Array | None = None) -> WithPending:
        x, scale = saved
        if more is not None:
            more = rows(more)
        dx, *parts = self.stage.kernels.norm_backward(
            rows(dy), x, scale, self.gain, self.bias is not None, more
        )
        return dx.reshape(dy.shape), parts

    def backward(self, dy: Array, saved: Saved, *more: Array) -> Array:
        dx, pending = self.backward_input(dy, saved, *more)
        self.backward_weight(pending)
        return dx

    def backward_weight(self, pending: Pending) -> None:
        for key, parts in zip(("gain", "bias"), pending):
            self._add(key, self.stage.kernels.add_parts, parts)


class RMSNorm(_Norm):
    """y = gain * x / sqrt(mean(x^2) + eps) over the last axis of x.

    Zhang and Sennrich, "Root mean square layer normalization" (2019). With n = x * r, r = 1 /
    sqrt(mean(x^2) + eps): dgain = sum over rows of dy * n, and dx = r * (gain * dy - n * mean(gain
    * dy * n)).

    Parameters
    ----------
    dim : int
        Size of the last axis; the parameter `gain` is (dim,), of ones at the start.
    eps : float
        Keeps the root away from 0.

    Examples
    --------
    >>> import numpy as np
    >>> from mpipipe import nn
    >>> stage = nn.Stage([nn.RMSNorm(2, eps=0)], dtype="float64")
    >>> stage.forward(np.array([[3.0, 3.0]]))[0]
    array([[1., 1.]])
    """

    recordable = True
    mixes_positions = False

    def __init__(self, dim: int, eps: float = 1e-6):
        super().__init__(dim, eps)


class LayerNorm(_Norm):
    """y = gain * (x - mean) / sqrt(variance + eps) + bias over the last axis of x.

    Ba, Kiros and Hinton, "Layer normalization" (2016). The backward is that of RMSNorm with n = (x
    - mean) * r, and r * mean(gain * dy) taken off as well.

    Parameters
    ----------
    dim, eps : int, float
        As for `RMSNorm`; there is a parameter `bias` (dim,), too, of zeros at the start.
    """

    recordable = True
    mixes_positions = False

    def __init__(self, dim: int, eps: float = 1e-5):
        super().__init__(dim, eps)
        self.declared = {**self.declared, "bias": vector(dim)}


# -- Dropout whose masks do not depend on where or how often they are drawn ------------------------


class Dropout(Layer):
    """While training, zero elements with a probability, and scale the others to keep the mean.

    The mask is drawn by a counter-based generator for (seed, layer name, step, replica,
    micro-batch), so recomputation draws it again, and so does any other split of the model over
    ranks. Otherwise the layer is the identity.

    Parameters
    ----------
    probability : float
        At least 0 and below 1; rounded to a multiple of 2^-16.

    Examples
    --------
    >>> import numpy as np
    >>> from mpipipe import nn
    >>> stage = nn.Stage([nn.Dropout(0.5)])
    >>> x = np.ones((4, 8), np.float32)
    >>> y, saved = stage.forward(x, nn.Position(step=3))
    >>> sorted(set(y.ravel().tolist()))
    [0.0, 2.0]
    >>> bool((stage.forward(x, nn.Position(step=3))[0] == y).all())
    True
    >>> bool((stage.forward(x, nn.Position(training=False))[0] == x).all())
    True
    """

    takes_integers = False
    recordable = True
    mixes_positions = False

    def __init__(self, probability: float):
        if not 0 <= probability < 1:
            raise ArgumentError(
                "wrong dropout probability",
                found=repr(probability),
                expected="0 <= probability < 1",
            )
        # An element lives where 16 random bits reach it.
        self.threshold = round(probability * 65536)
        self.scale = 65536 / max(1, 65536 - self.threshold)

    def unrecordable(self) -> str:
        if self.threshold:
            return "it draws another mask for each micro-batch"
        return ""

    def bound(self) -> None:
        self._stream = random_key("dropout", self.stage.seed, self.name)

    def forward(self, x: Array) -> WithSaved:
        position = self.stage.position
        if not position.training or self.threshold == 0:
            return x, None
        counter = (position.step, position.replica, position.microbatch)
        return self.stage.kernels.dropout(x, self._stream, counter, self.threshold, self.scale)

    def backward_input(self, dy: Array, saved: Saved) -> WithPending:
        if saved is None:
            return dy, None
        return self.stage.kernels.dropout_backward(dy, saved, self.scale), None
