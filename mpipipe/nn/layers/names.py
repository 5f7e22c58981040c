"""Named values of a micro-batch: a layer, or the input, gives one, and later layers take it.

    input   x --> Linear --> Keep("arm") --> ... --> Join("arm") --> AdaptiveNorm(..., "time") --> y
            time        arm  `--------------------->'                      ^
              `------------------------------------------------------------'

A layer says in `takes` and `gives` which names it has to do with. In its forward it calls
`stage.taken(name)` and `stage.give(name, tree)`, in its backward `stage.add_gradient(name, tree)`
and `stage.gradient_of(name)`. Between stages names are skips of the schedule. The values stand with
the position of the forward under way, so that `Recompute`, which goes back to that, finds them
again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from keyword import iskeyword
from typing import TYPE_CHECKING, Any

import numpy as np

from mpipipe import arrays
from mpipipe.arrays import Array, Branches, Tree
from mpipipe.errors import ArgumentError
from mpipipe.nn import kernels
from mpipipe.nn.checks import check_features, check_positive
from mpipipe.nn.layers.containers import Sequential
from mpipipe.nn.layers.layer import (
    Differentiable,
    Layer,
    Pending,
    Position,
    Saved,
    WithPending,
    WithSaved,
)
from mpipipe.nn.layers.linear import Linear
from mpipipe.nn.parameters import zeros

if TYPE_CHECKING:
    from mpipipe.nn.stage import Stage


def names_within(outer: Layer) -> Iterator[tuple[str, bool]]:
    """Yield the names that a layer meets, in order, and whether it gives each or takes it."""
    for _, layer in outer.walk(""):
        for name in layer.takes:
            yield name, False
        for name in layer.gives:
            yield name, True


def names_of(layers: Iterable[Layer]) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Return the names that layers take from outside, that they give, and that no layer takes.

    Raises what `ends_of_names` does.
    """
    meetings = []
    for place, layer in enumerate(layers):
        meetings += [(place, *meeting) for meeting in names_within(layer)]
    outside = []
    named = []
    unclaimed = []
    for name, (giver, takers) in ends_of_names(meetings).items():
        if giver is None:
            outside.append(name)
            continue
        named.append(name)
        if not takers:
            unclaimed.append(name)
    return tuple(outside), tuple(named), tuple(unclaimed)


def ends_of_names(
    names: Iterable[tuple[int, str, bool]],
) -> dict[str, tuple[int | None, list[int]]]:
    """Return by name the place of the layer that gives it, and those of all that take it.

    The place is None where the input gives it. `names` are (place, name, whether it is given
    there). Raises ArgumentError where a name is given twice, or by a layer after one that takes it.
    """
    ends: dict[str, tuple[int | None, list[int]]] = {}
    for place, name, gives in names:
        if not gives:
            ends.setdefault(name, (None, []))[1].append(place)
        elif name not in ends:
            ends[name] = place, []
        else:
            giver, takers = ends[name]
            when = "a second time"
            if giver is None:
                when = f"after layers[{takers[0]}] has taken it"
            raise ArgumentError(
                f"layers[{place}] gives the name {name!r} {when}",
                expected="one layer, or the input, that gives it before all layers that take it",
            )
    return ends


def sum_of(some: Tree, more: Tree) -> Tree:
    """Return the sum of two gradients of one tree; both have None for integers."""
    if some is None:
        return more
    if more is None:
        return some
    left, structure = arrays.flatten(some)
    right, _ = arrays.flatten(more)
    sums = []
    for a, b in zip(left, right):
        if b is not None:
            a = kernels.of_array(a).add(a, b)
        sums.append(a)
    return arrays.unflatten(sums, structure)


def handed(x: Tree, values: dict[str, Tree], names: Collection[str]) -> Tree:
    """Return an input with the values of these names, for layers run one after the other.

    What x has under names goes to `values`, where it is found later. Raises ArgumentError where a
    name is not there.
    """
    if isinstance(x, Branches):
        values.update(x.skips)
        x = x.main
    if not names:
        return x
    return Branches(x, **{name: value_of(values, name) for name in names})


