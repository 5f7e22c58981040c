"""A step on paper by SimGrid, which test_flows.py compares with: reads a task as JSON, prints seconds.

Every rank is a host with an actor that runs its order, and one for each rank that it sends to, which sends one
message after the other. A route between nodes goes through the NICs of both; within a node each pair has its own link.
"""

import json
import sys
from collections import deque

from simgrid import Actor, Engine, LinkInRoute, Mailbox, NetZone, Semaphore, this_actor

TASK = json.load(sys.stdin)
LATENCY, BANDWIDTH, NODE, INSIDE_LATENCY, INSIDE_BANDWIDTH = TASK["nic"]
PLACEMENT, PIPELINES = TASK["placement"], TASK["pipelines"]
RANKS = sorted(rank for ranks in PIPELINES for rank in ranks)
LAST = len(PLACEMENT) - 1
END = [0.0]

options = ("network/model:CM02", "network/TCP-gamma:0", "network/crosstraffic:0")
engine = Engine(["judge", *(f"--cfg={option}" for option in options), "--log=root.thres:error"])
zone = NetZone.create_full_zone("cluster")
hosts = {rank: zone.create_host(f"h{rank}", 1e9) for rank in RANKS}
ports = {}
for node in {rank // NODE for rank in RANKS}:
    for way in ("out", "in"):
        link = zone.create_link(f"{way}{node}", BANDWIDTH)
        link.set_latency(LATENCY / 2)
        ports[way, node] = link.seal()
for a in RANKS:
    for b in RANKS:
        if a == b:
            continue
        if a // NODE == b // NODE:
            link = zone.create_link(f"{a}-{b}", INSIDE_BANDWIDTH)
            link.set_latency(INSIDE_LATENCY)
            route = [LinkInRoute(link.seal())]
        else:
            route = [LinkInRoute(ports["out", a // NODE]), LinkInRoute(ports["in", b // NODE])]
        zone.add_route(hosts[a].netpoint, hosts[b].netpoint, None, None, route, False)
zone.seal()

outbox = {}  # (semaphore, messages) of each pair, which wait for its sender


def sender(pair):
    waiting, messages = outbox[pair]
    while True:
        waiting.acquire()
        mailbox, size = messages.popleft()
        Mailbox.by_name(mailbox).put("", size)


def post(pair, mailbox, size):
    # A message travels before its receiver asks for it.
    Mailbox.by_name(mailbox).set_receiver(actors[pair[1]])
    if pair not in outbox:
        outbox[pair] = Semaphore(0), deque()
        Actor.create(f"sender {pair}", hosts[pair[0]], sender, pair).daemonize()
    waiting, messages = outbox[pair]
    messages.append((mailbox, round(size)))
    waiting.release()


def work(replica, rank):
    own = PIPELINES[replica][rank]
    for stage, op, unit in TASK["orders"][rank]:
        source = {"F": stage - 1, "B": stage + 1, "I": stage + 1}.get(op, -1)
        if 0 <= source <= LAST and PLACEMENT[source] != rank:
            Mailbox.by_name(f"{replica} {source} {op == 'F'} {unit}").get()
        this_actor.sleep_for(TASK["times"][op])
        target = stage + 1 if op == "F" else stage - 1
        if op in "FBI" and 0 <= target <= LAST and PLACEMENT[target] != rank:
            pair = own, PIPELINES[replica][PLACEMENT[target]]
            post(pair, f"{replica} {stage} {op == 'F'} {unit}", TASK["message"])
    ring, after = len(PIPELINES), (replica + 1) % len(PIPELINES)
    size = TASK["part"] * 8 / ring * PLACEMENT.count(rank)
    for step in range(2 * (ring - 1)):
        post((own, PIPELINES[after][rank]), f"sum {after} {rank} {step}", size)
        Mailbox.by_name(f"sum {replica} {rank} {step}").get()
    END[0] = max(END[0], Engine.clock)


actors = {}
for replica in range(len(PIPELINES)):
    for rank in range(len(TASK["orders"])):
        own = PIPELINES[replica][rank]
        actors[own] = Actor.create(f"{replica} {rank}", hosts[own], work, replica, rank)
engine.run()
print(END[0])
