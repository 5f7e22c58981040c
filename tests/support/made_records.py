"""Records of steps that never ran: a small model of ranks that compute, send, wait and agree, event by event."""

from mpipipe.trace import Sent, Span
from mpipipe.tracing.records import RankRecord, StepRecord, Waited

AGREE, NORM = ((0, 1), "agreement"), ((0, 1), "norm of the gradients")  # (key of the group, what)


def made(schedule, seconds, *, latency=None, late=None, optimizer=0.0, overhead=0.0, steps=1, clock=None):
    """Records of all ranks.

    seconds(action, step) -> how long it lasts; latency {edge: seconds}; late {rank: seconds before each step};
    optimizer, overhead: seconds of each rank and step; clock(rank) -> function of the true time.
    """
    latency, late = latency or {}, late or {}
    records, now = [[] for _ in schedule.orders], [0.0] * schedule.ranks
    for step in range(steps):
        start = [time + late.get(rank, 0.0) for rank, time in enumerate(now)]
        met = max(start)
        found = [StepRecord(time, 0.0, [], [Waited(AGREE[1], time, met, None, AGREE[0])], [], []) for time in start]
        now = [met + overhead] * schedule.ranks
        _run(schedule, found, now, lambda action, step=step: seconds(action, step), latency)
        met = max(now)
        for rank, record in enumerate(found):
            record.waits.append(Waited(NORM[1], now[rank], met, None, NORM[0]))
            record.spans.append(Span("optimizer", now[rank], met + optimizer))
            records[rank].append(record._replace(end=met + optimizer))
            now[rank] = met + optimizer
    return [_on_clock(RankRecord(rank, rank, 0, ((0, 0), (1, 0)), row), clock) for rank, row in enumerate(records)]


def _run(schedule, found, now, seconds, latency):
    """Run all orders: over and over, whichever rank can go on, does."""
    sent, at = {}, [0] * schedule.ranks
    placement, last = schedule.placement, schedule.stages - 1
    while any(at[rank] < len(order) for rank, order in enumerate(schedule.orders)):
        for rank, order in enumerate(schedule.orders):
            while at[rank] < len(order):
                stage, op, microbatch = action = order[at[rank]]
                takes = {"F": (stage, stage - 1, 0), "W": None}.get(op, (stage + 1, stage + 1, 1))
                if takes is not None and 0 <= takes[1] <= last and placement[takes[1]] != rank:
                    message = takes[0], microbatch, takes[2]
                    if message not in sent:
                        break
                    there = sent[message] + latency.get(message[0], 0.0)
                    if there > now[rank]:
                        found[rank].waits.append(Waited(str(message), now[rank], there, message))
                        now[rank] = there
                begun, now[rank] = now[rank], now[rank] + seconds(action)
                found[rank].actions.append((action, begun, now[rank]))
                gives = {"F": (stage + 1, stage + 1, 0), "W": None}.get(op, (stage, stage - 1, 1))
                if gives is not None and 0 <= gives[1] <= last and placement[gives[1]] != rank:
                    message = gives[0], microbatch, gives[2]
                    sent[message] = now[rank]
                    found[rank].sent.append(Sent(message, placement[gives[1]], 4096, now[rank]))
                at[rank] += 1


def _on_clock(record, clock):
    """The record by a rank's own clock, with the comparisons that would have been made at times 0 and 1."""
    if clock is None:
        return record
    own = clock(record.rank)
    compared = tuple((own(time), time - own(time)) for time in (0.0, 1.0))
    return record._replace(clock=compared, steps=[step.moved(own) for step in record.steps])
