"""Compare the backward of a layer or a stage with difference quotients of its forward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np

from mpipipe import arrays
from mpipipe.arrays import mapped, named_leaves
from mpipipe.errors import ArgumentError, StageError
from mpipipe.nn.layers.layer import Layer, Position
from mpipipe.nn.stage import Stage

# Steps of central differences, times the size of the values. After Richardson's extrapolation the
# error of the first is STEPS[0]^4. The others are for kinks such as that of max(x, 0): fewer
# elements cross theirs in a smaller step.
STEPS = (2e-4, 1e-5, 5e-7)
# Error that is left after extrapolation, relative to the difference of two steps.
SMOOTH = 1e-2
# The most that kinks explain, relative to the same.
KINKED = 100.0
# Roundings that a sum may have met, in units of eps.
ROUNDINGS = 1e3
NamedArrays: TypeAlias = "dict[str, np.ndarray]"
EPS = float(np.finfo(float).eps)
TINY = float(np.finfo(float).tiny)
# Of the noise in a value, over the step: five of what it is in the extrapolated difference.
DEVIATIONS = 10.0


def check_gradients(
    stage: object, x: object, *, position: Position | None = None, seed: int = 0
) -> dict[str, float]:
    """Compare the backward of a layer or a stage with its forward, in float64.

    For a random gradient dy of the output, the derivative of sum(y * dy) along a random direction
    of the input, and of each parameter, is found by central differences of the forward (two steps,
    with Richardson's extrapolation), and compared with the scalar product of the direction and the
    gradient: the adjoint test. Then the same gradients must come

    - from `backward_input` and `backward_weight`, where the stage has them;
    - after another micro-batch has gone forward in between, and in a second forward of the same
      input, which recomputation relies on;
    - twice as large from a second micro-batch: gradients of parameters are added to those that are
      there.

    Arguments and outputs must stay as they are. Complex arrays are pairs of real ones. Where a
    forward computes in lower precision inside, the noise that this leaves in its values sets steps
    and tolerances.

    Parameters
    ----------
    stage : nn.Layer, nn.Stage, or stage of your own
        A layer that belongs to no stage yet is bound to one. A stage computes in float64 on the
        host. A stage of your own has `parameters` and `gradients`: mappings of names to arrays, or
        objects with an array `flat`; or neither.
    x : array, tuple or dict of arrays, or Branches
        An input, such as it comes in training; float64 where it is not integers.
    position : nn.Position, optional
        Of the micro-batch, for a stage whose forward takes one.
    seed : int
        Of the random directions.

    Returns
    -------
    dict of str to float
        Differences relative to the size of the terms, by the names "input" and those of parameters.

    Raises
    ------
    StageError
        A gradient is wrong; `found` names it, with its value, that of the differences, and their
        ratio.
    ArgumentError
        An array is not float64, or x has nothing to differentiate.

    Examples
    --------
    >>> import numpy as np
    >>> from mpipipe import nn
    >>> from mpipipe.errors import StageError
    >>> differences = nn.check_gradients(nn.Linear(3, 2), np.ones((4, 3)))
    >>> sorted(differences), max(differences.values()) < 1e-9
    (['bias', 'input', 'weight'], True)
    >>> class Half(nn.Linear):
    ...     def backward_weight(self, pending):
    ...         dy, x = pending
    ...         super().backward_weight((dy / 2, x))
    >>> try:
    ...     nn.check_gradients(Half(3, 2), np.ones((4, 3)))
    ... except StageError as error:
    ...     print(error.found.partition(" along")[0].partition(":")[0])
    gradient of weight
    """
    prefix = ""
    if isinstance(stage, Layer):
        stage = Stage([stage], dtype="float64", seed=seed)
        prefix = "0."
    return _Check(stage, x, position, seed, prefix).run()


class _Check:
    """One check: the stage, copies of its input, and what has turned out to be wrong."""

    def __init__(self, stage: Any, x: object, position: Position | None, seed: int, prefix: str):
        self.stage = stage
        self.random = np.random.default_rng(seed)
        self.more: tuple[Position, ...] = ()
        if position is not None:
            self.more = (position,)
        self.x = _copied(x)
        self.inputs = {}
        for name, leaf in named_leaves(_plain(self.x), "input"):
            if leaf.dtype.kind in "fc":
                self.inputs[name] = leaf
        self.gradients = _named(getattr(stage, "gradients", None), prefix)
        self.parameters = {}
        for name, array in _named(getattr(stage, "parameters", None), prefix).items():
            if name in self.gradients:
                self.parameters[name] = array
        self.variables = {**self.inputs, **self.parameters}
        for name, array in self.variables.items():
            if arrays.is_device(array) or array.dtype not in (np.float64, np.complex128):
                raise ArgumentError(
                    "gradients are checked in float64 on the host",
                    found=f"{name}: {array.dtype}",
                    expected="float64 or complex128",
                    remedy='make the stage with dtype="float64", and convert x with '
                    'numpy.asarray(x, "float64")',
                )
        if not self.variables:
            raise ArgumentError(
                "nothing to differentiate", found="no floating input and no parameter"
            )
        self.eps = EPS  # relative noise in values
        self.wrong: list[str] = []
        self.differences: dict[str, float] = {}

    def run(self) -> dict[str, float]:
        x = _copied(self.x)
        first = _copied(self._forward()[0])
        if _changed(self._forward()[0], first, "output"):
            self.wrong.append("a second forward of the same input gives another output")
        y, saved = self._forward()
        self.dy = _random_like(first, self.random)
        dy = _copied(self.dy)
        expected = self._backward(saved)
        written = _changed(self.x, x, "input")
        written += _changed(y, first, "output") + _changed(self.dy, dy, "dy")
        self.wrong += [f"{name} was written to" for name in written]
        if not self.wrong:
            for name, array in self.variables.items():
                self._compare_with_differences(name, array, expected[name])
        if not self.wrong:
            self._compare_ways(expected)
        if self.wrong:
            raise StageError(
                "the backward does not give the gradients of the forward",
                found="; ".join(self.wrong),
                expected="the derivatives of sum(y * dy), in every way to compute them",
                remedy="compare backward with the formulas of forward; what a micro-batch needs "
                "belongs into `saved`",
            )
        return self.differences

    def _forward(self) -> tuple[Any, Any]:
        return self.stage.forward(self.x, *self.more)

    def _backward(self, *several: object) -> NamedArrays:
        """Return all gradients by name, summed over what several forwards have saved."""
        self._clear()
        for saved in several:
            if hasattr(self.stage, "backward"):
                dx = self.stage.backward(self.dy, saved)
            else:
                dx, pending = self.stage.backward_input(self.dy, saved)
                self.stage.backward_weight(pending)
        return self._gradients(dx)

    def _clear(self) -> None:
        for gradient in self.gradients.values():
            gradient[...] = 0

    def _gradients(self, dx: object) -> NamedArrays:
        of_input = {}
        if dx is not None:
            of_input = dict(named_leaves(_plain(dx), "input"))
        result = {}
        for name, array in self.inputs.items():
            shape = getattr(of_input.get(name), "shape", None)
            if shape != array.shape:
                raise StageError(
                    "the gradient of the input has another shape",
                    found=f"{name}: {shape}",
                    expected=str(array.shape),
                )
            result[name] = np.array(of_input[name])
        for name in self.parameters:
            result[name] = self.gradients[name].copy()
        return result

    def _value(self) -> tuple[float, float]:
        """Return the sum of y * dy, and that of the sizes of its terms."""
        total = 0.0
        sizes = 0.0
        y = named_leaves(self._forward()[0], "output")
        for (_, leaf), (_, dy) in zip(y, named_leaves(self.dy, "dy")):
            if leaf.dtype.kind in "fc":
                terms = _real(leaf) * _real(dy)
                total += float(np.sum(terms))
                sizes += float(np.sum(np.abs(terms)))
        return total, sizes

    def _compare_with_differences(self, name: str, array: np.ndarray, gradient: np.ndarray) -> None:
        if not array.size:
            return
        old = array.copy()
        direction = _random_like(array, self.random)
        products = _real(gradient) * _real(direction)
        slope = float(np.sum(products))
        scale = float(np.sqrt(np.sum(products**2)))
        unit = max(1.0, float(np.abs(old).max()))

        def value(step: float) -> tuple[float, float]:
            array[...] = old + step * unit * direction
            self._refresh()
            return self._value()

        def noise(step: float) -> float:
            """Return the standard deviation of noise in values, relative to the size of terms.

            It stands out in fourth differences: More and Wild, "Estimating computational noise"
            (2011).
            """
            values, terms = zip(*(value(place * step) for place in range(-4, 4)))
            return float(np.sqrt(np.mean(np.diff(values, 4) ** 2) / 70)) / max(*terms, TINY)

        def compared(step: float, deviation: float = 0.0) -> tuple[float, float, float]:
            """Return the slope by differences, its unexplained error, and how two steps differ."""
            above, terms = value(step)
            below, more = value(-step)
            coarse = (above - below) / (2 * step * unit)
            fine = (value(step / 2)[0] - value(-step / 2)[0]) / (step * unit)
            expected = fine + (fine - coarse) / 3
            rounded = (ROUNDINGS * EPS + DEVIATIONS * deviation) * max(terms, more)
            allowed = rounded / (step * unit) + ROUNDINGS * self.eps * scale
            return expected, abs(slope - expected) - allowed, abs(fine - coarse)

        try:
            for step in STEPS:
                expected, error, change = compared(step)
                if not SMOOTH * change < error <= KINKED * change:
                    break
            if error <= SMOOTH * change:
                deviation = 0.0
            else:
                deviation = noise(STEPS[0])
            if deviation > ROUNDINGS * EPS:
                # Few numbers are rounded otherwise within a small step, which shows less noise.
                deviation = max(deviation, noise(deviation**0.2 / 64))
                self.eps = max(self.eps, deviation)
                # In this step noise and the error of the extrapolation are alike.
                expected, error, change = compared(deviation**0.2 / 4, deviation)
            if not error <= SMOOTH * change:
                ratio = "not"
                if expected:
                    ratio = f"{slope / expected:.9g} of"
                self.wrong.append(
                    f"gradient of {name}: {slope:.10g} along a random direction, {ratio} the "
                    f"difference {expected:.10g}"
                )
        finally:
            array[...] = old
            self._refresh()
        self.differences[name] = abs(slope - expected) / max(scale, abs(expected), TINY)

    def _refresh(self) -> None:
        renew = getattr(self.stage, "sync_compute", None) or getattr(self.stage, "refresh", None)
        if renew is not None:
            renew()

    def _compare_ways(self, expected: NamedArrays) -> None:
        """Compare gradients that come in other ways with those that differences have confirmed."""
        _, saved = self._forward()
        self.stage.forward(_random_like(self.x, self.random), *self.more)
        self._compare("after the forward of another micro-batch", self._backward(saved), expected)
        doubled = self._backward(self._forward()[1], self._forward()[1])
        halves = {name: doubled[name] / 2 for name in self.parameters}
        self._compare("added up over two backwards", halves, expected)
        if not hasattr(self.stage, "backward_input") or not hasattr(self.stage, "backward_weight"):
            return
        self._clear()
        dx, pending = self.stage.backward_input(self.dy, self._forward()[1])
        early = []
        for name in self.parameters:
            if self.gradients[name].any():
                early.append(name)
        # A module of PyTorch with hooks does its whole backward at once.
        layers = getattr(self.stage, "layers", ())
        if early and not any(getattr(layer, "in_one_walk", False) for layer in layers):
            self.wrong.append(f"backward_input touches the gradient of {', '.join(early)}")
        self.stage.backward_weight(pending)
        self._compare("from backward_input and backward_weight", self._gradients(dx), expected)

    def _compare(self, way: str, gradients: NamedArrays, expected: NamedArrays) -> None:
        for name, array in gradients.items():
            size = np.abs(expected[name]).max(initial=0)
            difference = np.abs(array - expected[name]).max(initial=0)
            if not difference <= ROUNDINGS * self.eps * size:
                self.wrong.append(
                    f"gradient of {name} {way}: differs by {difference:.3g}, where it is up to "
                    f"{size:.3g}"
                )


def _plain(tree: object) -> Any:
    """Return a tree without names of its entries, which gradients need not have."""
    return arrays.unflatten(*arrays.flatten(tree))


def _changed(now: object, before: object, name: str) -> list[str]:
    """Return the names of the leaves of two trees that are not equal."""
    names = []
    for (leaf, array), (_, old) in zip(named_leaves(now, name), named_leaves(before, name)):
        if not np.array_equal(array, old, equal_nan=True):
            names.append(leaf)
    return names


def _copied(tree: object) -> Any:
    return mapped(np.array, tree)


def _random_like(tree: object, random: np.random.Generator) -> Any:
    """Return a tree of random numbers, with zeros for integers: they have no gradient."""

    def draw(array: np.ndarray) -> np.ndarray:
        if array.dtype.kind not in "fc":
            return np.zeros_like(array)
        drawn = random.standard_normal(array.shape)
        if array.dtype.kind == "c":
            return drawn + 1j * random.standard_normal(array.shape)
        return drawn

    return mapped(draw, tree)


def _real(array: np.ndarray) -> np.ndarray:
    return arrays.as_reals(np.ascontiguousarray(array))


def _named(holder: object, prefix: str) -> NamedArrays:
    """Return the arrays of a mapping by name, or the array `flat` of another object."""
    if isinstance(holder, Mapping):
        return {name.removeprefix(prefix): array for name, array in holder.items()}
    flat = getattr(holder, "flat", None)
    if flat is None:
        return {}
    return {"parameters": flat}
