"""Matrix products: the linear layer, and feed-forward layers of two products."""

from __future__ import annotations

from mpipipe.arrays import Array
from mpipipe.nn.checks import check_features, check_positive, rows
from mpipipe.nn.layers.layer import (
    Layer,
    Pending,
    Projection,
    Saved,
    WithPending,
    WithSaved,
    stacked_projections,
)
from mpipipe.nn.parameters import matrix, vector


class Linear(Layer):
    """y = x W^T + b over the last axis of x: (..., inputs) to (..., outputs).

    Parameters
    ----------
    inputs, outputs : int
        Sizes of the last axis of x and of y. The parameter `weight` is (outputs, inputs).
    bias : bool
        Whether there is a parameter `bias` (outputs,), of zeros at the start.
    tie : str, optional
        Key of `Parameter.tie` for the weight.
    gain : float
        The weight starts normal with standard deviation gain / sqrt(inputs).

    Examples
    --------
    >>> import numpy as np
    >>> from mpipipe import nn
    >>> stage = nn.Stage([nn.Linear(3, 2)])
    >>> y, saved = stage.forward(np.ones((4, 3), np.float32))
    >>> y.shape, sorted(stage.parameters)
    ((4, 2), ['0.bias', '0.weight'])
    """

    takes_integers = False
    recordable = True
    mixes_positions = False
    ends = False

    weight: Array
    bias: Array | None = None

    def __init__(
        self,
        inputs: int,
        outputs: int,
        bias: bool = True,
        tie: str | None = None,
        gain: float = 1.0,
    ):
        check_positive(inputs=inputs, outputs=outputs)
        self.inputs = inputs
        self.outputs = outputs
        self.declared = {"weight": matrix(outputs, inputs, gain, tie)}
        if bias:
            self.declared["bias"] = vector(outputs)

    def projections(self) -> dict[str, Projection]:
        return {"linear": Projection("weight", 0, self.outputs)}

    def forward(self, x: Array) -> WithSaved:
        if x.ndim != 2:
            check_features(self, x, self.inputs)
            y, saved = self.forward(rows(x))
            return y.reshape(*x.shape[:-1], self.outputs), saved
        if x.shape[1] != self.inputs:
            check_features(self, x, self.inputs)
        return self.stage.kernels.linear(x, self.weight, self.bias), x

    def backward_input(self, dy: Array, saved: Saved) -> WithPending:
        if dy.ndim != 2:
            dx, pending = self.backward_input(rows(dy), saved)
            if dx is not None:
                dx = dx.reshape(*dy.shape[:-1], self.inputs)
            return dx, pending
        if self.ends:
            return None, (dy, saved)
        return self.stage.kernels.linear_backward_input(dy, self.weight), (dy, saved)

    def backward_weight(self, pending: Pending) -> None:
        dy, x = pending
        self._add_product("weight", dy, x, "bias")


class _TwoProducts(Layer):
    """y = f(x U^T + u) D^T + d over the last axis of x; a subclass has f.

    `first` is the name of U, (width, dim).
    """

    takes_integers = False

    down: Array
    down_bias: Array | None = None

    def __init__(self, dim: int, hidden: int, first: str, width: int, bias: bool, gain: float):
        check_positive(dim=dim, hidden=hidden)
        self.dim = dim
        self.hidden = hidden
        self._first = first
        self._first_bias = f"{first}_bias"
        self.declared = {first: matrix(width, dim), "down": matrix(dim, hidden, gain)}
        if bias:
            self.declared |= {self._first_bias: vector(width), "down_bias": vector(dim)}

    def forward(self, x: Array) -> WithSaved:
        check_features(self, x, self.dim)
        linear = self.stage.kernels.linear
        flat = rows(x)
        inner = linear(flat, getattr(self, self._first), getattr(self, self._first_bias))
        return linear(self._f(inner), self.down, self.down_bias).reshape(x.shape), (flat, inner)

    def backward_input(self, dy: Array, saved: Saved) -> WithPending:
        x, inner = saved
        dflat = rows(dy)
        backward = self.stage.kernels.linear_backward_input
        dinner, source = self._f_backward(backward(dflat, self.down), inner)
        dx = backward(dinner, getattr(self, self._first))
        return dx.reshape(dy.shape), (x, dinner, dflat, source)

    def backward_weight(self, pending: Pending) -> None:
        x, dinner, dy, source = pending
        self._add_product(self._first, dinner, x, self._first_bias)
        self._add_product("down", dy, self._f_of(source), "down_bias")

    def _f(self, inner: Array) -> Array:
        """Return f(inner)."""
        raise NotImplementedError

    def _f_backward(self, df: Array, inner: Array) -> tuple[Array, Array]:
        """Return the gradient of inner, and that from which `_f_of` makes f(inner)."""
        raise NotImplementedError

    def _f_of(self, inner: Array) -> Array:
        return inner


