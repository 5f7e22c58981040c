"""Simulate a schedule on ranks that share network cards (NICs).

A message passes the NIC of the rank that sends it and that of the rank that receives it:

    rank 0    F0 F1 F2
    its NIC     |==|----|----|     half the speed while another message passes the same NIC
    rank 1         F0   F1   F2    a message waits for the one before it of the same two ranks
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from itertools import count

from mpipipe.schedules.action import FORWARD, RECOMPUTE, WEIGHT_GRAD, Action
from mpipipe.schedules.proof import check
from mpipipe.schedules.replay import source
from mpipipe.schedules.schedule import Schedule
from mpipipe.schedules.simulate import Costs, Links, action_times, first_trained


def simulate_flows(
    schedule: Schedule, costs: Costs, links: Links, pipelines: Sequence[Sequence[int]] = ()
) -> float:
    """Return the time of a step, from its first start until all sums of gradients are there.

    Actions run as in `simulate`. A message that leaves a node waits for the one before it between
    the same two ranks, passes the NICs of both, and is there a latency later. Each NIC is shared
    evenly by what passes it in one direction, and the slower of the two counts. A rank whose
    actions are done sums its gradients with the other replicas over a ring: 2 (R - 1) / R of their
    bytes, and 2 (R - 1) latencies. All replicas do the same at the same time, so one of them is
    simulated, and its messages count as often as replicas share its NIC. This is the fluid model of
    networks (Casanova et al., J. Parallel Distrib. Comput. 74, 2014,
    doi:10.1016/j.jpdc.2014.06.008), but what one NIC leaves idle is not given to others. Not
    counted: skips, rings of attention, the switches between nodes.

    Parameters
    ----------
    schedule : Schedule
        It is checked first, as by `simulate`.
    costs : Costs
        In seconds and bytes. Within a node the seconds of `transfer` are added to those of the
        links.
    links : Links
        Where `nic_ranks` is 1, messages do not share, as in `simulate`.
    pipelines : sequence of sequence of int, optional
        For each replica the ranks of its pipeline, as nodes and NICs hold them; by default one
        replica on ranks 0, 1, ...

    Examples
    --------
    >>> from mpipipe import schedules
    >>> schedule = schedules.one_f_one_b(ranks=2, microbatches=4)
    >>> costs = schedules.Costs(message_bytes=100, gradient_bytes=200)
    >>> links = schedules.Links(0, bandwidth=200, node_size=2, nic_ranks=2)
    >>> beside_each_other = [(0, 2), (1, 3)]  # the replicas of a stage share a NIC
    >>> schedules.simulate_flows(schedule, costs, links, beside_each_other)
    19.0
    """
    check(schedule)
    stages = schedule.stages
    network = Network(links, pipelines or [range(schedule.ranks)])
    seconds = action_times(costs, stages)
    shares = costs.per_slice(schedule.slices)
    transfer = costs.per_stage("transfer", stages)
    message_bytes = costs.per_stage("message_bytes", stages)
    gradient_bytes = costs.per_stage("gradient_bytes", stages)
    orders = [deque(order) for order in schedule.orders]
    # Outputs by stage, unit and whether that of a forward; and the ranks that wait for one.
    arrived = set()
    sleepers = {}

    def go_on(rank: int) -> None:
        order = orders[rank]
        if not order:
            network.sum(rank, sum(gradient_bytes[stage] for stage in schedule.stages_of(rank)))
            return
        stage, op, unit = order[0]
        awaited = source(stage, op, stages)
        output = awaited, unit, op == FORWARD
        if awaited is not None and output not in arrived:
            sleepers[output] = rank
            return
        duration = seconds[op][stage] * shares[unit % len(shares)]
        network.after(duration, partial(end, rank, order.popleft()))

    def end(rank: int, action: Action) -> None:
        stage, op, unit = action
        target = stage - 1
        if op == FORWARD:
            target = stage + 1
        sends = target < stages and (op == FORWARD or stage > first_trained(schedule))
        if sends and op not in (RECOMPUTE, WEIGHT_GRAD):
            hop = max(stage, target)
            arrive = partial(wake, (stage, unit, op == FORWARD))
            pair = rank, schedule.placement[target]
            network.send(pair, message_bytes[hop], transfer[hop], arrive)
        go_on(rank)

    def wake(output: tuple[int, int, bool]) -> None:
        arrived.add(output)
        if output in sleepers:
            go_on(sleepers.pop(output))

    for rank in range(schedule.ranks):
        go_on(rank)
    return network.run()


Event = Callable[[], object]
Port = tuple[str, int]  # "out" or "in", and the number of a NIC


@dataclass(eq=False)
class Pair:
    """A rank that sends and one that receives, and the messages that wait, each with what follows.

    is_inside : whether both are on one node
    ports : those that it shares, each with the number of replicas that do the same there
    left, since, speed : seconds that the first message would still take alone at a time, and what
        part of the bandwidth it has had from then on
    end : number of the event at which it is there
    """

    is_inside: bool
    latency: float
    bandwidth: float
    ports: dict[Port, int] = field(default_factory=dict)
    messages: deque[tuple[float, Event]] = field(default_factory=deque)
    left: float = 0.0
    since: float = 0.0
    speed: float = 0.0
    end: int = -1


class Network:
    """What happens at which time, and the messages that are under way."""

    def __init__(self, links: Links, pipelines: Sequence[Sequence[int]]) -> None:
        self.links = links
        self.pipelines = pipelines
        self.now = 0.0
        self.events: list[tuple[float, int, Event]] = []
        self.numbers = count()
        self.canceled: set[int] = set()
        self.pairs: dict[tuple[int, int], Pair] = {}
        self.users: dict[Port, list[Pair]] = defaultdict(list)  # pairs with a message under way

    def after(self, seconds: float, event: Event) -> int:
        """Let something happen, and return the number by which that can be canceled."""
        number = next(self.numbers)
        heappush(self.events, (self.now + seconds, number, event))
        return number

    def run(self) -> float:
        """Let everything happen, and return the time at which all is done."""
        while self.events:
            time, number, event = heappop(self.events)
            if number not in self.canceled:
                self.now = time
                event()
        return self.now

    def send(self, pair: tuple[int, int], size: float, seconds: float, arrive: Event) -> None:
        """Send a message in each replica, for which `seconds` are added within a node."""
        source, target = pair
        if source == target:
            arrive()
            return
        if pair not in self.pairs:
            edges = [(ranks[source], ranks[target]) for ranks in self.pipelines]
            self.pairs[pair] = self.pair(edges)
        link = self.pairs[pair]
        self.flow(link, size, link.latency + seconds * link.is_inside, arrive)

    def sum(self, rank: int, size: float) -> None:
        """Let the replicas of a rank, as a ring, pass on 1 / R of its gradients in each step."""
        ranks = [pipeline[rank] for pipeline in self.pipelines]
        steps = 2 * (len(ranks) - 1)
        link = self.pair([*zip(ranks, ranks[1:] + ranks[:1])])
        self.flow(link, steps * size / len(ranks), steps * link.latency, bool)

    def pair(self, edges: Sequence[tuple[int, int]]) -> Pair:
        """Make the pair that stands for these, one in each replica."""
        links = self.links
        outside = [edge for edge in edges if not links.inside(*edge)]
        if not outside:
            return Pair(True, links.inside_latency, links.inside_bandwidth)
        made = Pair(False, links.latency, links.bandwidth)
        if links.nic_ranks > 1:
            for way, rank, ranks in zip(("out", "in"), edges[0], zip(*outside)):
                nics = [other // links.nic_ranks for other in ranks]
                made.ports[way, rank // links.nic_ranks] = nics.count(rank // links.nic_ranks)
        return made

    def flow(self, pair: Pair, size: float, latency: float, arrive: Event) -> None:
        seconds = size / pair.bandwidth
        if not pair.ports:
            self.after(seconds + latency, arrive)
            return
        pair.messages.append((seconds, partial(self.after, latency, arrive)))
        if len(pair.messages) == 1:
            self.begin(pair)

    def begin(self, pair: Pair) -> None:
        """Begin the first message of a pair."""
        pair.left, _ = pair.messages[0]
        pair.since = self.now
        for port in pair.ports:
            self.users[port].append(pair)
        self.share(pair)

    def end(self, pair: Pair) -> None:
        """End the first message of a pair."""
        _, arrive = pair.messages.popleft()
        arrive()
        for port in pair.ports:
            self.users[port].remove(pair)
        self.share(pair)
        if pair.messages:
            self.begin(pair)

    def share(self, changed: Pair) -> None:
        """Give all that use a port of this pair the speed that they have from now on."""
        for shared in changed.ports:
            for pair in self.users[shared]:
                loads = [1]
                for port in pair.ports:
                    loads.append(sum(user.ports[port] for user in self.users[port]))
                pair.left -= (self.now - pair.since) * pair.speed
                pair.since = self.now
                pair.speed = 1 / max(loads)
                self.canceled.add(pair.end)
                seconds = max(0.0, pair.left) / pair.speed
                pair.end = self.after(seconds, partial(self.end, pair))
