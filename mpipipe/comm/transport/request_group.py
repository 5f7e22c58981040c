"""Several requests as one: a long array travels as several messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mpipipe.comm.requests import own
from mpipipe.comm.types import Request


class RequestGroup:
    """Several requests as one."""

    def __init__(self, requests: list[Request]) -> None:
        self.requests = requests

    def Test(self) -> bool:
        while self.requests and self.requests[-1].Test():
            self.requests.pop()
        return not self.requests

    def Cancel(self) -> None:
        for request in self.requests:
            request.Cancel()


def start_all(
    operation: Callable[..., Request], pieces: Sequence[Any], peer: int, tag: int, *buffers: object
) -> Request:
    """One request for one operation on each piece; `buffers` own the memory of pieces that are mere addresses."""
    requests = [own(operation(piece, peer, tag), *buffers) for piece in pieces]
    return requests[0] if len(requests) == 1 else RequestGroup(requests)
