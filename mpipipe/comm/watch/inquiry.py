"""What one watchdog asks all others, and what they have answered so far."""

from __future__ import annotations

from mpipipe.comm.watch.channel import Channel
from mpipipe.comm.watch.dump import Dump
from mpipipe.comm.watch.verdict import Silent


class Inquiry:
    """One question to all ranks of a channel, and their answers.

    Attributes
    ----------
    name : (world rank that asks, its how many-th)
    waited : seconds since the last question
    quiet : rank -> seconds without progress
    dumps : rank -> Dump, once dumps were asked for
    silent : the ranks that have not answered; None before dumps were asked for
    mine : those of them that this rank is to look at
    """

    def __init__(self, channel: Channel, number: int) -> None:
        self.channel, self.name = channel, (channel.members[channel.rank], number)
        self.others = [rank for rank in range(channel.size) if rank != channel.rank]
        self.waited = 0.0
        self.quiet: dict[int, float] = {}
        self.dumps: dict[int, Dump] = {}
        self.silent: list[Silent] | None = None
        self.mine: list[Silent] = []
