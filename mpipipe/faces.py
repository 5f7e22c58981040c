"""The face of a room whose files are imported when one of their names is first used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module


def lazy_face(room: str, files: Mapping[str, str]) -> tuple[list[str], Callable[[str], object]]:
    """Return `__all__` and `__getattr__` of a room: `files` has the names that each of its files gives to others."""
    file_of = {name: file for file, names in files.items() for name in names.split()}

    def get(name: str) -> object:
        if name not in file_of:
            raise AttributeError(f"module {room!r} has no attribute {name!r}")
        return getattr(import_module(f"{room}.{file_of[name]}"), name)

    return [*file_of], get
