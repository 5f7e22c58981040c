"""Messages of a record with both ends: who sent what when, and when it was there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mpipipe.analysis.record import Message, RankRecord


class Delivery(NamedTuple):
    """A message that was sent and received.

    Attributes
    ----------
    step : number of the step
    source, target : numbers of the two ranks among the records
    message : its name
    nbytes : its size
    sent, received : seconds
    """

    step: int
    source: int
    target: int
    message: Message
    nbytes: int
    sent: float
    received: float


def deliveries(records: Sequence[RankRecord]) -> list[Delivery]:
    """Return all messages whose sending and arrival were recorded."""
    index = {(record.replica, record.position): number for number, record in enumerate(records)}
    received = [[step.received(record.skips) for step in record.steps] for record in records]
    found = []
    for source, record in enumerate(records):
        for number, step in enumerate(record.steps):
            for sent in step.sent:
                target = index.get((record.replica, sent.peer))
                there = None if target is None else received[target][number].get(sent.message)
                if target is not None and there is not None:
                    found.append(Delivery(number, source, target, sent.message, sent.nbytes, sent.time, there))
    return found
