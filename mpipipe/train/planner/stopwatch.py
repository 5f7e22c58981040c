"""Times the calls of layers inside a stage that runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from statistics import median
from time import perf_counter
from typing import Any

# how containers call layers; several are the same action
METHODS = {
    "forward": "F",
    "forward_sum": "F",
    "forward_apart": "F",
    "backward": "B",
    "backward_add": "B",
    "backward_input": "I",
    "backward_input_add": "I",
    "backward_weight": "W",
}


class Stopwatch:
    """Notes how long methods of objects take; calls inside such a call of the same object do not count."""

    def __init__(self) -> None:
        self.seconds: dict[tuple[Hashable, str], list[float]] = defaultdict(list)

    def watch(self, name: Hashable, thing: Any, methods: dict[str, str]) -> None:
        """Time these methods of `thing` from now on, under `name` and the word that each has in `methods`."""
        inside = [False]
        for method, word in methods.items():
            setattr(thing, method, self._timed(getattr(thing, method), (name, word), inside))

    def _timed(self, call: Callable[..., Any], key: tuple[Hashable, str], inside: list[bool]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            if inside[0]:
                return call(*arguments, **named)
            inside[0] = True
            start = perf_counter()
            try:
                return call(*arguments, **named)
            finally:
                self.seconds[key].append(perf_counter() - start)
                inside[0] = False

        return timed

    def median(self, name: Hashable, word: str) -> float:
        """Return the median seconds of a call; 0 where there was none."""
        found = self.seconds.get((name, word))
        return median(found) if found else 0.0

    def median_beyond(self, outer: Hashable, parts: Iterable[Hashable], word: str) -> float:
        """Return the median seconds by which a call of `outer` lasts longer than its own calls of the parts.

        A delay by another process is in the call and in its part, and does not count. The median of all calls less
        the medians of the parts would count it: a long call meets a delay more often than each of its parts.
        """
        times = [seconds for part in parts if (seconds := self.seconds.get((part, word)))]
        beyond = [whole - sum(inside) for whole, *inside in zip(self.seconds.get((outer, word), ()), *times)]
        return median(beyond) if beyond else 0.0
