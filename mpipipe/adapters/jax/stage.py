"""A function of JAX, with its parameters, as a stage of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from mpipipe import arrays
from mpipipe.adapters.jax import functions, split
from mpipipe.adapters.jax.arrays import JaxArray, Results, is_on_host, put
from mpipipe.adapters.jax.functions import Functions
from mpipipe.adapters.trees import (
    Structures,
    flatten_parts,
    gradient_leaves,
    parts_of,
    skip_names,
    tree_of,
    unflatten_parts,
)
from mpipipe.arrays import Array, Tree
from mpipipe.arrays.trees import Branches
from mpipipe.errors import ArgumentError
from mpipipe.nn import Position, kernels, random
from mpipipe.nn.parameters import FlatBuffer

KINDS = ("float64", "float32", "float16", "bfloat16", "complex128", "complex64")


class Saved(NamedTuple):
    """What the forward of a micro-batch leaves for its backward.

    Attributes
    ----------
    pull : takes gradients of the floating outputs, and gives those of parameters and floating inputs
    structures, floating : of the parts of the input, and which of their arrays take gradients
    output, differentiable : the same of the output
    """

    pull: Any
    structures: Structures
    floating: tuple[bool, ...]
    output: Structures
    differentiable: tuple[bool, ...]


class JaxStage:
    """See `mpipipe.adapters.jax_stage`, which makes it.

    Attributes
    ----------
    function : callable
        The function.
    parameters, gradients : mapping of str to array, or None
        By their paths in the tree: views of one array `.flat` each. JAX computes with the memory of `parameters`.
    device : str
        "cpu" or "cuda".
    gpu : int or None
        Number of the GPU.
    index : int or None
        Number of the stage, set by the pipeline.
    before_write : list of callable
        Called by optimizers of mpipipe before they write parameters.
    """

    takes_branches = False  # without names of skips: one tree in, one tree out

    def __init__(
        self,
        function: Callable[..., Any],
        parameters: Any,
        prefix: str = "",
        seed: int = 0,
        gives: Sequence[str] = (),
        takes: Sequence[str] = (),
    ):
        if not callable(function):
            raise ArgumentError("jax_stage", found=type(function).__name__, expected="a function (parameters, x) -> y")
        self.function, self.seed = function, seed
        self.gives, self.takes = skip_names(gives, "gives of jax_stage"), skip_names(takes, "takes of jax_stage")
        if self.gives or self.takes:
            self.takes_branches = True
        self.index: int | None = None
        self.before_write: list[Callable[[], object]] = []
        paths, self._tree = jax.tree_util.tree_flatten_with_path(parameters)
        leaves = {f"{prefix}{jax.tree_util.keystr(path, simple=True, separator='.')}": leaf for path, leaf in paths}
        on_gpu = any(isinstance(leaf, jax.Array) and not is_on_host(leaf) for leaf in leaves.values())
        self.device = arrays.check_device("cuda" if on_gpu else "cpu")
        self.gpu = arrays.current_gpu() if on_gpu else None
        self.parameters: FlatBuffer | None = None
        self.gradients: FlatBuffer | None = None
        self._results = Results()
        self._functions: dict[tuple, Functions] = {}
        self._values: list[JaxArray] = []
        self._renews = on_gpu
        if leaves:
            self._bind({name: np.asarray(leaf) for name, leaf in leaves.items()})

    def _bind(self, values: dict[str, np.ndarray]) -> None:
        kinds = {value.dtype.name: name for name, value in values.items()}
        if len(kinds) > 1 or not kinds.keys() <= {*KINDS}:
            raise ArgumentError(
                "the parameters of a function must have one dtype, since they lie in one array",
                found=", ".join(f"{kind} ({name})" for kind, name in kinds.items()),
                expected=f"one of {', '.join(KINDS)}",
                remedy="jax.tree.map(lambda x: x.astype(dtype), parameters); constants belong into the function",
            )
        shapes = {name: value.shape for name, value in values.items()}
        kind = arrays.dtype(next(iter(kinds)))
        self.parameters, self.gradients = (FlatBuffer(shapes, kind, self.device) for _ in range(2))
        for name, value in values.items():
            arrays.copy_into(self.parameters[name], arrays.upload(value) if self.gpu is not None else value)
        self._read_parameters()
        if self.gpu is None:  # where JAX has not taken the memory itself, it must be told of each change
            self._renews = any(
                each.size and each.unsafe_buffer_pointer() != arrays.address(own)
                for each, own in zip(self._values, self.parameters.values())
            )

    def _read_parameters(self) -> None:
        self._values = [] if self.parameters is None else [put(each) for each in self.parameters.values()]

    @property
    def tree(self) -> Any:
        """The parameters as a tree of views, shaped as the one that was given."""
        return jax.tree_util.tree_unflatten(self._tree, [] if self.parameters is None else [*self.parameters.values()])

    def refresh(self) -> None:
        """Let JAX see the parameters as they are now. A pipeline does this at the start of each call."""
        if self._renews:
            self._read_parameters()

    def forward(self, x: Tree | Branches, position: Position | None = None) -> tuple[Tree | Branches, Saved | None]:
        """Compute the output of one micro-batch, and in a training step what its backward needs.

        Parameters
        ----------
        x : array, tuple or dict of arrays, or Branches of them
            One argument of the function, after the parameters; several; or several by their names. Those over skips
            come after.
        position : Position, optional
            Where the training stands: it says whether this is a training, and which `key` the function is given.

        Returns
        -------
        y : array, tuple or dict of arrays, or Branches of them
            What the function returned.
        saved : object
            What `backward` takes; None in an evaluation.
        """
        position = Position() if position is None else position
        leaves, structures = flatten_parts(parts_of(x, self.takes))
        floating = tuple(arrays.is_floating(leaf.dtype) for leaf in leaves)
        key = structures, floating
        if key not in self._functions:
            self._functions[key] = Functions(self.function, self._tree, structures, floating, self.gives)
        compiled = self._functions[key]
        some = [put(leaf) for leaf, is_floating in zip(leaves, floating) if is_floating]
        others = [put(leaf) for leaf, is_floating in zip(leaves, floating) if not is_floating]
        arguments = self._values, some, others, self._key(position)
        if not position.training:
            found, rest = compiled.forward(*arguments)
            return self._tree_of(found, rest)[0], None
        found, pull, rest = compiled.with_gradients(*arguments)
        y, output, differentiable = self._tree_of(found, rest)
        return y, Saved(pull, structures, floating, output, differentiable)

    def backward(self, dy: Tree | Branches, saved: Saved) -> Tree | Branches:
        """Add to the gradients of the parameters, and return the gradient of the input.

        Parameters
        ----------
        dy : array, tuple or dict of arrays, or Branches of them
            Gradient of the output, None for integers in it.
        saved : object
            What `forward` saved.

        Returns
        -------
        array, tuple or dict of arrays, or Branches of them
            Gradient of the input, None for integers in it.
        """
        weights, inputs = functions.both(saved.pull, self._floating(dy, saved))
        found = self._results.take([*weights, *inputs])
        self._add(found[: len(weights)])
        return self._input_gradients(found[len(weights) :], saved)

    def backward_input(self, dy: Tree | Branches, saved: Saved) -> tuple[Tree | Branches, Any]:
        """Return the gradient of the input, and what `backward_weight` needs.

        Parameters
        ----------
        dy : array, tuple or dict of arrays, or Branches of them
            Gradient of the output.
        saved : object
            What `forward` saved.

        Returns
        -------
        dx : array, tuple or dict of arrays, or Branches of them
            Gradient of the input.
        pending : object
            What `backward_weight` takes.
        """
        found, pending = split.of_inputs(saved.pull, self._floating(dy, saved))
        return self._input_gradients(self._results.take(found), saved), pending

    def backward_weight(self, pending: Any) -> None:
        """Add to the gradients of the parameters.

        Parameters
        ----------
        pending : object
            What `backward_input` returned.
        """
        if self.gradients is not None:
            self._add(self._results.take(split.of_parameters(pending)))

    def _key(self, position: Position) -> JaxArray:
        """The key of this place: the same in a recomputation, another one everywhere else."""
        names = "jax", self.seed, self.index, position.step, position.microbatch, position.replica
        return jax.random.wrap_key_data(random.key(*names)[:1].view(np.uint32), impl="threefry2x32")

    def _tree_of(self, found: list[JaxArray], rest: list) -> tuple[Tree | Branches, Structures, tuple[bool, ...]]:
        """The output as arrays, the structures of its parts, and which of the arrays take gradients."""
        leaves, structures = flatten_parts(rest, functions.flatten_output)
        floating = tuple(leaf is None for leaf in leaves)
        taken = iter(self._results.take([*found, *(leaf for leaf in leaves if leaf is not None)]))
        some = [next(taken) for _ in found]
        others, floats = list(taken), iter(some)
        integers = iter(others)
        parts = unflatten_parts([next(floats if each else integers) for each in floating], structures)
        return tree_of(parts, self.gives), structures, floating

    def _add(self, found: Sequence[Array]) -> None:
        if self.gradients is not None:
            for total, part in zip(self.gradients.values(), found):
                kernels.of_array(total).accumulate(total, part)

    def _floating(self, dy: Tree | Branches, saved: Saved) -> list[JaxArray]:
        """The gradients of the floating outputs, for JAX."""
        leaves = gradient_leaves(dy, saved.output, self.gives)
        return [put(leaf) for leaf, is_floating in zip(leaves, saved.differentiable) if is_floating]

    def _input_gradients(self, found: Sequence[Array], saved: Saved) -> Tree | Branches:
        source = iter(found)
        leaves = [next(source) if each else None for each in saved.floating]
        return tree_of(unflatten_parts(leaves, saved.structures), self.takes)
