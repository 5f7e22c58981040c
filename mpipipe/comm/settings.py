"""What environment variables ask of this package; those of messages and waits."""

from __future__ import annotations

import os

from mpipipe.errors import ArgumentError


def timeout() -> float | None:
    """MPIPIPE_TIMEOUT: seconds after which a wait gives up; None where there is no limit (not set, empty, or 0).

    None for nonsense, too: what refuses that is `check_settings`, where all ranks can hear of it.
    """
    try:
        seconds = float(os.environ.get("MPIPIPE_TIMEOUT") or "0")
    except ValueError:
        return None
    return seconds if 0 < seconds < float("inf") else None


def check_settings():
    """Raise ArgumentError for an environment variable of this package that has no meaning."""
    text = os.environ.get("MPIPIPE_TIMEOUT") or "0"
    if timeout() is None and not text.strip("0.") == "":
        raise ArgumentError(
            "environment variable MPIPIPE_TIMEOUT", found=repr(text), expected="a number of seconds; 0 for no limit"
        )
    switches = ("MPIPIPE_SYNC_SENDS", 0, 1), ("MPIPIPE_GPU_DIRECT", 0, 1)
    for name, least, most in (("MPIPIPE_TAG_UB", 1, 1 << 62), *switches):
        value = integer_setting(name, most)
        if not least <= value <= most:
            expected = f"{least} or {most}" if most - least == 1 else f"an integer of at least {least}"
            raise ArgumentError(f"environment variable {name}", found=repr(value), expected=expected)


def synchronous_sends() -> bool:
    """MPIPIPE_SYNC_SENDS=1 makes every send complete only once it is received: for tests and for finding faults."""
    return bool(integer_setting("MPIPIPE_SYNC_SENDS", 0))


def integer_setting(name: str, default: int) -> int:
    """The integer in environment variable `name`; raises ArgumentError for anything else."""
    text = os.environ.get(name)
    if not text:
        return default
    try:
        return int(text)
    except ValueError:
        raise ArgumentError(f"environment variable {name}", found=repr(text), expected="an integer") from None