def value_of(values: Mapping[str, Tree], name: str) -> Tree:
    """Return what stands under a name; raise ArgumentError where nothing does."""
    if name not in values:
        raise ArgumentError(
            f"there is nothing under the name {name!r}",
            found=", ".join(values) or "no names",
            remedy="a layer lists it in `takes`; one before lists it in `gives` and gives it, or "
            "the inputs have it: mpipipe.Branches(x, name=...)",
        )
    return values[name]


def no_branches_error(stage: str, names: Sequence[str]) -> ArgumentError:
    """Return the error for a stage with skips that knows nothing of them."""
    return ArgumentError(
        "a stage with skips whose forward knows nothing of them",
        found=f"{stage} at {', '.join(names)}",
        expected="a stage of your own, which takes or returns mpipipe.Branches",
        remedy="let layers take and give names (nn.Keep, nn.Join); or call an nn.Stage in the "
        "forward and backward of your own, and list it in inner_stages; give torch_stage and "
        "jax_stage their names",
    )


class PositionOfNames(Position):
    """A position with the values of the forward that is under way there, by their names."""

    values: dict[str, Tree]


class Names(Differentiable):
    """The chain of layers of a stage, with names: Branches come in and go out.

    `comes_in` are the names that the stage is handed, `goes_out` those that it hands on, for which
    it may have been handed some that its layers do not take. `entry` is what micro-batches run
    through: the chain alone where there are no names.
    """

    # True while a `HeadCrossEntropy` makes the product of the `Head` at the end.
    headless = False
    # Layers raise it when one of their attributes changes: CUDA graphs have read these.
    version = 0

    def __init__(self, stage: Stage, layers: Sequence[Layer]) -> None:
        self.stage = stage
        self.chain = Sequential(layers)
        self.chain.stage = stage
        self.takes, self.named, self.unclaimed = names_of(layers)
        self.comes_in = {*self.takes}
        self.goes_out = self.unclaimed
        self.gradients: dict[str, Tree] | None = None  # None outside of a backward
        self.entry: Differentiable = self.chain
        if self.takes or self.named:
            self.entry = self

    def hand_on(self, names: Collection[str]) -> None:
        """Give these names to later stages."""
        if names:
            self.entry = self
        self.goes_out = tuple(names)
        self.comes_in = {*self.takes, *names} - {*self.named}

    def forward(self, x: Tree) -> tuple[Tree, Saved]:
        main, handed = _divided(x)
        if handed.keys() != self.comes_in:
            raise ArgumentError(
                "the layers of a stage take other names than it is handed",
                found=", ".join(sorted(handed)) or "no names",
                expected=", ".join(sorted(self.comes_in)) or "no names",
                remedy="mpipipe.Branches(x, name=...) with each of them, and no other",
            )
        before = self.stage.position
        position = PositionOfNames(*before)
        position.values = values = dict(handed)
        self.stage.position = position
        try:
            y, saved = self.chain.forward(main)
        finally:
            self.stage.position = before  # a backward finds no values of another micro-batch
        outputs = {}
        for name in self.goes_out:
            outputs[name] = value_of(values, name)
        if outputs:
            y = Branches(y, **outputs)
        return y, (saved, handed)

    def backward_input(self, dy: Tree, saved: Saved, whole: bool = False) -> tuple[Tree, Pending]:
        of_layers, handed = saved
        main, gradients = _divided(dy)
        self.gradients = gradients = dict(gradients)
        dx, pending = self.chain.backward_input(main, of_layers, whole)
        self.gradients = None
        if not handed:
            return dx, pending
        # These stay None where backwards end early.
        skips: dict[str, Tree] = dict.fromkeys(handed)
        if not self.chain.lowest:
            for name, value in handed.items():
                skips[name] = gradients.get(name)
                # Where no layer has added one:
                if skips[name] is None:
                    skips[name] = arrays.mapped(_zeros_of, value)
        return Branches(dx, **skips), pending

    def backward_weight(self, pending: Pending) -> None:
        self.chain.backward_weight(pending)

    def backward(self, dy: Tree, saved: Saved) -> Tree:
        return self.backward_input(dy, saved, True)[0]

    def gradients_for(self, name: str, names: Collection[str], which: str) -> dict[str, Tree]:
        """Return the gradients of the backward under way; raise ArgumentError outside of one."""
        if self.gradients is None or name not in names:
            raise ArgumentError(
                f"a layer asks for the gradient of {name!r}, or adds to it",
                found=f"no backward_input under way, or a name that is not in `{which}`",
                expected=f"a call in backward_input, for one of {', '.join(names) or 'no names'}",
            )
        return self.gradients


