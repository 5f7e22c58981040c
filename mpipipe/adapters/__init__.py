"""Stages and losses from PyTorch and JAX. Either library is imported when it is first needed.

foreign   what both have in common: a layer with parameters in the buffers of its stage
pytorch   a module as a layer, its backward in two halves, its state, ties, losses
jax       layer: a function with its parameters; functions: compiled, with arrays as JAX's
attend    of both: attention over a ring of ranks within a module or a function of one's own
layers    the entries of a list of layers
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from mpipipe import processor
from mpipipe.adapters.foreign import (
    ForeignLayer,
    Tape,
    WithSkips,
    counting,
    let_draw_in_turn,
    seeded,
    skip_names,
)
from mpipipe.adapters.layers import as_layer, check_entries, with_loss
from mpipipe.nn import ForwardAndBackward
from mpipipe.text import optional_library

if TYPE_CHECKING:
    from mpipipe.adapters.jax.layer import JaxLoss, JaxStage
    from mpipipe.adapters.pytorch.attend import TorchAttend
    from mpipipe.adapters.pytorch.layer import TorchStage
    from mpipipe.adapters.pytorch.loss import TorchLoss
    from mpipipe.attention import Local, Ring

__all__ = [
    "jax_attend",
    "jax_loss",
    "jax_stage",
    "torch_attend",
    "torch_loss",
    "torch_stage",
    "with_skips",
]
__dir__ = __all__.copy


def torch_stage(
    module: object,
    *,
    prefix: str = "",
    seed: int = 0,
    gives: Sequence[str] = (),
    takes: Sequence[str] = (),
    ties: Mapping[str, str] | None = None,
    loss: TorchLoss | None = None,
) -> TorchStage:
    """Make a stage of a PyTorch module: an `nn.Stage` whose parameters have the module's names.

    They lie in the flat array of the stage, as their gradients in another, and stay the module's
    own: optimizers of `mpipipe.optim` and of `torch.optim` update them alike, and replicas sum
    their gradients. Raises BackendError where PyTorch is not installed, and ArgumentError for a
    module that cannot be a stage.

    Parameters
    ----------
    module : torch.nn.Module
        Its trainable parameters have one floating dtype, or complex numbers of it, and lie on one
        device. Arguments and results are tensors, or a tuple or dict of them; integers have no
        gradient.
    prefix : str
        In front of the names of parameters, such as "blocks.3.", so that they are unique in the
        whole model.
    seed : int
        Of the random numbers that the module draws, which also depend on stage, step, micro-batch
        and replica.
    gives, takes : sequence of str
        Names of the skips (`schedules.with_skips`) that begin here, for which the module returns
        (y, one tree for each); and of those that end here, for which it is called with one argument
        more each, after those of x.
    ties : mapping of str to str, optional
        Parameters that this stage shares with others: the module's name of each, and any key that
        all of them give.
    loss : TorchLoss, optional
        A loss that is a module: its parameters are trained with this stage, the last one.
    """
    room = _room("pytorch.layer", "torch", "PyTorch")
    entry = with_skips(module, gives=gives, takes=takes, ties=ties)
    layers = [room.TorchLayer(entry)]
    if loss is not None and loss.is_module:
        layers.append(room.LossLayer(loss))
    return room.TorchStage(layers, prefix, seed)


def torch_loss(function: Callable[..., object], *, seed: int = 0) -> TorchLoss:
    """Make the loss of a pipeline, for a last stage of any kind, of a loss function of PyTorch.

    Parameters
    ----------
    function : callable
        `function(output, target)` returns a tensor of one number, the mean over the micro-batch, as
        `torch.nn.functional.cross_entropy` does; or a tuple of it and the weight of the
        micro-batch. A module with parameters trains with the last stage: `torch_stage(module,
        loss=...)`, or as last entry of a list of layers.
    seed : int
        Of the random numbers that it draws, which also depend on step, micro-batch and replica.
    """
    return _room("pytorch.loss", "torch", "PyTorch").TorchLoss(function, seed)


def jax_stage(
    function: Callable[..., object],
    parameters: object,
    *,
    prefix: str = "",
    seed: int = 0,
    gives: Sequence[str] = (),
    takes: Sequence[str] = (),
    ties: Mapping[str, str] | None = None,
    state: object = None,
) -> JaxStage:
    """Make a stage of a JAX function and its parameters.

    The function is compiled, with its gradients, once for each shape of its input. The parameters
    are copied into one flat array, which JAX computes with and optimizers of `mpipipe.optim` update
    in place; `tree` of the stage has their values in the shape of the tree.

    Parameters
    ----------
    function : callable
        `function(parameters, x)` returns y, without side effects. x and y are an array, or several:
        a tuple is given as `function(parameters, a, b)`, a dict as `function(parameters,
        name=...)`. Integers have no gradient. A function with a parameter `key` gets a key of
        `jax.random`, one with `training` whether this is a training.
    parameters : tree of arrays
        Any tree that JAX knows, of arrays of one floating or complex dtype: ArgumentError for
        several, and for numbers of 64 bits while JAX has these switched off. BackendError where JAX
        is not installed.
    prefix, seed, gives, takes, ties : str, int, sequences of str and mapping
        As for `torch_stage`.
    state : tree of arrays, optional
        For a function with a parameter `state`, which returns (y, state): such as statistics of a
        batch normalisation. It follows the forwards of training steps, as the state of a module of
        PyTorch does, and has no gradient.
    """
    room = _room("jax.layer", "jax", "JAX")
    entry = with_skips((function, parameters, state), gives=gives, takes=takes, ties=ties)
    return room.JaxStage([room.JaxLayer(entry)], prefix, seed)


def jax_loss(function: Callable[..., object], *, seed: int = 0) -> JaxLoss:
    """Make the loss of a pipeline, for a last stage of any kind, of a loss function of JAX.

    Parameters
    ----------
    function : callable
        `function(output, target)` returns one number, the mean over the micro-batch, or a tuple of
        it and the weight of the micro-batch. It is compiled. One with a parameter `key` gets a key
        of `jax.random`.
    seed : int
        Of these keys, which also depend on step, micro-batch and replica.
    """
    return _room("jax.layer", "jax", "JAX").JaxLoss(function, seed)


def with_skips(
    entry: object,
    *,
    gives: Sequence[str] = (),
    takes: Sequence[str] = (),
    ties: Mapping[str, str] | None = None,
) -> WithSkips:
    """Make an entry of `mpipipe.cut` and `Task.layers` that gives and takes named values.

    Parameters
    ----------
    entry : torch.nn.Module, (callable, tree of arrays), or callable
        A module of PyTorch, a pair (function of JAX, its parameters), which its first state may
        follow, or a function without arguments that makes one of them on the ranks that need it; or
        a layer of `nn` with just these names.
    gives, takes : sequence of str
        Names of what it gives, for which it returns (y, one tree for each), and of what it takes,
        for which it is called with one argument more each, after x. A later layer takes what it
        gives; what it takes, an earlier layer gives, or the inputs have it (`mpipipe.Branches`).
        ArgumentError for what is no tuple of names.
    ties : mapping of str to str, optional
        Parameters that entries share: the name of each within this entry, and a key that is the
        same for all of them. Modules in the list itself that share a parameter need none; those
        that functions make do.

    Examples
    --------
    >>> from mpipipe import adapters, nn
    >>> def scaled(parameters, x, lead_time):
    ...     return x * (1 + parameters["gain"] * lead_time[:, None]), x
    >>> entry = adapters.with_skips((scaled, {}), takes=("lead_time",), gives=("before",))
    >>> entry.takes, entry.gives
    (('lead_time',), ('before',))
    """
    return WithSkips(
        entry, skip_names(gives, "gives"), skip_names(takes, "takes"), dict(ties or {})
    )


def torch_attend(attend: ForwardAndBackward) -> TorchAttend:
    """Make a module of PyTorch that attends as `attention.Local`, `Ring` or `Ulysses` does.

    With a `Ring` on the ranks that share a sequence, such as `mesh.seq`, it is exact attention over
    the whole sequence, forward and backward, within a `torch_stage` or in a training loop of your
    own. Nothing is copied, but what is not contiguous on a GPU. Each forward and each backward is
    collective.

    `attend` has `forward(q, k, v) -> (out, saved)` and `backward(dout, saved) -> (dq, dk, dv)`, and
    decides on masks, layout and dtypes. Within a stage, messages of its pipeline move while it
    computes.

    The module has no parameters. Called with tensors q, k, v (batch, local seq, heads, head_dim),
    the keys and values with as many heads or a divisor of them, it returns (batch, local seq,
    heads, value_dim). A call raises what the object raises, and ArgumentError within
    `torch.compile`, and where second derivatives are asked for (`create_graph=True`). Raises
    BackendError where PyTorch is not installed, and ArgumentError for what cannot attend.
    """
    return _room("pytorch.attend", "torch", "PyTorch").TorchAttend(attend)


def jax_attend(attend: Local | Ring) -> Callable[[Any, Any, Any], Any]:
    """Make a function of JAX that attends as `attention.Local` or `Ring` does.

    As `torch_attend`, within a `jax_stage`, or in a function of your own, compiled or not. JAX
    calls back to the host, where attention is computed, always in the order of the program. Make it
    once, not within the function.

    Parameters
    ----------
    attend : Local or Ring
        It decides on masks, layout and dtypes. The ranks of a `Ring` are processes; ArgumentError
        for any other object, and BackendError where JAX is not installed.

    Returns
    -------
    callable
        `function(q, k, v)` of arrays of JAX (batch, local seq, heads, head_dim), as for
        `torch_attend`. It has first derivatives in reverse mode. JAX refuses second ones, and it
        within `jax.vmap` and `jax.checkpoint`, when it traces. It raises ArgumentError where arrays
        do not fit. An error of the ring itself is a `JaxRuntimeError` with its text; a `jax_stage`
        raises the error itself.
    """
    return _room("jax.attend", "jax", "JAX").attend_function(attend)


def _room(name: str, library: str, title: str) -> ModuleType:
    """Return the module with the adapter; raises BackendError if its library is not installed."""
    optional_library(
        library, f"compute with {title}", library, "; for a GPU first as its own pages say"
    )
    module = import_module(f"mpipipe.adapters.{name}")
    processor.set_threads(processor.thread_count())
    return module
