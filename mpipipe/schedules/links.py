"""How long messages take, by latency, bandwidth and size of a node."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise

from mpipipe.errors import ArgumentError
from mpipipe.schedules.schedule import at_least_one

FORM = "latency,bandwidth[,node-size[,latency inside,bandwidth inside]]"


#     rank    0   1   2   3 | 4   5   6   7     node size 4: hops 1-3 and 5-7 are inside a node, hop 4 is not
@dataclass(frozen=True)
class Links:
    """The links between ranks: a message of n bytes takes latency + n / bandwidth.

    Ranks fill one node after the other: ranks r and s share a node if r // node_size == s // node_size.

    Parameters
    ----------
    latency : float
        Seconds that a message without content takes between nodes.
    bandwidth : float
        Bytes per second between nodes; inf if the length of a message does not matter.
    node_size : int, optional
        Ranks on a node; by default each rank has a node of its own.
    inside_latency, inside_bandwidth : float, optional
        Latency and bandwidth within a node; by default a message takes no time there.

    Examples
    --------
    >>> from mpipipe.schedules import Links
    >>> links = Links(latency=0.5, bandwidth=1000, node_size=2)
    >>> links.times(placement=(0, 1, 2, 3), message_bytes=500)
    [0.0, 0.0, 1.0, 0.0]
    """

    latency: float
    bandwidth: float
    node_size: int = 1
    inside_latency: float = 0.0
    inside_bandwidth: float = math.inf

    def __post_init__(self) -> None:
        at_least_one("node_size", self.node_size)
        for entry in fields(self):
            value, speed = getattr(self, entry.name), entry.name.endswith("bandwidth")
            if not isinstance(value, (int, float)) or not (value > 0 if speed else 0 <= value < math.inf):
                raise ArgumentError(
                    f"{entry.name} does not describe a link",
                    found=f"{entry.name}={value!r}",
                    expected="bytes per second, above 0" if speed else "seconds, at least 0",
                )

    @classmethod
    def read(cls, text: str) -> Links:
        """Read links from text: latency,bandwidth[,node-size[,latency inside,bandwidth inside]].

        Parameters
        ----------
        text : str
            2, 3 or 5 numbers.

        Returns
        -------
        Links
            The links.

        Raises
        ------
        ArgumentError
            The text has another form, or a number describes no link.

        Examples
        --------
        >>> from mpipipe.schedules import Links
        >>> Links.read("5e-6,25e9,8")
        Links(latency=5e-06, bandwidth=25000000000.0, node_size=8, inside_latency=0.0, inside_bandwidth=inf)
        """
        parts = text.split(",")
        try:
            if len(parts) not in (2, 3, 5):
                raise ValueError(text)
            latency, bandwidth, inside_latency, inside_bandwidth = map(
                float, [*parts[:2], *(parts[3:] or (0, math.inf))]
            )
            return cls(latency, bandwidth, int(parts[2]) if parts[2:] else 1, inside_latency, inside_bandwidth)
        except ValueError as error:
            if isinstance(error, ArgumentError):
                raise
            raise ArgumentError("no model of links", found=repr(text), expected=f"{FORM}, as in 5e-6,25e9,8") from error

    def times(self, placement: Sequence[int], message_bytes: float) -> list[float]:
        """Return the seconds of a message over each hop, as `Costs.transfer` takes them.

        Parameters
        ----------
        placement : sequence of int
            Rank of each logical stage.
        message_bytes : float
            Bytes of the activation of one micro-batch between two stages. Its gradient has as many bytes.

        Returns
        -------
        list of float
            Entry l is the time between stages l-1 and l. Entry 0 is 0, and so is a hop between stages of one rank.

        Raises
        ------
        ArgumentError
            `message_bytes` is negative or not finite.

        Examples
        --------
        >>> from mpipipe.schedules import Links
        >>> Links(latency=1, bandwidth=10).times((0, 1, 1), message_bytes=20)
        [0.0, 3.0, 0.0]
        """
        if not isinstance(message_bytes, (int, float)) or not 0 <= message_bytes < math.inf:
            raise ArgumentError(
                "no length of a message", found=f"message_bytes={message_bytes!r}", expected="bytes >= 0"
            )
        outside = self.latency + message_bytes / self.bandwidth
        inside = self.inside_latency + message_bytes / self.inside_bandwidth
        nodes = [rank // self.node_size for rank in placement]
        hops = (0.0 if placement[stage] == placement[stage + 1] else inside if here == there else outside
                for stage, (here, there) in enumerate(pairwise(nodes)))  # fmt: skip
        return [0.0, *hops]
