"""What was measured: seconds and bytes of layers, of messages, and of the rest of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class LayerCosts(NamedTuple):
    """Seconds of one layer for one micro-batch.

    Parameters
    ----------
    forward, backward, input_grad, weight_grad : float
        Of the forward, of both gradients in one go, and of each by itself.
    again : float
        What is added where the forward is run again right before the backward. It may be less than
        the forward: what the backward needs is then still in a cache.
    """

    forward: float
    backward: float
    input_grad: float
    weight_grad: float
    again: float


@dataclass(frozen=True)
class RankCosts:
    """Seconds on one rank for one size of micro-batch.

    Parameters
    ----------
    layers : tuple of LayerCosts
        One for each kind of layer.
    loss, action : float
        Of the loss of one micro-batch, and what an action lasts longer than its layers, without
        messages.
    """

    layers: tuple[LayerCosts, ...]
    loss: float = 0.0
    action: float = 0.0


@dataclass(frozen=True)
class Link:
    """Seconds of one message between two ranks.

    Parameters
    ----------
    message, transfer : float
        For which sending it, or receiving it, keeps a rank from computing; and until it is there,
        beyond that.
    """

    message: float = 0.0
    transfer: float = 0.0


@dataclass
class Sizes:
    """Bytes of a layer, or of a stage, for one micro-batch, whose input is not counted.

    Parameters
    ----------
    tables, shared : float
        Left by the first micro-batch for all others: of a layer, and of its stage.
    input, output : float
        Arrays that come in, and that a forward returns.
    drawing : float
        Taken besides the parameters and gradients while initial values are drawn.
    saved, keeps_output, keeps_input : float
        Kept from a forward for its backward: of neither output nor input, and of these.
    pending, added, pends_input : float
        Kept from the input gradient for the weight gradient, in all, of what was not saved, and of
        the input.
    loss : float
        Gradient of the loss.
    forward, backward, input_grad, weight_grad : float
        Most that the action allocates at once, with its results.
    """

    tables: float = 0
    shared: float = 0
    input: float = 0
    output: float = 0
    drawing: float = 0
    saved: float = 0
    keeps_output: float = 0
    keeps_input: float = 0
    pending: float = 0
    added: float = 0
    pends_input: float = 0
    loss: float = 0
    forward: float = 0
    backward: float = 0
    input_grad: float = 0
    weight_grad: float = 0


def joined(layers: Sequence[Sizes]) -> Sizes:
    """Return the bytes of layers in a row: an array between two of them is there once."""
    tables = shared = weight_grad = 0.0
    saved = pending = added = forward = backward = input_grad = 0.0
    before = Sizes()
    for layer in layers:
        tables += layer.tables
        shared = max(shared, layer.shared)
        forward = max(forward, saved + before.output + layer.forward)
        weight_grad = max(weight_grad, layer.weight_grad)
        saved += max(before.keeps_output, min(layer.keeps_input, before.output)) + layer.saved
        pending += layer.pending + min(layer.pends_input, before.output)
        before = layer
    gradient = 0.0  # none for the output of the last layer
    for layer in reversed(layers):
        backward = max(backward, gradient + layer.backward)
        input_grad = max(input_grad, added + gradient + layer.input_grad)
        added += layer.added
        gradient = layer.input
    return Sizes(
        tables=tables + shared,
        input=layers[0].input,
        output=before.output,
        saved=saved + before.keeps_output + before.loss,
        pending=pending,
        forward=forward,
        backward=backward,
        input_grad=input_grad,
        weight_grad=weight_grad,
    )


@dataclass(frozen=True)
class Profile:
    """All that predictions are made of. Sequences of a micro-batch are the keys of mappings.

    Parameters
    ----------
    kinds : tuple of int
        The kind of each layer of the model; layers of one kind cost the same.
    costs : mapping of int to tuple of RankCosts
        For each rank of the pipeline.
    links : mapping of int to Link
        The mean one.
    sizes : mapping of int to sequence of Sizes
        For each layer of the model, the same on all ranks.
    states : tuple of int
        For each layer bytes of parameters, gradients and optimizer's state.
    scale : float
        By which real steps last longer than the simulated schedule.
    process : int
        Bytes of a rank besides all that: Python with its libraries and MPI.

    Examples
    --------
    >>> from mpipipe.planning import LayerCosts, Link, Profile, RankCosts, Sizes
    >>> rank = RankCosts((LayerCosts(1.0, 2.0, 1.0, 1.0, 1.0),))
    >>> profile = Profile(
    ...     kinds=(0, 0), costs={4: (rank, rank)}, links={4: Link()},
    ...     sizes={4: [Sizes(saved=100)] * 2}, states=(8, 8),
    ... )
    >>> profile.ranks
    2
    """

    kinds: tuple[int, ...]
    costs: Mapping[int, tuple[RankCosts, ...]]
    links: Mapping[int, Link]
    sizes: Mapping[int, Sequence[Sizes]]
    states: tuple[int, ...]
    scale: float = 1.0
    process: int = 0

    @property
    def ranks(self) -> int:
        """Number of ranks of the pipeline."""
        return len(next(iter(self.costs.values())))
