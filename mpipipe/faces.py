"""The face of a room whose files are imported when one of their names is first used."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module


def lazy_face(room: str, source: str) -> tuple[list[str], Callable[[str], object]]:
    """Return `__all__` and `__getattr__` of a room, from its imports for type checkers."""
    with open(source, encoding="utf-8") as file:
        imports = file.read().partition("if TYPE_CHECKING:\n")[2].partition("\n\n")[0]
    file_of: dict[str, str] = {}
    for line in imports.split(f"from {room}.")[1:]:
        module, names = line.split(" import ")
        file_of |= dict.fromkeys(names.strip("\n ()").replace(",", " ").split(), module)

    def get(name: str) -> object:
        if name not in file_of:
            raise AttributeError(f"module {room!r} has no attribute {name!r}")
        return getattr(import_module(f"{room}.{file_of[name]}"), name)

    return [*file_of], get
