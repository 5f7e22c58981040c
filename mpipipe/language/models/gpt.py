"""A decoder-only transformer from a description: one class for GPT-2, Llama and their kin.

token ids -> Embedding (+ learned positions) -> layers * [x + SelfAttention(norm x), x +
FeedForward(norm x)] -> norm, head -> logits
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from numpy.typing import ArrayLike

from mpipipe import nn
from mpipipe.attention import Local
from mpipipe.errors import ArgumentError, ConfigError
from mpipipe.even_split import even_split
from mpipipe.nn import (
    ROPE_SCALINGS,
    ForwardAndBackward,
    RopeScaling,
    as_attend,
    check_slice_count,
    scaling_of,
)
from mpipipe.planning import count_once, declared
from mpipipe.text import counted

TIE = "tokens"  # key of the matrix that embedding and head share
# Sizes that follow from others where they are not given.
FILLED = ("kv_heads", "hidden", "head_dim")


@dataclass(frozen=True)
class GPT:
    """The description of a GPT, from which it is built layer by layer.

    Parameters
    ----------
    vocab : int
        Number of token ids; 256 for bytes.
    dim, layers, heads : int
        Width; number of transformer blocks; number of attention heads.
    kv_heads : int, optional
        Number of heads of keys and values, a divisor of heads; by default `heads`.
    hidden : int, optional
        Inner width of the feed-forward layers; by default 8/3 dim for SwiGLU, rounded up to a
        multiple of 64, and 4 dim for GELU.
    seq_len : int
        Length of the sequences, for `costs`.
    tied : bool
        Whether embedding and head are one matrix.
    dropout, rope_base : float
        Probability of dropout after attention and feed-forward; base of the rotary position
        embedding.
    head_dim : int, optional
        Width of a head, even for rotary positions; by default dim / heads.
    norm : str
        "rms": `nn.RMSNorm`. "layer": `nn.LayerNorm`.
    eps : float
        Epsilon of all norms.
    positions : str
        "rotary": queries and keys are turned. "learned": a table, whose rows are added to the
        embedding.
    max_positions : int, optional
        Rows of the learned table, at least `seq_len`, which is the default. None for rotary
        positions.
    rope_scaling : RopeScaling, optional
        `nn.LinearScaling`, `nn.Llama3Scaling` or `nn.YarnScaling`; also a mapping, as
        `dataclasses.asdict` makes one.
    qkv_bias, out_bias : bool
        Whether the products to queries, keys and values have a bias, and the one after attention.
    qk_norm : bool
        Whether each head of queries and of keys is normalised (`nn.RMSNorm`, with a gain of its own
        each) before it is turned (Dehghani et al., "Scaling vision transformers to 22 billion
        parameters", 2023).
    windows : tuple of (int or None), optional
        For each layer how many positions a query sees, itself included; None: all before it.
    feed_forward : str
        "swiglu": `nn.SwiGLU`. "gelu": `nn.FeedForward`, with GELU in its tanh form.
    feed_forward_bias : bool
        Whether the products of the feed-forward layers have a bias.
    embedding_scale : float
        Factor on the rows of the embedding, not on learned positions, and not on a tied head.
    head_slices : int
        Number of slices of the vocabulary into which the head is cut, each a layer
        (`nn.HeadSlice`), so that stages can divide it. A tied embedding is cut alike. Values at the
        start are those of the whole head.

    Raises
    ------
    ArgumentError
        For a value that means nothing, and for values that do not go together.

    Examples
    --------
    >>> import numpy as np
    >>> from mpipipe import attention, nn
    >>> from mpipipe.language.models import GPT
    >>> model = GPT(dim=64, layers=2, heads=4)
    >>> layers = model.build(attention.Local())
    >>> model.parameters, len(layers), len(model.costs())
    (139584, 6, 6)
    >>> logits, saved = nn.Stage(layers).forward(np.zeros((1, 16), np.int64))
    >>> logits.shape
    (1, 16, 256)

    The options of GPT-2, with small sizes:

    >>> options = dict(norm="layer", eps=1e-5, positions="learned", tied=True)
    >>> options |= dict(feed_forward="gelu", feed_forward_bias=True, qkv_bias=True, out_bias=True)
    >>> model = GPT(dim=64, layers=2, heads=4, **options)
    >>> model.hidden, model.max_positions
    (256, 128)
    """

    vocab: int = 256
    dim: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = None  # type: ignore[assignment]  # filled in below
    hidden: int = None  # type: ignore[assignment]  # filled in below
    seq_len: int = 128
    tied: bool = False
    dropout: float = 0.0
    rope_base: float = 10000.0
    head_dim: int = None  # type: ignore[assignment]  # filled in below
    norm: str = "rms"
    eps: float = 1e-6
    positions: str = "rotary"
    max_positions: int | None = None
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int | None, ...] | None = None
    feed_forward: str = "swiglu"
    feed_forward_bias: bool = False
    embedding_scale: float = 1.0
    head_slices: int = 1

    def __post_init__(self) -> None:
        check_fields(self)
        self._fill("kv_heads", self.heads)
        check_heads(self)
        check_positions(self)
        check_slice_count(self.head_slices, self.vocab)
        if self.feed_forward == "gelu":
            self._fill("hidden", 4 * self.dim)
        self._fill("hidden", -(-8 * self.dim // (3 * 64)) * 64)
        self._fill("head_dim", self.dim // self.heads)
        if self.positions == "learned":
            self._fill("max_positions", self.seq_len)
        object.__setattr__(self, "windows", checked_windows(self.windows, self.layers))
        object.__setattr__(self, "rope_scaling", checked_scaling(self.rope_scaling))

    def _fill(self, name: str, value: int) -> None:
        if getattr(self, name) is None:
            object.__setattr__(self, name, value)

    def build(
        self,
        attend: ForwardAndBackward | Callable[..., ForwardAndBackward],
        positions: ArrayLike | None = None,
        labels: bool = False,
    ) -> list[nn.Layer]:
        """Build the layers: integers (batch, seq) go in, logits (batch, seq, vocab) come out.

        Parameters
        ----------
        attend : object or callable
            What `nn.SelfAttention` attends with, such as `attention.Local()`; layers with a window
            attend with `attend.with_window(window)`. A function is called for each layer, to make
            an object of its own: without arguments, or, where `windows` is set, as
            `attend(window=window)`, with None for a layer without a window. Where positions are
            learned, it is called once more, first of all, for the layer that adds them.
        positions : 1-D integers, optional
            Positions of the rows in the whole sequence, if a rank holds a part of it; by default 0
            ... seq - 1.
        labels : bool
            Whether slices of the head take labels and give losses in place of logits, as
            `nn.HeadSlice` says; without slices nothing changes.

        Returns
        -------
        list of Layer
            2 * `layers` + 1 + `head_slices` layers: embedding, attention and feed-forward in turn,
            norm with head, or with its first slice, and the other slices. The first one is an
            `nn.Embedding`, or an `nn.Sequential` of that and an `nn.LearnedPositions`.
        """
        tie = None
        if self.tied:
            tie = TIE
        # The last matrix of each of the 2 * layers residual branches starts smaller, so that the
        # sum of all branches has the size of one (Radford et al., "Language models are unsupervised
        # multitask learners", 2019).
        gain = (2 * self.layers) ** -0.5
        attend_with = self._attend_with(attend)
        layers: list[nn.Layer] = [
            nn.Embedding(
                self.vocab,
                self.dim,
                tie=tie,
                scale=self.embedding_scale,
                slices=self.head_slices if self.tied else 1,
            )
        ]
        if self.max_positions is not None:
            table = nn.LearnedPositions(self.max_positions, self.dim, attend_with(None), positions)
            layers = [nn.Sequential([*layers, table])]
        for window in self.windows or (None,) * self.layers:
            layers.append(self._residual(self._attention(attend_with(window), positions, gain)))
            layers.append(self._residual(self._feed_forward(gain)))
        head, *slices = self._heads(tie, f"{len(layers)}.1.weight", labels)
        return [*layers, nn.Sequential([self._norm(), head]), *slices]

    def _heads(self, tie: str | None, name: str, labels: bool) -> list[nn.Layer]:
        """Return the head, or its slices; `name` is that of its weight."""
        of = self.head_slices
        if of == 1:
            return [nn.Head(self.dim, self.vocab, tie=tie)]
        make = partial(nn.HeadSlice, self.dim, self.vocab, of=of, tie=tie)
        return [make(number, labels=labels, stream=name) for number in range(of)]

    def _attend_with(
        self, attend: ForwardAndBackward | Callable[..., ForwardAndBackward]
    ) -> Callable[[int | None], ForwardAndBackward]:
        """Return a function from the window of a layer to its attend object."""
        if callable(attend):
            if self.windows is None:
                return lambda _: attend()
            return lambda window: attend(window=window)

        def attend_with(window: int | None) -> ForwardAndBackward:
            if window is None:
                return attend
            return as_attend(attend).with_window(window)

        return attend_with

    def _attention(
        self, attend: ForwardAndBackward, positions: ArrayLike | None, gain: float
    ) -> nn.Layer:
        return nn.SelfAttention(
            self.dim,
            self.heads,
            self.kv_heads,
            attend,
            positions,
            rope_base=self.rope_base if self.positions == "rotary" else None,
            gain=gain,
            head_dim=self.head_dim,
            rope_scaling=self.rope_scaling,
            qkv_bias=self.qkv_bias,
            out_bias=self.out_bias,
            qk_norm=self.qk_norm,
            eps=self.eps,
        )

    def _feed_forward(self, gain: float) -> nn.Layer:
        if self.feed_forward == "gelu":
            return nn.FeedForward(self.dim, self.hidden, bias=self.feed_forward_bias, gain=gain)
        return nn.SwiGLU(self.dim, self.hidden, gain=gain, bias=self.feed_forward_bias)

    def _norm(self) -> nn.Layer:
        if self.norm == "layer":
            return nn.LayerNorm(self.dim, self.eps)
        return nn.RMSNorm(self.dim, self.eps)

    def _residual(self, layer: nn.Layer) -> nn.Layer:
        dropout = []
        if self.dropout:
            dropout = [nn.Dropout(self.dropout)]
        return nn.PreNormResidual(self._norm(), layer, *dropout)

    def costs(self) -> list[float]:
        """Count the floating-point operations of the forward of each layer of `build`, per token.

        A multiply-add counts as two. Causal scores reach half of the sequence on average, in two
        products; with a window of w positions they reach w - w^2 / (2 seq). A look-up in a table is
        counted as one operation an element. `schedules.partition` takes these costs.
        """
        width = self.heads * self.head_dim
        projections = 2 * self.dim * (2 * width + 2 * self.kv_heads * self.head_dim)
        products = 6
        if self.feed_forward == "gelu":
            products = 4
        tables = 2
        if self.max_positions is None:
            tables = 1
        costs = [float(tables * self.dim)]
        for window in self.windows or (None,) * self.layers:
            if window is None:
                seen = self.seq_len
            else:
                seen = min(window, self.seq_len)
            scores = 4 * width * (seen - seen**2 / (2 * self.seq_len))
            costs += [float(projections + scores), float(products * self.dim * self.hidden)]
        for rows in even_split(self.vocab, self.head_slices):
            costs.append(float(2 * self.dim * len(rows)))
        return costs

    @property
    def parameters(self) -> int:
        """Number of parameters; tied parameters count once."""
        return count_once(declared(self.build(Local())))


# -- How a training makes a model ------------------------------------------------------------------


# Makes a model from the sizes in a configuration, as the class GPT does: called with seq_len, dim,
# layers, heads, kv_heads, hidden, tied, dropout and rope_base by name, and with vocab where the
# data are not bytes. None is its own choice.
Architecture: TypeAlias = Callable[..., GPT]


# -- What the description of a GPT may say: its fields one by one, and together


# Transformer blocks, which is generous: cutting so many into stages takes some seconds.
LAYERS = 4096


def _is_size(value: object) -> bool:
    return type(value) is int and value >= 1


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]  # the types are looked at


SIZES = ("vocab", "dim", "layers", "heads", "seq_len", "head_slices", *FILLED)
SWITCHES = ("qkv_bias", "out_bias", "qk_norm", "feed_forward_bias")
# What a field may be by itself: whether a value fits, and the words for it.
FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(SIZES, (_is_size, "an integer of at least 1")),
    **dict.fromkeys(SWITCHES, (lambda value: type(value) is bool, "True or False")),
    "norm": (("rms", "layer").__contains__, "'rms' or 'layer'"),
    "positions": (("rotary", "learned").__contains__, "'rotary' or 'learned'"),
    "feed_forward": (("swiglu", "gelu").__contains__, "'swiglu' or 'gelu'"),
    "eps": (lambda value: _is_number(value) and value >= 0, "a finite number of at least 0"),
    "embedding_scale": (
        lambda value: _is_number(value) and value != 0,
        "a finite number other than 0",
    ),
    "rope_base": (lambda value: _is_number(value) and value > 1, "a finite number above 1"),
}


def check_fields(model: GPT) -> None:
    """Raise ArgumentError unless each of these fields means something by itself."""
    for name, (fits, expected) in FIELDS.items():
        value = getattr(model, name)
        if not fits(value) and not (value is None and name in FILLED):
            raise _wrong(name, value, expected)


def check_heads(model: GPT) -> None:
    """Raise ArgumentError unless the heads divide the width, where `head_dim` is None."""
    unit = model.heads
    expected = "dim a multiple of heads"
    if model.positions == "rotary":
        unit *= 2
        expected = "dim a multiple of 2 x heads, since rotary positions turn pairs of elements"
    if model.head_dim is None and model.dim % unit:
        raise ArgumentError(
            "the heads do not divide the width of a GPT evenly",
            found=f"dim {model.dim}, heads {model.heads}",
            expected=expected,
            remedy=f"for example dim = {-(-model.dim // unit) * unit}",
        )


def check_positions(model: GPT) -> None:
    """Raise ArgumentError for options of rotary and of learned positions together."""
    learned = model.positions == "learned"
    name = "max_positions"
    other = "learned"
    if learned:
        name = "rope_scaling"
        other = "rotary"
    value = getattr(model, name)
    if value is not None:
        raise ArgumentError(
            f"a GPT with {model.positions} positions has no {name}",
            found=f"{name} {value!r}",
            expected="None",
            remedy=f"say positions={other!r}, or leave {name} out",
        )
    most = model.max_positions
    if most is not None and (not _is_size(most) or most < model.seq_len):
        raise _wrong("max_positions", most, f"an integer of at least seq_len, {model.seq_len}")


def checked_scaling(scaling: Any) -> RopeScaling | None:
    """Return the scaling, made from a mapping where it is one."""
    if isinstance(scaling, Mapping):
        return scaling_of(scaling)
    if scaling is not None and type(scaling) not in ROPE_SCALINGS.values():
        expected = " or ".join(kind.__name__ for kind in ROPE_SCALINGS.values())
        raise _wrong("rope_scaling", scaling, f"None or {expected} of mpipipe.nn")
    return scaling


def checked_windows(windows: Any, layers: int) -> tuple[int | None, ...] | None:
    """Return a window for each layer, or None if no layer has one."""
    if windows is None:
        return None
    fits = type(windows) in (tuple, list) and len(windows) == layers
    if not fits or not all(window is None or _is_size(window) for window in windows):
        expected = f"{counted(layers, 'window')}, each an integer of at least 1, or None"
        raise _wrong("windows", windows, expected)
    if all(window is None for window in windows):
        return None
    return tuple(windows)


def check_layers(layers: int) -> None:
    """Raise ConfigError for more than LAYERS transformer blocks."""
    if layers > LAYERS:
        raise ConfigError(
            "too many layers",
            found=f"layers = {layers:,}",
            expected=f"at most {LAYERS:,}",
            remedy="lower layers",
        )


def _wrong(name: str, value: object, expected: str) -> ArgumentError:
    return ArgumentError(f"{name} of a GPT", found=f"{value!r:.200}", expected=expected)
