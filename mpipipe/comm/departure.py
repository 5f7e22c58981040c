"""What must be said before a rank's script ends: objects that peers may still wait for register a farewell here."""

from __future__ import annotations

import atexit
from collections.abc import Callable

_farewells: dict[int, Callable[[], None]] = {}


def register(owner, farewell):
    """Call `farewell()` when the script ends, until `unregister(owner)`."""
    _farewells[id(owner)] = farewell


def unregister(owner):
    _farewells.pop(id(owner), None)


def say_all():
    """Call every farewell, once; at interpreter exit, or earlier by whoever waits for the other ranks to end."""
    while _farewells:
        _, farewell = _farewells.popitem()
        farewell()


atexit.register(say_all)
