"""Parameters that stand in several places of a model (embedding and head): copies with one gradient.

Every place keeps its own copy, so a stage computes without regard to its neighbours. The copies start equal, and after
each step every copy gets the sum of all their gradients, so equal optimizer steps keep them equal. The sum has the same
bits on one rank as on several: it is taken in the order of the stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mpipipe import arrays, nn
from mpipipe.arrays import Array
from mpipipe.comm.group import Group
from mpipipe.comm.requests import own
from mpipipe.comm.types import Communicator
from mpipipe.errors import MismatchError
from mpipipe.pipeline.stage import StageAdapter


class Place(NamedTuple):
    """One copy of a tied parameter, as every rank knows it."""

    stage: int
    inner: int  # which nn.Stage of the stage
    name: str
    shape: tuple[int, ...]
    dtype: str


def tie_facts(stages: Sequence[StageAdapter], numbers: Sequence[int]) -> dict[str, list[Place]]:
    """Tie key -> places on this rank, in the order of the stages."""
    facts: dict[str, list[Place]] = {}
    for stage, number in zip(stages, numbers):
        for inner, model in enumerate(stage.models):
            for key, names in model.ties.items():
                copies = [(name, model.parameters[name]) for name in names]
                places = [Place(number, inner, name, array.shape, array.dtype.name) for name, array in copies]
                facts.setdefault(key, []).extend(places)
    return facts


def check_ties(table: list[dict[str, list[Place]]]) -> None:
    """Raise MismatchError where copies of one parameter differ in shape or dtype; `table` has every rank's facts."""
    for key in sorted({key for facts in table for key in facts}):
        first, *others = sorted(place for facts in table for place in facts.get(key, []))
        for place in others:
            if (place.shape, place.dtype) != (first.shape, first.dtype):
                raise MismatchError(
                    f"tied parameters {key!r} differ",
                    stage=place.stage,
                    found=f"{place.name}: {place.dtype}{list(place.shape)}",
                    expected=f"{first.dtype}{list(first.shape)}, as {first.name} of stage {first.stage}",
                )


class Ties:
    """The tied parameters of one pipeline.

    Parameters
    ----------
    pipe : group of the ranks of the pipeline; the constructor is collective
    stages, numbers : this rank's stages and their logical numbers
    table : tie facts of every rank of the pipe
    """

    def __init__(
        self, pipe: Group, stages: Sequence[StageAdapter], numbers: Sequence[int], table: list[dict[str, list[Place]]]
    ):
        owner = {
            (number, inner): model for number, stage in zip(numbers, stages) for inner, model in enumerate(stage.models)
        }
        self.parameters: list[TiedParameter] = []
        for key in sorted({key for facts in table for key in facts}):
            places = [facts.get(key, []) for facts in table]
            if sum(map(len, places)) > 1:
                comm = pipe.split(0 if places[pipe.rank] else 1, pipe.rank, "ties")
                if places[pipe.rank]:
                    members = [place for place in places if place]
                    self.parameters.append(TiedParameter(pipe, comm, members, owner))
                else:
                    comm.Free()

    def sum_gradients(self) -> None:
        """Give every copy the sum of all copies' gradients."""
        for parameter in self.parameters:
            parameter.sum_gradients()

    def close(self) -> None:
        """Free the communicators; collective over the ranks of each parameter."""
        for parameter in self.parameters:
            parameter.comm.Free()
        self.parameters = []


class TiedParameter:
    """The copies of one parameter: `members` has the places of each rank of `comm`, a part of the pipe."""

    def __init__(
        self, pipe: Group, comm: Communicator, members: list[list[Place]], owner: dict[tuple[int, int], nn.Stage]
    ):
        self.pipe, self.comm = pipe, comm
        mine = members[comm.rank]
        self.gradients = [owner[place.stage, place.inner].gradients[place.name] for place in mine]
        copies = [(p.stage, index, rank) for rank, places in enumerate(members) for index, p in enumerate(places)]
        self.order = [(rank, index) for _, index, rank in sorted(copies)]  # of all copies, as they stand in the model
        self.most = max(map(len, members))
        root, index = self.order[0]
        first = members[root][index]
        values = np.empty(first.shape, arrays.dtype(first.dtype))
        if comm.rank == root:
            values[...] = arrays.download(owner[first.stage, first.inner].parameters[first.name])
        if comm.size > 1:
            request = own(comm.Ibcast(values.view(np.uint8), root))
            pipe.wait(request, "the first values of tied parameters", everyone=True)
        for place in mine:
            _set(owner[place.stage, place.inner].parameters[place.name], values)
            if place != first:
                owner[place.stage, place.inner].tied_copies.add(place.name)

    def sum_gradients(self) -> None:
        """Give every copy the sum of all copies' gradients."""
        shape = self.gradients[0].shape
        here = np.zeros((self.most, *shape), self.gradients[0].dtype)
        for place, gradient in zip(here, self.gradients):
            place[...] = arrays.download(gradient)
        everyone = np.empty((self.comm.size, *here.shape), here.dtype)
        request = own(self.comm.Iallgather(here, everyone))
        self.pipe.wait(request, "the gradients of tied parameters", everyone=True)
        first, *others = self.order
        total = everyone[first]
        for place in others:
            total += everyone[place]
        for gradient in self.gradients:
            _set(gradient, total)


def _set(array: Array, values: np.ndarray) -> None:
    if isinstance(array, np.ndarray):
        array[...] = values
    else:
        arrays.upload(values, out=array)
