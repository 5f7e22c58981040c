"""Simulate a schedule on ranks that share network cards (NICs).

A message passes the NIC of the rank that sends it and that of the rank that receives it:

    rank 0    F0 F1 F2
    its NIC     |==|----|----|     half the speed while another message passes the same NIC
    rank 1         F0   F1   F2    a message waits for the one before it of the same two ranks
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from sched import Event, scheduler

from mpipipe.errors import ArgumentError
from mpipipe.schedules.action import FORWARD, RECOMPUTE, WEIGHT_GRAD
from mpipipe.schedules.replay import source
from mpipipe.schedules.schedule import Schedule
from mpipipe.schedules.simulate import Costs, Links, first_trained, simulate


def simulate_flows(
    schedule: Schedule, costs: Costs, links: Links, pipelines: Sequence[Sequence[int]] = ()
) -> float:
    """Return the time of a step, from its first start until all sums of gradients are there.

    Actions run as in `simulate`. A message that leaves a node waits for the one before it between
    the same two ranks, passes the NICs of both, and is there a latency later. Each NIC is shared
    evenly by what passes it in one direction, and the slower of the two counts. A rank whose
    actions are done sums its gradients with the other replicas over a ring: 2 (R - 1) / R of their
    bytes, and 2 (R - 1) latencies. All replicas do the same at the same time, so one of them is
    simulated, and its messages count as often as replicas share its NIC. That holds where all
    replicas lie on nodes alike; where they do not, an edge is as slow as that of the first replica
    in which it leaves its node, and results may be some 10 % off. This is the fluid model of
    networks (Casanova et al., J. Parallel Distrib. Comput. 74, 2014,
    doi:10.1016/j.jpdc.2014.06.008), but what one NIC leaves idle is not given to others. Not
    counted: skips, rings of attention, the switches between nodes, and sums that begin before the
    last action of a rank.

    Parameters
    ----------
    schedule : Schedule
        It is checked first, as by `simulate`.
    costs : Costs
        In seconds and bytes; in place of `transfer` the links count.
    links : Links
        Where `nic_ranks` is 1, messages neither share nor wait, as in `simulate`.
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
    timeline = simulate(schedule, costs)
    stages = schedule.stages
    pipelines = pipelines or [range(schedule.ranks)]
    for ranks in pipelines:
        if len(ranks) != schedule.ranks:
            raise ArgumentError(
                "a pipeline does not have the ranks of the schedule",
                found=f"ranks {[*ranks]}",
                expected=f"{schedule.ranks} of them",
            )
    network = Network(links)
    message_bytes = costs.per_stage("message_bytes", stages)
    gradient_bytes = costs.per_stage("gradient_bytes", stages)
    arrived: set[Output] = set()
    sleepers: dict[Output, Iterator[float | Output]] = {}

    def work(rank: int) -> Iterator[float | Output]:
        """Yield what a rank waits for: seconds of an action, or the output of another rank."""
        for action in schedule.orders[rank]:
            stage, op, unit = action
            is_forward = op == FORWARD
            awaited = source(stage, op, stages)
            if awaited is not None and (awaited, unit, is_forward) not in arrived:
                yield awaited, unit, is_forward
            yield timeline.duration(action)
            output = stage, unit, is_forward
            target = stage + 1 if is_forward else stage - 1
            sends = target < stages and (is_forward or stage > first_trained(schedule))
            if op in (RECOMPUTE, WEIGHT_GRAD) or not sends:
                continue
            receiver = schedule.placement[target]
            if receiver == rank:
                arrived.add(output)
            else:
                edges = tuple([(ranks[rank], ranks[receiver]) for ranks in pipelines])
                network.send(edges, message_bytes[max(stage, target)], 1, partial(wake, output))
        # In each step a replica passes 1 / R of its gradients on to the next one.
        ring = [ranks[rank] for ranks in pipelines]
        steps = 2 * (len(ring) - 1)
        size = steps * sum(gradient_bytes[stage] for stage in schedule.stages_of(rank)) / len(ring)
        if size and not schedule.forwards_only:
            network.send(tuple(zip(ring, ring[1:] + ring[:1])), size, steps, bool)

    def go_on(rank_work: Iterator[float | Output]) -> None:
        wait = next(rank_work, None)
        if isinstance(wait, tuple):
            sleepers[wait] = rank_work
        elif wait is not None:
            network.events.enter(wait, 0, go_on, (rank_work,))

    def wake(output: Output) -> None:
        arrived.add(output)
        if output in sleepers:
            go_on(sleepers.pop(output))

    for rank in range(schedule.ranks):
        go_on(work(rank))
    network.events.run()
    return network.now