class FeedForward(_TwoProducts):
    """y = gelu(x U^T + u) D^T + d over the last axis of x: the feed-forward layer of GPT-2.

    The parameter `up` is U, (hidden, dim), and `down` is D, (dim, hidden). What is kept for the
    backward inside is the input of gelu alone: its output is computed again.

    Parameters
    ----------
    dim, hidden : int
        Size of the last axis of x and y, and inner width.
    bias : bool
        Whether there are parameters `up_bias` (hidden,) and `down_bias` (dim,), of zeros at the
        start.
    gain : float
        `down` starts normal with standard deviation gain / sqrt(hidden).
    """

    recordable = True
    mixes_positions = False

    up: Array
    up_bias: Array | None = None

    def __init__(self, dim: int, hidden: int, bias: bool = True, gain: float = 1.0):
        super().__init__(dim, hidden, "up", hidden, bias, gain)

    def projections(self) -> dict[str, Projection]:
        return {"c_fc": Projection("up", 0, self.hidden), "c_proj": Projection("down", 0, self.dim)}

    def _f(self, inner: Array) -> Array:
        return self.stage.kernels.gelu(inner)

    def _f_backward(self, df: Array, inner: Array) -> tuple[Array, Array]:
        return self.stage.kernels.gelu_backward(df, inner), inner

    _f_of = _f


class SwiGLU(_TwoProducts):
    """The gated feed-forward layer: y = (silu(x G^T) * (x U^T)) D^T over the last axis of x.

    silu(g) = g * sigmoid(g) (Shazeer, "GLU variants improve transformer", 2020). The parameter
    `gate_up` is G above U, (2 * hidden, dim), so that both are one product; `down` is D, (dim,
    hidden).

    Parameters
    ----------
    dim, hidden : int
        Size of the last axis of x and y, and inner width.
    gain : float
        `down` starts normal with standard deviation gain / sqrt(hidden).
    bias : bool
        Whether there are parameters `gate_up_bias` (2 * hidden,) and `down_bias` (dim,), of zeros
        at the start.
    """

    recordable = True
    mixes_positions = False

    gate_up: Array
    gate_up_bias: Array | None = None

    def __init__(self, dim: int, hidden: int, gain: float = 1.0, bias: bool = False):
        super().__init__(dim, hidden, "gate_up", 2 * hidden, bias, gain)

    def projections(self) -> dict[str, Projection]:
        halves = stacked_projections("gate_up", {"gate_proj": self.hidden, "up_proj": self.hidden})
        return {**halves, "down_proj": Projection("down", 0, self.dim)}

    def _f(self, inner: Array) -> Array:
        return self.stage.kernels.swiglu(inner)

    def _f_backward(self, df: Array, inner: Array) -> tuple[Array, Array]:
        return self.stage.kernels.swiglu_backward(inner, df)


class Gelu(Layer):
    """y = x (1 + tanh(u)) / 2, element by element, with u = sqrt(2 / pi) (x + 0.044715 x^3).

    The tanh form of Hendrycks and Gimpel, "Gaussian error linear units" (2016); it differs from the
    exact x * Phi(x) by at most 5e-4.
    """

    takes_integers = False
    recordable = True
    mixes_positions = False

    def forward(self, x: Array) -> WithSaved:
        return self.stage.kernels.gelu(x), x

    def backward_input(self, dy: Array, saved: Saved) -> WithPending:
        return self.stage.kernels.gelu_backward(dy, saved), None
