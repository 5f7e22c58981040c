"""The functions that layers, losses and optimizers compute with, whatever the device.

T is the dtype of activations, and A = arrays.accumulator(T) that of statistics, gradients of
parameters and, in the optimizers, parameters. Every function computes in A, and rounds once what it
returns in T. Matrices are (rows, width). Arrays are C-contiguous and stay as they are, unless a
function says otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np

from mpipipe.arrays import Array, DeviceArray

# The mean of a loss, on a GPU an array without axes, and the gradient of the output.
LossAndGradient: TypeAlias = "tuple[float | Array, Array]"


class AdamWNumbers(NamedTuple):
    """Scalars of a step of AdamW; at step t the corrections are 1 - b1^t and 1 - b2^t."""

    b1: float
    b2: float
    eps: float
    rate: float
    correction1: float
    correction2: float
    shrink: float


class Update(NamedTuple):
    """How an optimizer's kernel reads gradients, and what it writes besides parameters and state.

    Gradients count `g_scale` times. `copy`, of the size of the parameters in any dtype, becomes the
    new parameters, rounded. On a GPU `g_scale` may be there, () of float64. Where it is NaN, all
    arrays stay as they are.
    """

    g_scale: float | DeviceArray = 1.0
    copy: Array | None = None


class Kernels(Protocol):
    """What each module of kernels holds: `host.any_dtype`, `host.full_precision` and `cuda`."""

    # -- products

    def linear(self, x: Array, weight: Array, bias: Array | None = None) -> Array:
        """Return y = x weight^T + bias (rows, outputs).

        x is (rows, inputs), weight (outputs, inputs), all of T.
        """

    def linear_backward_input(self, dy: Array, weight: Array) -> Array:
        """Return dx = dy weight (rows, inputs).

        dy is (rows, outputs), weight (outputs, inputs), all of T.
        """

    def linear_backward_weight(self, dy: Array, x: Array, grad: Array) -> None:
        """Grad += dy^T x.

        grad (outputs, inputs) is of A, dy (rows, outputs) and x (rows, inputs) of T.
        """

    def products(
        self,
        a: Array,
        b: Array,
        c: Array,
        transpose_a: bool = False,
        transpose_b: bool = False,
        add: bool = False,
    ) -> None:
        """C = a b or, with `add`, c += a b, for each of some problems: c (problems, m, n) of A.

        a is (problems, m, k), or (problems, k, m) with `transpose_a`; b (problems, k, n), or
        (problems, n, k) with `transpose_b`; both of T, with any stride of problems and rows, and no
        gaps in the last axis. One matrix in place of `problems` is that of all of them.
        """

    def sum_rows(self, dy: Array, grad: Array) -> None:
        """Grad += the sum of the rows of dy: grad (width,) of A, dy (rows, width) of T."""

    def add_parts(self, parts: Array, grad: Array) -> None:
        """Grad += the sum of the rows of parts: grad (width,), parts (count, width), of A.

        For what the backward of a normalisation returns: few rows, or many columns.
        """

    # -- single elements, of arrays of any shape

    def add(self, x: Array, y: Array) -> Array:
        """Return x + y, of one shape and dtype."""

    def accumulate(self, grad: Array, part: Array) -> None:
        """Grad += part, of one shape and dtype."""

    def scale(self, x: Array, factor: float, out: Array | None = None) -> Array:
        """Return x * factor, set in `out` where it is given, which may be x."""

    def copy(self, source: Array, target: Array) -> None:
        """Target = source, with any strides.

        Both have one shape, of five axes at most.

        Values are rounded to nearest even in the dtype of the target; what is too large becomes
        infinite.
        """

    def gelu(self, x: Array) -> Array:
        """Return y (see nn.Gelu)."""

    def gelu_backward(self, dy: Array, x: Array) -> Array:
        """Return dx."""

    def swiglu(self, both: Array) -> Array:
        """Return silu(gate) * up (rows, hidden), of both = gate | up (rows, 2 hidden)."""

    def swiglu_backward(self, both: Array, dinner: Array) -> tuple[Array, Array]:
        """Return (gradient of `both`, silu(gate) * up).

        both is (rows, 2 hidden) and dinner (rows, hidden).

        The second result may be written to `dinner`, whose values are lost.
        """

    # -- normalisation of rows

    def norm(self, x: Array, gain: Array, bias: Array | None, eps: float) -> tuple[Array, Array]:
        """Return (y, scale): y = gain * (x - mean) * scale + bias.

        Without a bias y = gain * x * scale.

        Scale (rows,) of A is 1 / sqrt(variance + eps) or, without a bias, 1 / sqrt(mean(x^2) +
        eps); gain and bias are (width,).
        """

    def norm_backward(
        self,
        dy: Array,
        x: Array,
        scale: Array,
        gain: Array,
        centred: bool,
        more: Array | None = None,
    ) -> tuple[Array, ...]:
        """Return (dx, part): `add_parts` makes the gradient of the gain from part, of A.

        There is a second matrix, for the gradient of the bias, where the rows were `centred`: less
        their mean. With `more`, of the shape of dx, the first result is more + dx, in the bits of
        `add`.
        """

    # -- rotary positions

    def rope_table(self, angles: np.ndarray, amplitude: float, dtype: np.dtype) -> Array:
        """Return the factors amplitude exp(i angle) for `apply_rope`.

        `angles` are (seq, head_dim / 2); `dtype` is that of the arrays to turn.
        """

    def apply_rope(self, x: Array, table: Array, target: Array, inverse: bool = False) -> None:
        """Target = each pair of neighbours of x times its factor, or the conjugate.

        x and target (batch, seq, heads, head_dim) of T may have any strides and be the same array;
        table has seq rows.
        """

    # -- embedding

    def embed(self, weight: Array, ids: Array) -> Array:
        """Return row `id` of weight (vocab, dim) for each id: integers (...) give (..., dim) of T.

        An id outside the table gives a row of NaN on a GPU; on the host ids were checked before.
        """

    def embed_backward(self, dy: Array, ids: Array, grad: Array) -> None:
        """Add each row of dy (..., dim) of T to its row of grad (vocab, dim) of A."""

    # -- dropout

    def dropout(
        self,
        x: Array,
        key: np.ndarray,
        counter: tuple[int, int, int],
        threshold: int,
        factor: float,
    ) -> tuple[Array, Array]:
        """Return (y, keep): y = x * factor where `keep`, else 0.

        `keep` has one byte for each element: whether its 16 random bits of (key, counter) reach
        `threshold`. These bits are defined in nn/random.py.
        """

    def dropout_backward(self, dy: Array, keep: Array, factor: float) -> Array:
        """Return dx = dy * factor where `keep`, else 0."""

    # -- losses: (value in float64, gradient of T); the value has no axes, and stays on a GPU

    def mean_squared_error(
        self, output: Array, target: Array, factor: float = 1.0
    ) -> LossAndGradient:
        """Return (mean of (output - target)^2, factor * its gradient).

        The arrays have one shape and floating dtypes.
        """

    def softmax_cross_entropy(
        self, logits: Array, ids: Array, factor: float = 1.0, out: Array | None = None
    ) -> LossAndGradient:
        """Return (mean of -log softmax(logits)[id] over the rows, factor * its gradient).

        logits are (rows, vocab), ids integers (rows,). An id outside of 0 ... vocab - 1 makes the
        value NaN on a GPU. The gradient is set in `out` where that is given: logits itself, or an
        array like it.
        """

    def running_lse(
        self,
        logits: Array,
        ids: Array,
        columns: tuple[int, int],
        before: Sequence[Array],
        after: Sequence[Array],
    ) -> None:
        """Add some columns of logits to running sums L and t.

        L = log(exp(L before) + sum(exp(logits))), and t = t before + logits[id].

        logits (rows, width) are the columns from columns[0] on, of columns[1] in all; t changes
        where id is among them. `before` and `after` are (L, t), each (rows,) of A. An id outside of
        all columns makes t NaN on a GPU.
        """

    def running_lse_backward(
        self, logits: Array, ids: Array, first: int, lse: Array, slopes: Sequence[Array], out: Array
    ) -> None:
        """Out = dL exp(logits - lse), and dt more in column id - first.

        slopes are (dL, dt), each (rows,) of A.

        `lse` is L after. `out` may be logits.
        """

    # -- optimizers: flat arrays of one dtype, float32 or float64

    def adamw(
        self, p: Array, g: Array, m: Array, v: Array, numbers: AdamWNumbers, update: Update
    ) -> None:
        """Make one step of AdamW, in place.

        p = shrink p - rate (m / correction1) / (sqrt(v / correction2) + eps).

        Before that m = b1 m + (1 - b1) g, v = b2 v + (1 - b2) g^2. `shrink` is 1 where weights do
        not decay.
        """

    def sgd(
        self,
        p: Array,
        g: Array,
        u: Array | None,
        momentum: float,
        decay: float,
        rate: float,
        update: Update,
    ) -> None:
        """U = momentum u + g + decay p, then p -= rate u, in place; u is None without momentum."""

    def sums_of_squares(
        self, flat: Array, offsets: Sequence[tuple[int, int]], out: Array | None = None
    ) -> Array:
        """Return the sum of flat[start:stop]^2 for each (start, stop), in float64.

        It lies on the device of `flat`.

        It is set in `out` where that is given.
        """
