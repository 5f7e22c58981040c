"""A function of JAX with its gradients, compiled: once for each kind of input.

forward        y, pull = vjp(function)       what `pull` holds is what the backward needs, as arrays
backward       pull(dy) -> both gradients
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from inspect import signature
from itertools import compress
from typing import Any, TypeAlias

import jax
import numpy as np

from mpipipe import arrays
from mpipipe.adapters.foreign import (
    THREAD,
    Structures,
    applied,
    flatten_parts,
    floating_of,
    returned,
    spread,
    unflatten_parts,
)
from mpipipe.arrays import Array, Structure, flatten
from mpipipe.errors import ArgumentError
from mpipipe.job import in_place_of

# Parameters that a function may have.
OPTIONS = {"key", "training", "state"}

# jax.Array: JAX may be missing where types are checked.
JaxArray: TypeAlias = Any
JaxTree: TypeAlias = Any
# Gradients of parameters and of inputs, and a function that makes them of those of outputs.
Gradients: TypeAlias = "tuple[list[JaxArray], list[JaxArray]]"
Pull: TypeAlias = "Callable[[list[JaxArray]], Gradients]"


@jax.jit
def both(pull: Pull, dy: list[JaxArray]) -> Gradients:
    """Return (gradients of the parameters, gradients of the inputs).

    All of them are dRe + i dIm: JAX's own are the conjugates.
    """
    return jax.tree.map(jax.numpy.conj, pull(jax.tree.map(jax.numpy.conj, dy)))


def compiled(
    function: Callable[..., JaxTree], tree: JaxTree, gives: Sequence[str]
) -> Callable[..., JaxTree]:
    """Return the compiled form of a function that takes some of `OPTIONS`.

    It takes parameters, inputs, a key, a state, the structures of the inputs, which of them get
    gradients, and whether this is a training. It gives (floating outputs, pull, (the output without
    them, the new state)).
    """
    takes = options_of(function)

    def call(
        values: list,
        inputs: list,
        key: JaxArray,
        state: JaxTree,
        structures: Structures,
        floating: tuple[bool, ...],
        training: bool,
    ) -> JaxTree:
        options = {"key": key, "training": training, "state": state}
        for name in OPTIONS - takes:
            del options[name]

        def run(values: list, some: list) -> JaxTree:
            parameters = jax.tree.unflatten(tree, values)
            leaves = spread(some, floating, inputs)
            output = applied(partial(function, parameters), leaves, structures, **options)
            after = state
            if "state" in takes:
                output, after = with_state(output, state)
            leaves, shapes = flatten_parts(returned(output, gives), flatten_output)
            kinds = floating_of(leaves)
            rest = spread([None] * len(leaves), kinds, leaves)
            return list(compress(leaves, kinds)), (unflatten_parts(rest, shapes), after)

        some = list(compress(inputs, floating))
        if training:
            return jax.vjp(run, values, some, has_aux=True)
        outputs, rest = run(values, some)
        return outputs, None, rest

    return jax.jit(call, static_argnums=(4, 5, 6))


def options_of(function: Callable[..., JaxTree]) -> set[str]:
    """Return which `OPTIONS` a function takes. ArgumentError for arrays that it holds."""
    floating = []
    for leaf in jax.tree.leaves(function):
        if isinstance(leaf, (jax.Array, np.ndarray)) and arrays.is_floating(leaf.dtype):
            floating.append(leaf)
    if floating:
        raise ArgumentError(
            "a function of JAX holds arrays, which would be constants",
            found=f"{type(function).__name__} with {len(floating)} of them",
            expected="a function without arrays of its own",
            remedy="give them as parameters of the stage: equinox.partition(model, "
            "equinox.is_inexact_array), and "
            "combine in the function; a loss gets them from the last stage, next to its output",
        )
    return OPTIONS & signature(function).parameters.keys()


def with_state(output: JaxTree, before: JaxTree) -> tuple[JaxTree, JaxTree]:
    """Return (output, state) of a function with a state. ArgumentError for another state."""
    state = None
    if isinstance(output, tuple) and len(output) == 2:
        state = output[1]
    leaves, tree = jax.tree.flatten(before)
    shapes = list(map(np.shape, leaves))
    leaves, other = jax.tree.flatten(state)
    others = list(map(np.shape, leaves))
    if tree != other or shapes != others:
        raise ArgumentError(
            "a function with a state returns no state like it",
            found=f"{type(output).__name__}, {other} of shapes {others}",
            expected=f"(output, state), the state {tree} of shapes {shapes}",
        )
    return output[0], state


def kinds_of(some: Sequence[Array]) -> tuple:
    """Return the shape and the dtype of each array."""
    return tuple((array.shape, array.dtype) for array in some)


def flatten_output(output: JaxTree) -> tuple[list, Structure]:
    """Return (arrays, structure) of a part of an output; an error of `flatten` for what is no tree.

    The keys of a dict are sorted: JAX sorts them in what leaves a compiled function.
    """
    if output is None or isinstance(output, jax.Array):
        return [output], None
    if isinstance(output, dict):
        output = dict(sorted(output.items()))
    elif isinstance(output, list):
        output = tuple(output)
    return flatten(output)


# -- Arrays as JAX's and back ----------------------------------------------------------------------
#
# On the host both see one memory. JAX's arrays are immutable, so what JAX hands out is read only,
# and what JAX is given may change only while no computation of JAX reads it: each of them is waited
# for before its results leave.


def put(array: Array) -> JaxArray:
    """Return an array of JAX on the memory of an array, or a copy where XLA wants it elsewhere.

    Raises ArgumentError for 64-bit numbers where JAX would make 32-bit ones of them in silence.
    """
    if jax.dtypes.canonicalize_dtype(array.dtype) != array.dtype:
        raise ArgumentError(
            f"an array of {array.dtype} for a function of JAX, which has 64-bit numbers switched "
            "off",
            found=f"{array.dtype}{list(array.shape)}",
            expected="numbers of 32 bits or fewer, or pairs of such (complex64)",
            remedy='jax.config.update("jax_enable_x64", True) at the start, or arrays of float32, '
            "complex64 and int32",
        )
    if arrays.is_device(array):
        raise ArgumentError(
            "an array on a GPU for a function of JAX",
            expected="arrays on the host, where stages and losses of JAX compute",
            remedy="the other stages on the host, too: device='cpu'; or modules of PyTorch",
        )
    return jax.device_put(array, jax.devices("cpu")[0], may_alias=True)


def taken(results: Sequence[JaxArray]) -> list[Array]:
    """Wait for results of JAX; return C-contiguous, read-only arrays on their memory."""
    return list(map(np.asarray, jax.block_until_ready(results)))


# -- Calls that JAX makes back to the host, in a thread of its own or in the one that waits --------
#
# JAX makes an error of its own of an error in such a call, with the text of that. A stage raises
# the error itself.


# Threads of stages that wait for JAX, and errors of calls back since one has begun to wait.
_waiting: list[int] = []
_errors: list[BaseException] = []


@contextmanager
def waiting_for_jax() -> Iterator[None]:
    """Wait for JAX within: calls back are made in place of this thread, and raise their errors."""
    _errors.clear()
    _waiting.append(threading.get_ident())
    try:
        yield
    except Exception:
        if not _errors:
            raise
        raise _errors.pop() from None
    finally:
        _waiting.remove(threading.get_ident())


def called_back(function: Callable[..., object]) -> Callable[..., Any]:
    """Return a method for JAX to call, of a method of numpy arrays."""

    def called(self: object, *inputs: JaxArray) -> Any:
        with in_place_of(_waiting[-1] if _waiting else None):
            THREAD.is_called_back = True
            try:
                return function(self, *map(np.asarray, inputs))
            except BaseException as error:
                _errors.append(error)
                raise
            finally:
                THREAD.is_called_back = False

    return called


def wait_for_calls_back() -> None:
    """Let JAX, which runs ahead, make all calls back that are due, unless this is one of them."""
    if not THREAD.is_called_back:
        jax.effects_barrier()
