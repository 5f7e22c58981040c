"""What one watchdog asks all others, and what they have answered so far."""

from __future__ import annotations

from collections.abc import Collection

from mpipipe.comm.watch.channel import Channel
from mpipipe.comm.watch.dump import Dump
from mpipipe.comm.watch.verdict import Silent


class Inquiry:
    """One question to ranks of a channel, and their answers.

    Parameters
    ----------
    channel, number : where it is asked, and its how many-th question of this rank it is
    wanted : world ranks that are asked

    Attributes
    ----------
    name : (world rank that asks, its how many-th)
    others : the ranks that are asked
    waited : seconds since the last question
    quiet : rank -> seconds without progress
    dumps : rank -> Dump, once dumps were asked for
    silent : the ranks that have not answered; None before dumps were asked for
    mine : those of them that this rank is to look at
    """

    def __init__(self, channel: Channel, number: int, wanted: Collection[int]) -> None:
        self.channel, self.name = channel, (channel.members[channel.rank], number)
        self.others = [rank for rank, member in enumerate(channel.members) if rank != channel.rank and member in wanted]
        self.waited = 0.0
        self.quiet: dict[int, float] = {}
        self.dumps: dict[int, Dump] = {}
        self.silent: list[Silent] | None = None
        self.mine: list[Silent] = []
