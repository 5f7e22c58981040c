"""Write docs/names.md, the list of public names: `python docs/names.py`."""

from __future__ import annotations

import inspect
from importlib import import_module
from pathlib import Path
from types import ModuleType

PAGE = Path(__file__).with_name("names.md")
ROOMS = """mpipipe schedules nn attention attention.cost exchange optim adapters checkpoint tracing
    train language.data language.models language.models.huggingface errors job.inprocess""".split()
HEAD = """# Every name

This page lists where a name lives and what it is for; `help(name)` prints the rest. These {count}
names are public: scripts are written against them, and everything else may change.
"""


def public_names() -> dict[str, dict[str, str]]:
    """Return the first line of the docstring of each name, by room; a name stands in its first room."""
    seen: set[int] = set()
    names: dict[str, dict[str, str]] = {}
    for short in ROOMS:
        room = import_module("mpipipe" if short == "mpipipe" else f"mpipipe.{short}")
        lines = {}
        for name in sorted(room.__all__, key=str.lower):
            thing = getattr(room, name)
            if isinstance(thing, ModuleType) or name.startswith("_") or id(thing) in seen:
                continue
            seen.add(id(thing))
            text = inspect.getdoc(thing) or ""
            lines[name] = " ".join(text.partition("\n\n")[0].split())
        names[room.__name__] = lines
    return names


def page() -> str:
    """Return the text of the page."""
    rooms = public_names()
    count = sum(len(lines) for lines in rooms.values())
    parts = [HEAD.format(count=count)]
    for room, lines in rooms.items():
        parts.append(f"\n## {room}\n\n| name | |\n|---|---|\n")
        for name, text in lines.items():
            parts.append(f"| `{name}` | {text.replace('|', chr(92) + '|')} |\n")
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
