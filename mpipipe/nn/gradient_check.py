"""Whether the backward of a layer or a stage gives the gradients of its forward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
SMOOTH = 1e-2  # of what two steps differ by, the error that is left after extrapolation
KINKED = 100.0  # of the same: the most that kinks explain
ROUNDINGS = 1e3  # that a sum may have met, in units of eps
EPS = float(np.finfo(float).eps)
# Of the noise in a value, over the step: five of what it is in the extrapolated difference.
DEVIATIONS = 10.0


def check_gradients(
    stage: Any, x: Any, *, position: Position | None = None, seed: int = 0
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
    """One check: the stage, copies of its input, and what has been found wrong."""

    def __init__(self, stage: Any, x: Any, position: Position | None, seed: int, prefix: str):
        self.stage = stage
        self.random = np.random.default_rng(seed)
        self.more = () if position is None else (position,)
        self.x = _copied(x)
        self.inputs = {
            name: leaf
            for name, leaf in named_leaves(_plain(self.x), "input")
            if leaf.dtype.kind in "fc"
        }
        parameters, self.gradients = (
            {
                name.removeprefix(prefix): array
                for name, array in _named(getattr(stage, holder, None)).items()
            }
            for holder in ("parameters", "gradients")
        )
        self.parameters = {name: parameters[name] for name in self.gradients if name in parameters}
        for name, array in {**self.inputs, **self.parameters}.items():
            if arrays.is_device(array) or array.dtype not in (np.float64, np.complex128):
                raise ArgumentError(
                    "gradients are checked in float64 on the host",
                    found=f"{name}: {array.dtype}",
                    expected="float64 or complex128",
                    remedy='make the stage with dtype="float64", and convert x with '
                    'numpy.asarray(x, "float64")',
                )
        if not self.inputs and not self.parameters:
            raise ArgumentError(
                "nothing to differentiate", found="no floating input and no parameter"
            )
        self.eps = EPS  # relative noise in values
        self.wrong: list[str] = []
        self.differences: dict[str, float] = {}

    def run(self) -> dict[str, float]:
        given = _copied(self.x)
        outputs = [_copied(self.stage.forward(self.x, *self.more)[0]) for _ in range(2)]
        if not all(
            np.array_equal(a, b, equal_nan=True)
            for (_, a), (_, b) in zip(*(named_leaves(y, "y") for y in outputs))
        ):
            self.wrong.append("a second forward of the same input gives another output")
        y, saved = self.stage.forward(self.x, *self.more)
        self.dy = _random_like(outputs[0], self.random)
        before_backward = _copied(y), _copied(self.dy)
        expected = self._backward(saved)
        for name, now, old in zip(
            ("input", "output", "dy"), (self.x, y, self.dy), (given, *before_backward)
        ):
            for (leaf, array), (_, before) in zip(named_leaves(now, name), named_leaves(old, name)):
                if not np.array_equal(array, before, equal_nan=True):
                    self.wrong.append(f"{leaf} was written to")
        if not self.wrong:
            for name, array in {**self.inputs, **self.parameters}.items():
                self._compare_with_differences(name, array, expected[name])
        if not self.wrong:  # else all that follows is wrong, too
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

    def _backward(self, *kept: Any) -> dict[str, np.ndarray]:
        """Return all gradients by name, summed over micro-batches, from `backward` or else from its
        two parts.
        """
        self._clear()
        for saved in kept:
            if hasattr(self.stage, "backward"):
                dx = self.stage.backward(self.dy, saved)
            else:
                dx, pending = self.stage.backward_input(self.dy, saved)
                self.stage.backward_weight(pending)
        return self._gradients(dx)

    def _clear(self) -> None:
        for gradient in self.gradients.values():
            gradient[...] = 0

    def _gradients(self, dx: Any) -> dict[str, np.ndarray]:
        found = {} if dx is None else dict(named_leaves(_plain(dx), "input"))
        for name, array in self.inputs.items():
            shape = getattr(found.get(name), "shape", None)
            if shape != array.shape:
                raise StageError(
                    "the gradient of the input has another shape",
                    found=f"{name}: {shape}",
                    expected=str(array.shape),
                )
        result = {name: np.array(found[name]) for name in self.inputs}
        return result | {name: self.gradients[name].copy() for name in self.parameters}

    def _value(self) -> tuple[float, float]:
        """Return the sum of y * dy, and that of the sizes of its terms."""
        y, _ = self.stage.forward(self.x, *self.more)
        terms = [
            _real(a) * _real(b)
            for (_, a), (_, b) in zip(named_leaves(y, "y"), named_leaves(self.dy, "dy"))
            if a.dtype.kind in "fc"
        ]
        return sum(float(np.sum(part)) for part in terms), sum(
            float(np.sum(np.abs(part))) for part in terms
        )

    def _compare_with_differences(self, name: str, array: np.ndarray, gradient: np.ndarray) -> None:
        if not array.size:
            return
        old = array.copy()
        direction = _random_like(array, self.random)
        products = _real(gradient) * _real(direction)
        found = float(np.sum(products))
        scale = float(np.sqrt(np.sum(products**2)))
        largest = max(1.0, float(np.abs(old).max()))

        def value(moved: float) -> tuple[float, float]:
            array[...] = old + moved * largest * direction
            self._refresh()
            return self._value()

        def noise(step: float) -> float:
            """Return the standard deviation of noise in values a step apart, relative to the size
            of their terms.

            It stands out in fourth differences: More and Wild, "Estimating computational noise"
            (2011).
            """
            values, terms = zip(*(value(place * step) for place in range(-4, 4)))
            return float(np.sqrt(np.mean(np.diff(values, 4) ** 2) / 70)) / max(
                *terms, np.finfo(float).tiny
            )

        def compared(step: float, deviation: float = 0.0) -> tuple[float, float, float]:
            """Return the derivative by differences, what of the error noise does not explain, and
            how steps differ.
            """
            ((above, terms), (below, more)), (near, far) = (
                map(value, (step, -step)),
                map(value, (step / 2, -step / 2)),
            )
            coarse = (above - below) / (2 * step * largest)
            fine = (near[0] - far[0]) / (step * largest)
            expected = fine + (fine - coarse) / 3
            rounded = (ROUNDINGS * EPS + DEVIATIONS * deviation) * max(terms, more)
            allowed = rounded / (step * largest) + ROUNDINGS * self.eps * scale
            return expected, abs(found - expected) - allowed, abs(fine - coarse)

        try:
            for step in STEPS:
                expected, error, change = compared(step)
                if not SMOOTH * change < error <= KINKED * change:
                    break
            if not error <= SMOOTH * change and (deviation := noise(STEPS[0])) > ROUNDINGS * EPS:
                deviation = max(
                    deviation, noise(deviation**0.2 / 64)
                )  # few numbers are rounded otherwise that near
                self.eps = max(self.eps, deviation)
                step = (
                    deviation**0.2 / 4
                )  # where noise and the error of the extrapolation are alike
                expected, error, change = compared(step, deviation)
            if not error <= SMOOTH * change:
                ratio = f"{found / expected:.9g} of" if expected else "not"
                self.wrong.append(
                    f"gradient of {name}: {found:.10g} along a random direction, {ratio} the "
                    f"difference {expected:.10g}"
                )
        finally:
            array[...] = old
            self._refresh()
        self.differences[name] = abs(found - expected) / max(
            scale, abs(expected), np.finfo(float).tiny
        )

    def _refresh(self) -> None:
        renew = getattr(self.stage, "sync_compute", None) or getattr(self.stage, "refresh", None)
        if renew is not None:
            renew()

    def _compare_ways(self, expected: dict[str, np.ndarray]) -> None:
        """Compare the gradients that come in another way with those that the differences have shown
        to be right.
        """
        _, saved = self.stage.forward(self.x, *self.more)
        other = mapped(
            lambda array: _random_like(array, self.random) if array.dtype.kind in "fc" else array,
            self.x,
        )
        self.stage.forward(other, *self.more)
        self._compare("after the forward of another micro-batch", self._backward(saved), expected)
        doubled = self._backward(*(self.stage.forward(self.x, *self.more)[1] for _ in range(2)))
        self._compare(
            "added up over two backwards", {n: doubled[n] / 2 for n in self.parameters}, expected
        )
        if hasattr(self.stage, "backward_input") and hasattr(self.stage, "backward_weight"):
            self._clear()
            _, saved = self.stage.forward(self.x, *self.more)
            dx, pending = self.stage.backward_input(self.dy, saved)
            early = [name for name in self.parameters if self.gradients[name].any()]
            # a module of PyTorch with hooks does its whole backward there, once
            if early and not any(
                getattr(layer, "in_one_walk", False) for layer in getattr(self.stage, "layers", ())
            ):
                self.wrong.append(f"backward_input touches the gradient of {', '.join(early)}")
            self.stage.backward_weight(pending)
            self._compare("from backward_input and backward_weight", self._gradients(dx), expected)

    def _compare(
        self, way: str, found: dict[str, np.ndarray], expected: Mapping[str, np.ndarray]
    ) -> None:
        for name, array in found.items():
            size = np.abs(expected[name]).max(initial=0)
            difference = np.abs(array - expected[name]).max(initial=0)
            if not difference <= ROUNDINGS * self.eps * size:
                self.wrong.append(
                    f"gradient of {name} {way}: differs by {difference:.3g}, where it is up to "
                    f"{size:.3g}"
                )


def _plain(tree: Any) -> Any:
    """Return a tree without names of its entries, which gradients need not have."""
    return arrays.unflatten(*arrays.flatten(tree))


def _copied(tree: Any) -> Any:
    return mapped(np.array, tree)


def _random_like(tree: Any, random: np.random.Generator) -> Any:
    def draw(array: np.ndarray) -> np.ndarray:
        if array.dtype.kind == "c":
            return random.standard_normal(array.shape) + 1j * random.standard_normal(array.shape)
        return (
            random.standard_normal(array.shape) if array.dtype.kind == "f" else np.zeros_like(array)
        )

    return mapped(draw, tree)


def _real(array: np.ndarray) -> np.ndarray:
    return arrays.as_reals(np.ascontiguousarray(array))


def _named(holder: Any) -> dict[str, np.ndarray]:
    """Return arrays by name: those of a mapping, or one named "parameters" of an object with
    `flat`.
    """
    if isinstance(holder, Mapping):
        return dict(holder)
    flat = getattr(holder, "flat", None)
    return {} if flat is None else {"parameters": flat}
