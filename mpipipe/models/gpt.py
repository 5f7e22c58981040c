"""A decoder-only transformer: RMSNorm before each part, rotary attention, SwiGLU.

token ids -> Embedding -> layers * [x + SelfAttention(RMSNorm x), x + SwiGLU(RMSNorm x)] -> RMSNorm, head -> logits
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

from numpy.typing import ArrayLike

from mpipipe import nn
from mpipipe.attention import Local
from mpipipe.errors import ArgumentError
from mpipipe.nn.layers.attend import ForwardAndBackward

TIE = "tokens"  # key of the matrix that embedding and head share


@dataclass(frozen=True)
class GPT:
    """The sizes of a GPT, from which it is built layer by layer.

    Parameters
    ----------
    vocab : int
        Number of token ids; 256 for bytes.
    dim : int
        Width.
    layers : int
        Number of transformer blocks.
    heads : int
        Number of attention heads; dim / heads is even.
    kv_heads : int, optional
        Number of heads of keys and values, a divisor of heads; by default `heads`.
    hidden : int, optional
        Inner width of SwiGLU; by default 8/3 dim, rounded up to a multiple of 64.
    seq : int
        Length of the sequences, for `costs`.
    tied : bool
        Whether embedding and head are one matrix.
    dropout : float
        Probability of dropout after attention and SwiGLU.
    rope_base : float
        Base of the rotary position embedding.

    Raises
    ------
    ArgumentError
        The sizes do not fit together.

    Examples
    --------
    >>> import numpy as np
    >>> from mpipipe import attention, nn
    >>> from mpipipe.models import GPT
    >>> model = GPT(dim=64, layers=2, heads=4)
    >>> model.parameters
    139584
    >>> layers = model.build(attention.Local())
    >>> len(layers), len(model.costs())
    (6, 6)
    >>> logits, saved = nn.Stage(layers).forward(np.zeros((1, 16), np.int64))
    >>> logits.shape
    (1, 16, 256)
    """

    vocab: int = 256
    dim: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = None  # type: ignore[assignment]  # filled in below
    hidden: int = None  # type: ignore[assignment]  # filled in below
    seq: int = 128
    tied: bool = False
    dropout: float = 0.0
    rope_base: float = 10000.0

    def __post_init__(self) -> None:
        if self.kv_heads is None:
            object.__setattr__(self, "kv_heads", self.heads)
        if self.hidden is None:
            object.__setattr__(self, "hidden", -(-8 * self.dim // (3 * 64)) * 64)
        for entry in fields(self):
            value = getattr(self, entry.name)
            if entry.name not in ("tied", "dropout", "rope_base") and (type(value) is not int or value < 1):
                raise ArgumentError(f"{entry.name} of a GPT", found=repr(value), expected="an integer of at least 1")
        if self.dim % (2 * self.heads):
            raise ArgumentError(
                "the heads do not divide the width of a GPT evenly",
                found=f"dim {self.dim}, heads {self.heads}",
                expected="dim a multiple of 2 x heads, since rotary positions turn pairs of elements",
                remedy=f"for example dim = {-(-self.dim // (2 * self.heads)) * 2 * self.heads}",
            )
        if self.heads % self.kv_heads:
            raise ArgumentError(
                "kv_heads of a GPT is no divisor of heads", found=f"kv_heads {self.kv_heads}, heads {self.heads}"
            )

    def build(
        self, attend: ForwardAndBackward | Callable[[], ForwardAndBackward], positions: ArrayLike | None = None
    ) -> list[nn.Layer]:
        """Build the layers, for stages to bind: integers (batch, seq) go in, logits (batch, seq, vocab) come out.

        Parameters
        ----------
        attend : object or callable
            What `nn.SelfAttention` attends with, such as `attention.Local()`. A function of no arguments is called for
            each layer, to make one of its own: `lambda: attention.Cached(capacity)`.
        positions : 1-D integers, optional
            Positions of the rows in the whole sequence, if a rank holds a part of it; by default 0 ... seq - 1.

        Returns
        -------
        list of Layer
            2 * `layers` + 2 layers: embedding, attention and SwiGLU in turn, norm with head.
        """
        tie = TIE if self.tied else None
        # The last matrix of each of the 2 * layers residual branches starts smaller, so that the sum of all branches
        # has the size of one (Radford et al., "Language models are unsupervised multitask learners", 2019).
        gain = (2 * self.layers) ** -0.5
        layers: list[nn.Layer] = [nn.Embedding(self.vocab, self.dim, tie=tie)]
        for _ in range(self.layers):
            attention = nn.SelfAttention(
                self.dim,
                self.heads,
                self.kv_heads,
                attend() if callable(attend) else attend,
                positions,
                rope_base=self.rope_base,
                gain=gain,
            )
            layers.append(self._residual(attention))
            layers.append(self._residual(nn.SwiGLU(self.dim, self.hidden, gain=gain)))
        head = nn.Linear(self.dim, self.vocab, bias=False, tie=tie)
        layers.append(nn.Sequential([nn.RMSNorm(self.dim), head]))
        return layers

    def _residual(self, layer: nn.Layer) -> nn.Layer:
        parts: list[nn.Layer] = [nn.RMSNorm(self.dim), layer]
        if self.dropout:
            parts.append(nn.Dropout(self.dropout))
        return nn.Residual(nn.Sequential(parts))

    def costs(self) -> list[float]:
        """Count the floating-point operations of each layer's forward per token, for `schedules.partition`.

        A multiply-add counts as two. Causal scores reach half of the sequence on average, in two products. A look-up
        in the embedding is counted as one operation an element.

        Returns
        -------
        list of float
            One cost for each layer of `build`.
        """
        projections = 2 * self.dim * (2 * self.dim + 2 * self.kv_heads * self.dim // self.heads)
        scores = 2 * self.seq * self.dim
        swiglu = 6 * self.dim * self.hidden
        head = 2 * self.dim * self.vocab
        return [float(self.dim), *[float(projections + scores), float(swiglu)] * self.layers, float(head)]

    @property
    def parameters(self) -> int:
        """Number of parameters; tied parameters count once."""
        layers = [layer for top in self.build(Local()) for _, layer in top.walk("")]
        declared = [parameter for layer in layers for parameter in layer.declared.values()]
        tied = {parameter.tie: parameter.size for parameter in declared if parameter.tie is not None}
        return sum(parameter.size for parameter in declared if parameter.tie is None) + sum(tied.values())
