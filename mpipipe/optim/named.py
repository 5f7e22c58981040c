"""The state of an optimizer by the names of the parameters that it belongs to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mpipipe.arrays import Array
from mpipipe.errors import ArgumentError
from mpipipe.optim.stages import Updated


def named(stages: Sequence[Updated], states: Sequence[Mapping[str, Array]]) -> dict[str, dict[str, Array]]:
    """Return views of flat state buffers: {kind: {name of a parameter: array of its shape}}.

    A tied parameter that several places of this rank share has one state, which appears under the name of each place.

    Parameters
    ----------
    stages : of an optimizer
    states : for each of them its buffers by kind, with the offsets of the stage's parameters

    Raises ArgumentError if two stages have a parameter of the same name, or share one with a stage that is not here.
    """
    buffers = {id(stage): state for stage, state in zip(stages, states)}
    found: dict[str, dict[str, Array]] = {kind: {} for state in states for kind in state}
    for stage in stages:
        for name, like in stage.gradients.items():
            owner, there = stage.owners.get(name, (stage, name))
            if id(owner) not in buffers:
                raise ArgumentError(
                    f"the tied parameter {name} belongs to a stage that this optimizer does not have",
                    stage=stage.index,
                    remedy="give the optimizer all stages of this rank",
                )
            start = owner.parameters.offsets[there]
            for kind, buffer in buffers[id(owner)].items():
                if name in found[kind]:
                    raise same_name(name)
                found[kind][name] = buffer[start : start + like.size].reshape(like.shape)
    return found


def same_name(name: str, ranks: Sequence[int] = ()) -> ArgumentError:
    """Make the error for two parameters of one name, on one rank or on these."""
    where = f"on ranks {' and '.join(map(str, ranks))}" if ranks else "of this rank"
    return ArgumentError(
        f"two stages {where} have a parameter {name}",
        expected="names that are the parameters' own in the whole model",
        remedy="give each nn.Stage its place in the model: first=0 for the first, and so on; torch_stage and jax_stage "
        "a prefix; and the arrays of a stage of your own names with its number in front",
    )