def _divided(x: object) -> tuple[Tree, dict[str, Tree]]:
    if type(x) is Branches:
        return x.main, x.skips
    return x, {}


def _zeros_of(leaf: Array) -> Array | None:
    if arrays.is_floating(leaf.dtype):
        return arrays.zeros_like(leaf)
    return None


# -- Layers that give and take ---------------------------------------------------------------------


class Keep(Layer):
    """The identity, which gives its input under a name, for layers further on.

    Parameters
    ----------
    name : str
        An identifier; those that take it, such as `Join`, may stand in any later stage.

    Examples
    --------
    >>> import numpy as np
    >>> from mpipipe import nn
    >>> stage = nn.Stage([nn.Keep("arm"), nn.Linear(3, 4), nn.Join("arm")])
    >>> stage.forward(np.ones((2, 3), np.float32))[0].shape
    (2, 7)
    """

    mixes_positions = False

    def __init__(self, name: str):
        self.gives = (checked_name(name),)

    def forward(self, x: Array) -> WithSaved:
        self.stage.give(self.gives[0], x)
        return x, None

    def backward_input(self, dy: Array, saved: Saved) -> WithPending:
        return sum_of(dy, self.stage.gradient_of(self.gives[0])), None


class Join(Layer):
    """Puts what stands under a name after its input, along an axis, or adds it.

    Parameters
    ----------
    name : str
        What `Keep` or another layer has given, or what the inputs have besides the main array
        (mpipipe.Branches).
    axis : int or None
        The axis along which both are put together, by default the last one; not 0, the rows. None
        adds them.
    """

    mixes_positions = True

    def __init__(self, name: str, axis: int | None = -1):
        self.takes = (checked_name(name),)
        self.axis = axis
        self.mixes_positions = axis not in (None, -1)
        if axis == 0:
            raise ArgumentError(
                "axis of Join", found=repr(axis), expected="an axis after the first one, or None"
            )

    def forward(self, x: Array) -> WithSaved:
        other: Any = self.stage.taken(self.takes[0])
        axis = self.axis
        expected = f"{x.dtype}{list(x.shape)}"
        if axis is not None:
            axis %= x.ndim
            expected += f", but for axis {self.axis}"
        fits = arrays.is_array(other) and other.ndim == x.ndim and other.dtype == x.dtype
        if fits:
            differ = np.flatnonzero(np.not_equal(x.shape, other.shape))
            fits = axis != 0 and {*differ} <= {axis}
        if not fits:
            raise ArgumentError(
                f"layer {self.name} (Join): what it takes as {self.takes[0]!r} does not fit its "
                "input",
                found=_described(other),
                expected=expected,
            )
        if axis is None:
            return self.stage.kernels.add(x, other), None
        return arrays.concatenate((x, other), axis), x.shape[axis]

    def backward_input(self, dy: Array, saved: Saved) -> WithPending:
        dx = dother = dy
        if saved is not None:
            axes = (slice(None),) * ((self.axis or 0) % dy.ndim)
            dx = arrays.copied(dy[(*axes, slice(saved))])
            dother = arrays.copied(dy[(*axes, slice(saved, None))])
        self.stage.add_gradient(self.takes[0], dother)
        return dx, None


