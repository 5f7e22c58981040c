"""Parameters that stand in several places of a model, such as embedding and head.

All places on one rank compute with the array of the first of them. Where places are on several
ranks, each of these has an array of its own, equal to the others: they start equal, and after each
step every one of them gets the sum of the gradients of all places, so equal optimizer steps keep
them equal.

    rank 0   gradient of place 0   <-- messages -->   gradient of place 1   rank 3
             0 + 1                                    0 + 1

A step ends with the exchange: each rank sends the gradients of its places to every other rank that
has one. Then each adds all of them up in the order of the stages. So the sum has the same bits on
all ranks, and on one as on several. Messages and additions are where the gradients are: nothing of
a GPU's passes through the host, unless its messages do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from mpipipe import arrays
from mpipipe.arrays import Array
from mpipipe.comm import Tags, Transport
from mpipipe.errors import ArgumentError, MismatchError
from mpipipe.job import RankGroup, Testable, own
from mpipipe.nn import Stage, kernels, partly_frozen_error
from mpipipe.stages import PipelineStage


class TiedPlace(NamedTuple):
    """One place of a tied parameter, as every rank knows it."""

    key: str  # names the parameter
    stage: int
    rank: int
    inner: int  # number of the nn.Stage in the stage
    name: str
    shape: tuple[int, ...]
    dtype: str
    frozen: bool
    channel: int = 0  # and tag: name of its message to other ranks
    tag: int = 0

    def __str__(self) -> str:
        return f"the tied parameter {self.name} of stage {self.stage} from rank {self.rank}"


def own_places(stages: Mapping[int, PipelineStage], rank: int) -> list[TiedPlace]:
    """Return the places of this rank; ArgumentError if a parameter lies in an absent stage."""
    places = []
    present = [inner for stage in stages.values() for inner in stage.inner_stages]
    for number, stage in stages.items():
        for inner, model in enumerate(stage.inner_stages):
            for name, (owner, owner_name) in model.owners.items():
                if owner not in present:
                    raise ArgumentError(
                        f"the tied parameter {name} lies in the buffer of a stage of an earlier "
                        "pipeline",
                        stage=number,
                        found=f"this rank is not given that stage (there number {owner.index}, "
                        f"where it is {owner_name})",
                        expected="both stages on this rank, or neither",
                        remedy="give this pipeline both; or build a stage of new layers in place "
                        "of this one, and copy its values: new.parameters[name][...] = "
                        "old.parameters[name] for each name",
                    )
            for key, names in model.ties.items():
                for name in names:
                    array = model.parameters[name]
                    kind = array.shape, array.dtype.name, name in model.frozen
                    places.append(TiedPlace(key, number, rank, inner, name, *kind))
    return places


def shared_places(of_ranks: Sequence[Sequence[TiedPlace]], tags: Tags) -> list[list[TiedPlace]]:
    """Return all places of each parameter with a gradient to share, in the order of the stages.

    Their messages go over channels after those of `tags`. MismatchError if places of one parameter
    differ.
    """
    places: dict[str, list[TiedPlace]] = {}
    # A stage keeps the order of its own places.
    for place in sorted(chain(*of_ranks), key=lambda place: (place.key, place.stage)):
        of_key = places.setdefault(place.key, [])
        of_key.append(place)
        first = of_key[0]
        if (place.shape, place.dtype) != (first.shape, first.dtype):
            raise MismatchError(
                f"tied parameters {place.key!r} differ",
                stage=place.stage,
                found=f"{place.name}: {place.dtype}{list(place.shape)}",
                expected=f"{first.dtype}{list(first.shape)}, as {first.name} of stage "
                f"{first.stage}",
            )
        if place.frozen != first.frozen:
            trained = place.name
            if place.frozen:
                trained = first.name
            raise partly_frozen_error(place.key, [trained])
    shared = []
    count = 0
    for same in places.values():
        if len(same) == 1 or same[0].frozen:
            continue
        shared.append(same)
        if len({place.rank for place in same}) > 1:
            for index, place in enumerate(same):
                channel, tag = divmod(count, tags.base)
                same[index] = place._replace(channel=tags.channels + channel, tag=tag)
                count += 1
    return shared


def tie(
    pipe: RankGroup,
    transport: Transport,
    stages: Mapping[int, PipelineStage],
    ties: Sequence[Sequence[TiedPlace]],
) -> list[TiedParameter]:
    """Return the tied parameters with places on this rank; collective."""
    for stage in stages.values():
        for model in stage.inner_stages:
            model.tied_copies.clear()
    tied = []
    shared: list[tuple[User, User]] = []
    for places in ties:
        users = {}
        for place in places:
            if place.rank == pipe.rank:
                users[place] = User(stages[place.stage].inner_stages[place.inner], place.name)
        if users:
            tied.append((places, users))
            of_rank = list(users.values())
            # Storage stays where an earlier pipeline has put it.
            owners = [user for user in of_rank if user.name not in user.stage.owners]
            owner = [*owners, *of_rank][0]
            shared += [(user, owner) for user in of_rank if user is not owner]
    share(shared)
    return [TiedParameter(pipe, transport, *pair) for pair in tied]


class TiedParameter:
    """One parameter that has a place on this rank.

    `places` are in the order of the model; `users` are those of this rank.
    """

    def __init__(
        self,
        pipe: RankGroup,
        transport: Transport,
        places: Sequence[TiedPlace],
        users: Mapping[TiedPlace, User],
    ) -> None:
        self.pipe = pipe
        self.transport = transport
        self.places = places
        self.peers = sorted({place.rank for place in places} - {pipe.rank})
        # The gradient of each place; of one on another rank the buffer that receives it.
        self.parts: list[Array] = []
        # Gradients of this rank that are to be the sum: several where not all is shared.
        self.sums: list[Array] = []
        values: list[Array] = []
        stage, name = next(iter(users.values()))
        like = stage.gradients[name]
        first = users.get(places[0])
        # The array that norms count; None if it is on another rank.
        counted = first and first.stage.owners.get(first.name, first)
        for place in places:
            if place not in users:
                self.parts.append(arrays.empty_like(like))
                continue
            stage, name = user = users[place]
            self.parts.append(stage.buffers.parts.get(name, stage.gradients[name]))
            if user != counted:
                stage.tied_copies.add(name)
            if name not in stage.owners:
                self.sums.append(stage.gradients[name])
                values.append(stage.parameters[name])
        self._start_equal(values, first)

    def _start_equal(self, values: list[Array], user: User | None) -> None:
        """Give all arrays of the parameter the values at its first place, of `user`."""
        first = self.places[0]
        value = values[0]
        if user is not None:
            value = user.stage.parameters[user.name]
        self._wait(self._start(value, first), first)
        for copy in values:
            if copy is not value:
                arrays.copy_into(copy, value)

    def sum_gradients(self) -> None:
        """Give every array of the gradient on this rank the sum of all parts."""
        requests = [*map(self._start, self.parts, self.places)]
        for place, of_place in zip(self.places, requests):
            self._wait(of_place, place)
        # If the first part is of this rank, then it is the first of `sums`.
        total, *others = self.parts
        for part in others:
            kernels.of_array(total).accumulate(total, part)
        for gradient in self.sums:
            if gradient is not total:
                arrays.copy_into(gradient, total)

    def _start(self, array: Array, place: TiedPlace) -> Sequence[tuple[Testable, int]]:
        """Send the array of a place on this rank to all peers, or receive that of another rank."""
        name = place.channel, place.tag
        if place.rank != self.pipe.rank:
            return [(own(self.transport.irecv(array, place.rank, *name)), place.rank)]
        send = self.transport.isend
        return [(own(send(array, peer, *name)), peer) for peer in self.peers]

    def _wait(self, requests: Sequence[tuple[Testable, int]], place: TiedPlace) -> None:
        for request, peer in requests:
            self.pipe.wait(request, place, peer=peer)


# -- One storage for a tied parameter that several places of one rank use --------------------------
#
#     before   parameters   | ... | w of place 0 |      | ... | w of place 1 |
#              gradients    | ... | g of place 0 |      | ... | g of place 1 |
#     after    parameters   | ... | w            |      | ... |            both names are this array
#              gradients    | ... | g            |      | ... | part           |
#
# Within a step of a pipeline each place adds to the memory that its gradient had, which is now a
# part of the gradient. The pipeline adds up the parts in the order of the places. So the sum has
# the same bits as over places on several ranks. Outside of a step all places add to the one
# gradient.
#
# Tied parameters are the last ones of a stage's buffers. Those that are shared leave them, and
# `flat` ends before them: an optimizer, a norm and a cast that go through `flat` meet the parameter
# once.
#
# The memory of a parameter that leaves, and of its copy to compute with, then lies idle. It cannot
# be freed without all other arrays of the buffer moving, and a program that holds one of them would
# train an array that no layer reads.


class User(NamedTuple):
    """A place of a parameter on a rank: a stage, and the name that the parameter has there."""

    stage: Stage
    name: str


def share(places: list[tuple[User, User]]) -> None:
    """Let each user compute with the storage of another, as far as that is possible.

    `places` are (user, owner of the storage).

    It is where both stages have one dtype and device, and where no other parameter lies after the
    user's. Users that have shared before are pointed to their new owner.
    """
    places.sort(
        key=lambda pair: pair[0].stage.parameters.offsets.get(pair[0].name, 0), reverse=True
    )
    for (stage, name), owner in places:
        alike = (stage.dtype, stage.device) == (owner.stage.dtype, owner.stage.device)
        if name not in stage.owners:
            if not alike or not stage.buffers.ends_with(name):
                continue
            stage.buffers.parts[name] = stage.buffers.give_up(name)
        stage.buffers.point(name, owner.stage.buffers, owner.name)
        stage.owners[name] = owner
        layer, key = stage.layer_of[name]
        setattr(layer, key, stage.compute[name])
        stage.use_parts(False)
        layer.bound()