Output = tuple[int, int, bool]  # stage, unit, whether that of a forward
Edge = tuple[int, int]  # a rank that sends, and one that receives
Port = tuple[bool, int]  # whether of what comes in, and the number of a NIC


@dataclass(eq=False)
class Pair:
    """A rank that sends and one that receives, and the messages that wait.

    ports : those that it shares, each with the number of replicas that do the same there
    messages : for each its seconds alone, its latency, and what follows
    speed, end : what part of the bandwidth the first message has, and the event at which it is sent
    """

    latency: float
    bandwidth: float
    ports: dict[Port, int]
    messages: deque[tuple[float, float, Callable[[], object]]] = field(default_factory=deque)
    speed: float = 1.0
    end: Event | None = None


class Network:
    """What happens at which time, and the messages that are under way."""

    def __init__(self, links: Links) -> None:
        self.links = links
        self.now = 0.0
        self.events = scheduler(lambda: self.now, self.wait)
        self.pair_of = cache(self.pair)
        self.users: dict[Port, list[Pair]] = defaultdict(list)  # pairs with a message under way

    def wait(self, seconds: float) -> None:
        self.now += seconds

    def send(
        self, edges: tuple[Edge, ...], size: float, latencies: int, arrive: Callable[[], object]
    ) -> None:
        """Send a message over the first edge, after those before it; other replicas do the same."""
        pair = self.pair_of(edges)
        seconds = size / pair.bandwidth
        latency = latencies * pair.latency
        if not pair.ports:
            self.events.enter(seconds + latency, 0, arrive)
            return
        pair.messages.append((seconds, latency, arrive))
        if len(pair.messages) == 1:
            self.begin(pair)

    def pair(self, edges: tuple[Edge, ...]) -> Pair:
        """Make the pair that stands for these, one in each replica."""
        links = self.links
        outside = [edge for edge in edges if not links.inside(*edge)]
        if not outside:
            return Pair(links.inside_latency, links.inside_bandwidth, {})
        ports = {}
        if links.nic_ranks > 1:
            for comes_in in (False, True):
                nics = [edge[comes_in] // links.nic_ranks for edge in outside]
                ports[comes_in, nics[0]] = nics.count(nics[0])
        return Pair(links.latency, links.bandwidth, ports)

    def begin(self, pair: Pair) -> None:
        """Begin the first message of a pair."""
        for port in pair.ports:
            self.users[port].append(pair)
        self.share(pair)

    def end(self, pair: Pair) -> None:
        """End the first message of a pair."""
        _, latency, arrive = pair.messages.popleft()
        self.events.enter(latency, 0, arrive)
        pair.end = None
        for port in pair.ports:
            self.users[port].remove(pair)
        self.share(pair)
        if pair.messages:
            self.begin(pair)

    def share(self, changed: Pair) -> None:
        """Give all that use a port of this pair the speed that they have from now on."""
        for shared in changed.ports:
            for pair in self.users[shared]:
                left = pair.messages[0][0]
                if pair.end is not None:
                    left = (pair.end.time - self.now) * pair.speed
                    self.events.cancel(pair.end)
                loads = [1]
                for port in pair.ports:
                    loads.append(sum(user.ports[port] for user in self.users[port]))
                pair.speed = 1 / max(loads)
                pair.end = self.events.enter(left / pair.speed, 0, self.end, (pair,))