def _described(value: Any) -> str:
    if not arrays.is_array(value):
        return type(value).__name__
    return f"{value.dtype}{list(value.shape)}"


class AdaptiveNorm(Layer):
    """y = (1 + scale) * (x - mean) / sqrt(variance + eps) + shift, by a named condition.

    The norm is over the last axis. Scale and shift are linear in the condition of a row, the same
    at all its positions. The parameters are those of a `Linear`: `modulation.weight` (2 size,
    condition_size), of zeros at the start, and `modulation.bias`, whose first half, 1 + scale
    without a condition, starts with ones.

    Peebles and Xie, "Scalable diffusion models with transformers" (2023), section 3.2.

    Parameters
    ----------
    size, condition_size : int
        Sizes of the last axis of x, (rows, ..., size), and of the condition, (rows,
        condition_size).
    name : str
        The name of the condition.
    eps : float
        As for `LayerNorm`.
    """

    takes_integers = False

    def __init__(self, size: int, condition_size: int, name: str = "condition", eps: float = 1e-5):
        check_positive(size=size, condition_size=condition_size)
        self.size = size
        self.condition_size = condition_size
        self.eps = eps
        self.takes = (checked_name(name),)
        self.modulation = Linear(condition_size, 2 * size)
        declared = self.modulation.declared
        self.modulation.declared = {
            "weight": replace(declared["weight"], draw=zeros),
            "bias": replace(declared["bias"], draw=_ones_and_zeros),
        }
        self.children = {"modulation": self.modulation}

    def forward(self, x: Array) -> WithSaved:
        check_features(self, x, self.size)
        condition: Any = self.stage.taken(self.takes[0])
        shape = (len(x), self.condition_size)
        if not arrays.is_array(condition) or condition.shape != shape or condition.dtype != x.dtype:
            raise ArgumentError(
                f"layer {self.name} (AdaptiveNorm): {self.takes[0]!r} has the wrong shape",
                found=_described(condition),
                expected=f"{x.dtype}{list(shape)}",
            )
        kernels = self.stage.kernels
        both, of_linear = self.modulation.forward(condition)
        points = x.reshape(len(x), -1, self.size)
        scales = []
        y = self._empty(points.shape, x.dtype)
        for row in range(len(x)):
            gain = both[row, : self.size]
            shift = both[row, self.size :]
            normal, scale = kernels.norm(points[row], gain, shift, self.eps)
            kernels.copy(normal, y[row])
            scales.append(scale)
        return y.reshape(x.shape), (points, both, scales, of_linear)

    def backward_input(self, dy: Array, saved: Saved) -> WithPending:
        points, both, scales, of_linear = saved
        kernels = self.stage.kernels
        dpoints = dy.reshape(points.shape)
        dx = self._empty(points.shape, dy.dtype)
        kind = arrays.accumulator(dy.dtype)
        total = arrays.zeros((len(dx), 2, self.size), kind, self.stage.device)
        for row, scale in enumerate(scales):
            gain = both[row, : self.size]
            result, *sums = kernels.norm_backward(dpoints[row], points[row], scale, gain, True)
            kernels.copy(result, dx[row])
            for half, part in enumerate(sums):
                kernels.add_parts(part, total[row, half])
        dboth = arrays.cast(total.reshape(both.shape), dy.dtype)
        dcondition, pending = self.modulation.backward_input(dboth, of_linear)
        self.stage.add_gradient(self.takes[0], dcondition)
        return dx.reshape(dy.shape), pending

    def backward_weight(self, pending: Pending) -> None:
        self.modulation.backward_weight(pending)


def _ones_and_zeros(_generator: np.random.Generator, shape: arrays.Shape) -> np.ndarray:
    return np.repeat([1.0, 0.0], shape[0] // 2)


def checked_name(name: object) -> str:
    """Return a name of a value; raise ArgumentError unless it is an identifier of Python."""
    if not isinstance(name, str) or not name.isidentifier() or iskeyword(name):
        raise ArgumentError(
            "the name of a value", found=repr(name), expected="an identifier, as in 'residual'"
        )
    return name
