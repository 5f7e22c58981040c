"""What the emulated device has of CuPy: names, parameters with their C types, and numbers.

cupy_surface.json beside this file holds them as an installed CuPy has them. CuPy can be imported without a GPU, and the
docstrings of its compiled functions begin with their C signatures. To make the file again:

    pip install 'cupy-cuda13x[ctk]>=14,<15' nvidia-nccl-cu13       # with cuBLAS and NCCL, which their modules need
    cd tests && python -m gpu_emulator.cupy_surface
"""

import inspect
import json
import re
import sys
import types
import warnings
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import gpu_emulator as emulator

FILE = Path(__file__).with_name("cupy_surface.json")
ATTRIBUTE, CLASS = "attribute", "class"
BESIDES = ("cupy.from_dlpack",)  # which the package calls, and the emulated device does not have
LIBRARIES = {"cupy.cuda.cublas": "cuBLAS", "cupy.cuda.nccl": "NCCL"}  # modules that need a library to be imported


class Parameter(NamedTuple):
    """One parameter: its name, its C type or "", whether it may be left out."""

    name: str
    c_type: str
    optional: bool


# -- an installed CuPy


def described(name: str) -> Any:
    """What the installed CuPy has under a name: a number, "class (...)", "(...)" or "attribute".

    Raises ImportError where a library is missing, AttributeError where CuPy does not have the name.
    """
    parts = name.split(".")
    owner, thing = None, import_module(parts[0])
    for place, part in enumerate(parts[1:], 1):
        if isinstance(thing, type) and not hasattr(thing, part) and _says_that_it_has(thing, part):
            return ATTRIBUTE
        if isinstance(thing, types.ModuleType) and not hasattr(thing, part):
            with suppress(ModuleNotFoundError), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                import_module(".".join(parts[: place + 1]))
        owner, thing = thing, getattr(thing, part)
        if isinstance(thing, types.ModuleType) and not getattr(thing, "available", True):
            raise ImportError(f"{thing.__name__}: its library is missing")
    if isinstance(thing, types.ModuleType):
        return "module"
    if isinstance(thing, int) and not isinstance(thing, bool):
        return int(thing)
    if isinstance(thing, type):
        return f"{CLASS} {_signature(thing)}"
    return _signature(thing) if callable(thing) and not _is_data(owner, parts[-1]) else ATTRIBUTE


def _is_data(owner: Any, name: str) -> bool:
    return isinstance(owner, type) and isinstance(
        inspect.getattr_static(owner, name), property | types.GetSetDescriptorType
    )


def _says_that_it_has(kind: type, attribute: str) -> bool:
    """Whether the page of a class lists an attribute that its instances alone have."""
    return any(re.search(rf"~\w+\.{attribute} \(", each.__doc__ or "") for each in kind.__mro__)


def _signature(thing: Any) -> str:
    """The parameters as the first line of the docstring has them, with C types, else as Python knows them."""
    for where in (thing, getattr(thing, "__init__", None)):
        for line in (getattr(where, "__doc__", None) or "").splitlines()[:3]:  # a kernel's call has two such lines
            found = re.match(r"\s*[\w.]+\((.*)\)(\s*->.*)?$", line)
            if found and "**kwargs" not in line and not line.startswith("Initialize"):
                named = [part for part in _split(found[1].replace("\\", "")) if part not in ("self", "cls")]
                return f"({', '.join(named)})"
    try:
        text = str(inspect.signature(thing))
    except (TypeError, ValueError):
        return "(...)"
    return re.sub(r"\((self, |self)", "(", text.partition(" ->")[0])


# -- what is written


@cache
def written() -> dict[str, Any]:
    """The names of the file, and what CuPy has under each."""
    return json.loads(FILE.read_text())["names"]


def parameters(name: str) -> list[Parameter] | None:
    """The parameters of a name of the file; None where they are not known, or it is nothing to call."""
    text = str(written()[name]).removeprefix(f"{CLASS} ")
    if not text.startswith("(") or text == "(...)":
        return None
    found = []
    for part in _split(text[1:-1]):
        declared, equals, _ = (piece.strip() for piece in part.partition("="))
        declared = declared.partition(":")[0]
        if declared not in ("*", "/"):
            found.append(Parameter(declared.split()[-1], declared.rpartition(" ")[0], bool(equals)))
    return found


def _split(text: str) -> list[str]:
    """The parts between commas that stand in no brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts if part.strip()]


# -- the emulated device


def emulated() -> dict[str, Any]:
    """What the emulated device has under each of its public names, methods of classes included."""
    found = {"cupy.RawKernel.__call__": emulator.compiler.Function.__call__}
    for module, content in {**emulator.cupy_modules(), "cupy.cuda.cublas": emulator.cublas_module()}.items():
        for name, thing in vars(content).items():
            if name.startswith("_") or isinstance(thing, types.ModuleType):
                continue
            found[f"{module}.{name}"] = thing
            if isinstance(thing, type) and not issubclass(thing, (BaseException, tuple)):
                found |= {f"{module}.{name}.{key}": value for key, value in _members(thing)}
    return found


def _members(kind: type) -> Iterator[tuple[str, Any]]:
    for base in kind.__mro__[:-1]:
        yield from ((name, value) for name, value in vars(base).items() if not name.startswith("_"))


def main() -> int:
    """Write the file. Returns 1 where the installed CuPy lacks a name, and says which."""
    names, missing = sorted({*emulated(), *BESIDES}), []
    content = {}
    for name in names:
        try:
            content[name] = described(name)
        except (AttributeError, ImportError) as error:
            missing.append(f"{name}: {str(error).splitlines()[0]}")
    sys.stdout.write("".join(f"{line}\n" for line in missing))
    if not missing:
        FILE.write_text(json.dumps({"CuPy": import_module("cupy").__version__, "names": content}, indent=1) + "\n")
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main())
