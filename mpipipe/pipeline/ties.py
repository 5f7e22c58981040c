"""Parameters that stand in several places of a model (embedding and head): one array on each rank, with one gradient.

All places on one rank compute with the array of the first of them. Where places are on several ranks, each
of these has an array of its own, equal to the others: they start equal, and after each step every one of them gets the
sum of the gradients of all places, so equal optimizer steps keep them equal.

    rank 0   gradient of place 0   <-- messages -->   gradient of place 1   rank 3
             0 + 1                                    0 + 1

A step ends with the exchange: each rank sends the gradients of its places to every other rank that has one. Then each
adds all of them up in the order of the stages. So the sum has the same bits on all ranks, and on one as on several.
Messages and additions are where the gradients are: nothing of a GPU's passes through the host, unless its messages do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations
from typing import NamedTuple, TypeAlias

from mpipipe import arrays, nn
from mpipipe.arrays import Array
from mpipipe.comm import Settled, Transport
from mpipipe.errors import ArgumentError, MismatchError
from mpipipe.job import RankGroup, Testable, own
from mpipipe.nn import Stage, kernels, partly_frozen_error
from mpipipe.stages import StageAdapter


class TieSite(NamedTuple):
    """One place of a tied parameter, as every rank knows it."""

    stage: int
    inner: int  # which nn.Stage of the stage
    name: str
    shape: tuple[int, ...]
    dtype: str
    frozen: bool = False


Facts: TypeAlias = dict[str, list[TieSite]]  # tie key -> places on one rank, in the order of the stages
Owner: TypeAlias = Mapping[tuple[int, int], nn.Stage]  # (stage, inner) -> the nn.Stage


def tie_facts(stages: Sequence[StageAdapter], numbers: Sequence[int]) -> Facts:
    """Return the facts of this rank; raise ArgumentError for a stage that shares a parameter with an absent one."""
    facts: Facts = {}
    here = {id(model) for stage in stages for model in stage.models}
    for stage, number in zip(stages, numbers):
        for inner, model in enumerate(stage.models):
            for name, (owner, there) in model.owners.items():
                if id(owner) not in here:
                    raise ArgumentError(
                        f"the tied parameter {name} lies in the buffer of a stage of an earlier pipeline",
                        stage=number,
                        found=f"this rank is not given that stage (there number {owner.index}, where it is {there})",
                        expected="both stages on this rank, or neither",
                        remedy="give this pipeline both; or build a stage of new layers in place of this one, and copy "
                        "its values: new.parameters[name][...] = old.parameters[name] for each name",
                    )
            for key, names in model.ties.items():
                copies = [(name, model.parameters[name]) for name in names]
                places = [
                    TieSite(number, inner, name, array.shape, array.dtype.name, name in model.frozen)
                    for name, array in copies
                ]
                facts.setdefault(key, []).extend(places)
    return facts


def check_ties(table: Sequence[Facts]) -> None:
    """Raise MismatchError if places of one parameter differ in shape or dtype; `table` has every rank's facts."""
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
            if place.frozen != first.frozen:
                raise partly_frozen_error(key, [each.name for each in (first, place) if not each.frozen])


class TiedPlace(NamedTuple):
    """A place in the order of all places of its parameter, with the name of its messages."""

    place: TieSite
    rank: int
    channel: int
    tag: int

    def __str__(self) -> str:
        return f"the tied parameter {self.place.name} of stage {self.place.stage} from rank {self.rank}"


