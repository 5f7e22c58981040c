"""Parameters that stand in several places of a model (embedding and head): copies with one gradient.

Every place keeps its own copy, so a stage computes without regard to its neighbours. The copies start equal, and after
each step every copy gets the sum of all their gradients, so equal optimizer steps keep them equal. A copy has the
same bits on one rank as on several: sums are taken in the order of the stages.
"""

from __future__ import annotations

import numpy as np

from mpipipe.comm import share
from mpipipe.comm.alarm import wait
from mpipipe.errors import MismatchError


class Ties:
    """The tied parameters of one pipeline.

    Parameters
    ----------
    comm : the pipe's private communicator; the constructor is collective
    stages : this rank's stages; those without the attribute `ties` have none
    numbers : their logical numbers
    """

    def __init__(self, comm, stages, numbers):
        mine: dict = {}
        for stage, number in zip(stages, numbers):
            for key, names in getattr(stage, "ties", {}).items():
                mine.setdefault(key, []).extend((number, stage, name) for name in names)
        facts = {
            key: [(number, name, stage.parameters[name].shape, stage.parameters[name].dtype.name)
                  for number, stage, name in members]
            for key, members in mine.items()
        }
        table = share.agree(comm, None, facts)
        self.groups = []
        for key in sorted({key for entry in table for key in entry}):
            everyone = sorted(member for entry in table for member in entry.get(key, []))
            if len(everyone) > 1:
                _check_alike(key, everyone)
                self._join(comm, mine.get(key, []), everyone, sum(key in entry for entry in table))

    def _join(self, comm, members, everyone, ranks):
        """Make the group of one key, and start all copies from the first one's values."""
        group = None
        if ranks > 1:
            group = comm.Split(0 if members else 1, everyone.index(_fact(members[0])) if members else comm.rank)
            if not members:
                group.Free()
                return
        elif not members:
            return
        first = members[0][1].parameters[members[0][2]]
        values = first if group is None else share.broadcast(group, first)
        for number, stage, name in members:
            stage.parameters[name][...] = values
            if (number, name) != everyone[0][:2]:
                stage.tied_copies.add(name)
        self.groups.append((group, [stage.gradients[name] for _, stage, name in members]))

    def sum_gradients(self):
        """Give every copy the sum of all copies' gradients."""
        for group, gradients in self.groups:
            total = gradients[0].copy()
            for gradient in gradients[1:]:
                total += gradient
            if group is not None:
                parts = np.empty((group.size, *total.shape), total.dtype)
                wait(group.Iallgather(total, parts))
                total = parts[0]
                for part in parts[1:]:
                    total += part
            for gradient in gradients:
                gradient[...] = total

    def close(self):
        """Free the communicators; collective over each group."""
        for group, _ in self.groups:
            if group is not None:
                group.Free()
        self.groups = []


def _fact(member):
    number, stage, name = member
    return (number, name, stage.parameters[name].shape, stage.parameters[name].dtype.name)


def _check_alike(key, everyone):
    for number, name, shape, kind in everyone[1:]:
        if (shape, kind) != everyone[0][2:]:
            raise MismatchError(
                f"tied parameters {key!r} differ",
                stage=number,
                found=f"{name}: {kind}{list(shape)}",
                expected=f"{everyone[0][3]}{list(everyone[0][2])}, as {everyone[0][1]} of stage {everyone[0][0]}",
            )
