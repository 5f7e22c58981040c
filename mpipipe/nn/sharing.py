"""One storage for a tied parameter that several places of one rank use.

    before   parameters   | ... | w of place 0 |      | ... | w of place 1 |
             gradients    | ... | g of place 0 |      | ... | g of place 1 |
    after    parameters   | ... | w            |      | ... |                 both names are this array
             gradients    | ... | g            |      | ... | part           |

Within a step of a pipeline each place adds to the memory that its gradient had, which is now a part of the gradient.
The pipeline adds up the parts in the order of the places. So the sum has the same bits as over places on several ranks.
Outside of a step all places add to the one gradient.

Tied parameters are the last ones of a stage's buffers. Those that are shared leave them, and `flat` ends before them:
an optimizer, a norm and a cast that go through `flat` meet the parameter once.

The memory of a parameter that leaves, and of its copy to compute with, then lies idle. It cannot be freed without all
other arrays of the buffer moving, and whoever had taken one of them before would train an array that no layer reads.
"""

from __future__ import annotations

from typing import NamedTuple

from mpipipe.nn.stage import Stage


class User(NamedTuple):
    """A place of a parameter on a rank: a stage, and the name that the parameter has there."""

    stage: Stage
    name: str


def share(places: list[tuple[User, User]]) -> None:
    """Let each user compute with the storage of another, as far as that is possible: (user, owner of the storage).

    It is where both stages have one dtype and device, and where no other parameter lies behind the user's. Users that
    have shared before are pointed to their new owner.
    """
    for user, owner in sorted(places, key=_from_the_end):
        stage, name = user
        alike = (stage.dtype, stage.device) == (owner.stage.dtype, owner.stage.device)
        if name in stage.owners or (alike and stage.parameters.ends_with(name)):
            _share(user, owner)


def _from_the_end(place: tuple[User, User]) -> int:
    stage, name = place[0]
    return -stage.parameters.offsets.get(name, 0)


def _share(user: User, owner: User) -> None:
    stage, name = user
    buffers = [
        (stage.parameters, owner.stage.parameters),
        (stage.gradients, owner.stage.gradients),
        (stage.compute, owner.stage.compute),
    ]
    if stage.compute is stage.parameters:
        buffers.pop()
    if name not in stage.owners:
        given_up = [mine.give_up(name) for mine, _ in buffers]
        stage.parts[name] = given_up[1]
        _end(stage)
    for mine, other in buffers:
        mine.point(name, other[owner.name], other.offsets[owner.name] if mine is other else None)
    stage.owners[name] = owner
    layer, key = stage.layer_of[name]
    setattr(layer, key, stage.compute[name])
    stage.use_parts(False)
    layer.bound()


def _end(stage: Stage) -> None:
    """Let the ranges of the optimizer end where the buffer does."""
    end = stage.parameters.flat.size
    stage.decay_ranges = [(start, min(stop, end), decay) for start, stop, decay in stage.decay_ranges if start < end]