class TieNames:
    """The order of all places, and the names of their messages, the same on every rank.

    table : facts of every rank
    first_channel : the channels from this one on are for ties alone
    tags : how many tags a channel has

    order : tie key -> its places, two at least, in the order of the stages
    pairs : pairs of ranks that send to each other
    channels : how many channels they need
    """

    def __init__(self, table: Sequence[Facts], first_channel: int, tags: int) -> None:
        self.order: dict[str, list[TiedPlace]] = {}
        count = 0
        for key in sorted({key for facts in table for key in facts}):
            found = [(rank, index, place) for rank, facts in enumerate(table) for index, place in
                     enumerate(facts.get(key, []))]  # fmt: skip
            if len(found) < 2 or found[0][2].frozen:  # what stays as it is has no gradient to share
                continue
            self.order[key] = []
            for rank, _, place in sorted(found, key=lambda entry: (entry[2].stage, entry[1])):
                channel, tag = divmod(count, tags)
                self.order[key].append(TiedPlace(place, rank, first_channel + channel, tag))
                count += 1
        self.pairs = {
            pair for places in self.order.values() for pair in permutations({place.rank for place in places}, 2)
        }
        self.channels = -(-count // tags) if self.pairs else 0


class Ties:
    """The tied parameters of one pipeline.

    pipe : group of the ranks of the pipeline; the constructor is collective
    transport : carries gradients between ranks, over the channels of `names`
    stages, numbers : this rank's stages and their logical numbers
    names : of all places
    """

    def __init__(
        self,
        pipe: RankGroup,
        transport: Transport,
        stages: Sequence[StageAdapter],
        numbers: Sequence[int],
        names: TieNames,
    ) -> None:
        owner = {
            (number, inner): model for number, stage in zip(numbers, stages) for inner, model in enumerate(stage.models)
        }
        for model in owner.values():
            model.tied_copies.clear()
        share(list(_shared(names, owner, pipe.rank)))
        self.pipe, self.transport = pipe, transport
        self.parameters = [
            TiedParameter(pipe, transport, places, owner)
            for places in names.order.values()
            if any(place.rank == pipe.rank for place in places)
        ]

    def sum_gradients(self) -> None:
        """Give every rank the sum over all places, of each parameter."""
        for parameter in self.parameters:
            parameter.sum_gradients()
        if self.parameters:
            self.pipe.wait(Settled(self.transport), "the gradients of tied parameters to arrive")


def _shared(names: TieNames, owner: Owner, rank: int) -> Iterator[tuple[User, User]]:
    """Yield each further place on this rank of a parameter, with the first one."""
    for places in names.order.values():
        mine = [User(owner[p.place.stage, p.place.inner], p.place.name) for p in places if p.rank == rank]
        if mine:  # the storage stays where an earlier pipeline has put it
            first = next((user for user in mine if user.name not in user.stage.owners), mine[0])
            yield from ((user, first) for user in mine if user is not first)


def _counted(first: TiedPlace, owner: Owner, rank: int) -> tuple[nn.Stage, str] | None:
    """Return the array by which this rank counts a parameter in norms, or None if another rank counts it."""
    if first.rank != rank:
        return None
    user = User(owner[first.place.stage, first.place.inner], first.place.name)
    return user.stage.owners.get(user.name, user)


class TiedParameter:
    """One parameter that has a place on this rank.

    places : in the order of the model
    parts : gradient of each place; the buffers that receive it for places of other ranks
    sums : the gradients of this rank that are to be the sum; more than one where storage could not be shared
    """

    def __init__(self, pipe: RankGroup, transport: Transport, places: list[TiedPlace], owner: Owner) -> None:
        self.pipe, self.transport, self.places = pipe, transport, places
        self.peers = sorted({place.rank for place in places} - {pipe.rank})
        self.parts: list[Array] = []
        self.sums: list[Array] = []
        values: list[Array] = []
        like = next(
            owner[p.place.stage, p.place.inner].gradients[p.place.name] for p in places if p.rank == pipe.rank
        )  # fmt: skip
        counted = _counted(places[0], owner, pipe.rank)
        for place, rank, *_ in places:
            if rank != pipe.rank:
                self.parts.append(arrays.empty_like(like))
                continue
            model = owner[place.stage, place.inner]
            self.parts.append(model.parts.get(place.name, model.gradients[place.name]))
            if (model, place.name) != counted:
                model.tied_copies.add(place.name)
            if place.name not in model.owners:
                self.sums.append(model.gradients[place.name])
                values.append(model.parameters[place.name])
        self._start_equal(values, owner)

    def _start_equal(self, values: list[Array], owner: Owner) -> None:
        """Give all arrays of the parameter the values that it has at its first place."""
        first = self.places[0]
        if first.rank == self.pipe.rank:
            value = owner[first.place.stage, first.place.inner].parameters[first.place.name]
            self._wait([self._send(value, first, peer) for peer in self.peers], first)
        else:
            value = values[0]
            self._wait([self._receive(value, first)], first)
        for copy in values:
            if copy is not value:
                arrays.copy_into(copy, value)

    def sum_gradients(self) -> None:
        """Give every array of the gradient on this rank the sum of all parts."""
        here = self.pipe.rank
        parts = list(zip(self.places, self.parts))
        requests = []
        for place, part in parts:  # in this order on all ranks, as NCCL needs it
            mine = (
                [self._send(part, place, peer) for peer in self.peers]
                if place.rank == here
                else [self._receive(part, place)]
            )
            requests.append((mine, place))
        for mine, place in requests:
            self._wait(mine, place)
        total, *others = self.parts  # if it is of this rank, then it is the first of `sums`
        for part in others:
            kernels.of_array(total).accumulate(total, part)
        for gradient in self.sums:
            if gradient is not total:
                arrays.copy_into(gradient, total)
        for place, part in parts:
            if place.rank != here:
                self.transport.retire(part)

    def _send(self, array: Array, place: TiedPlace, peer: int) -> Testable:
        return own(self.transport.isend(array, peer, place.channel, place.tag))

    def _receive(self, array: Array, place: TiedPlace) -> Testable:
        return own(self.transport.irecv(array, place.rank, place.channel, place.tag))

    def _wait(self, requests: Sequence[Testable], what: TiedPlace) -> None:
        peers = self.peers if what.rank == self.pipe.rank else [what.rank]
        for request, peer in zip(requests, peers):
            self.pipe.wait(request, what, peer=peer)


# -- One storage for a tied parameter that several places of one rank use ---------------------------------------------
#
#     before   parameters   | ... | w of place 0 |      | ... | w of place 1 |
#              gradients    | ... | g of place 0 |      | ... | g of place 1 |
#     after    parameters   | ... | w            |      | ... |                 both names are this array
#              gradients    | ... | g            |      | ... | part           |
#
# Within a step of a pipeline each place adds to the memory that its gradient had, which is now a part of the gradient.
# The pipeline adds up the parts in the order of the places. So the sum has the same bits as over places on several
# ranks. Outside of a step all places add to the one gradient.
#
# Tied parameters are the last ones of a stage's buffers. Those that are shared leave them, and `flat` ends before them:
# an optimizer, a norm and a cast that go through `flat` meet the parameter once.
#
# The memory of a parameter that leaves, and of its copy to compute with, then lies idle. It cannot be freed without all
# other arrays of the buffer moving, and whoever had taken one of them before would train an array that no layer reads.


class User(NamedTuple):
    """A place of a parameter on a rank: a stage, and the name that the parameter has there."""

    stage: Stage
    name: str


def share(places: list[tuple[User, User]]) -> None:
    """Let each user compute with the storage of another, as far as that is possible: (user, owner of the storage).

    It is where both stages have one dtype and device, and where no other parameter lies after the user's. Users that
    have shared before are pointed to their new owner.
    """
    for user, owner in sorted(places, key=_from_the_end):
        stage, name = user
        alike = (stage.dtype, stage.device) == (owner.stage.dtype, owner.stage.device)
        if name in stage.owners or (alike and stage.buffers.ends_with(name)):
            _share(user, owner)


def _from_the_end(place: tuple[User, User]) -> int:
    stage, name = place[0]
    return -stage.parameters.offsets.get(name, 0)


def _share(user: User, owner: User) -> None:
    stage, name = user
    if name not in stage.owners:
        stage.parts[name] = stage.buffers.give_up(name)
    stage.buffers.point(name, owner.stage.buffers, owner.name)
    stage.owners[name] = owner
    layer, key = stage.layer_of[name]
    setattr(layer, key, stage.compute[name])
    stage.use_parts(False)
    layer.bound()
