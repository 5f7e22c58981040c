"""The public face of a module: what `__all__` names, with public methods and properties; and its docstring examples.

`python -m support.public_face mpipipe.schedules ...` runs the examples, each as a reader would who pastes it.
"""

import doctest
import importlib
import inspect
import sys
from collections.abc import Iterator
from functools import cached_property


def public_face(module_name: str) -> Iterator[tuple[str, object]]:
    """(name, object) of every function and class, and of what the classes define in public.

    A module without `__all__` shows what it defines itself under names without an underscore. Names for types and
    numbers are left out, since they carry no docstring. A property stands for itself, a method for its function.
    A member without a docstring of its own is left out where a base class of the package documents the same name:
    `help` shows the text of the base, which is checked where the base is public.
    """
    module = importlib.import_module(module_name)
    names = getattr(module, "__all__", None) or [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module_name
    ]
    for name in names:
        value = getattr(module, name)
        if inspect.isfunction(value) or inspect.isclass(value):
            yield f"{module_name}.{name}", value
        if inspect.isclass(value):
            yield from members(f"{module_name}.{name}", value)


def members(name: str, kind: type) -> Iterator[tuple[str, object]]:
    """(name, object) of the public methods and properties of a class, but for those that inherit their docstring."""
    classes = [base for base in kind.__mro__ if base.__module__.split(".")[0] == "mpipipe"]
    for member in dict.fromkeys(member for base in reversed(classes) for member in vars(base)):
        values = [_unwrap(vars(base)[member]) for base in classes if member in vars(base)]
        if member.startswith("_") or not _carries_docstring(values[0]):
            continue
        if values[0].__doc__ or not any(value.__doc__ for value in values[1:] if _carries_docstring(value)):
            yield f"{name}.{member}", values[0]


def _unwrap(value: object) -> object:
    return getattr(value, "__func__", value)  # the function of a class method or a static method


def _carries_docstring(value: object) -> bool:
    return inspect.isfunction(value) or isinstance(value, (property, cached_property))


def run_examples(module_name: str) -> tuple[int, str]:
    """(number of examples, report of those that fail). Every docstring starts without any name but the builtins."""
    finder, report = doctest.DocTestFinder(recurse=False), []
    runner = doctest.DocTestRunner(verbose=False)
    for name, value in public_face(module_name):
        for test in finder.find(value, name, module=False, globs={"__name__": "__main__"}):
            runner.run(test, out=report.append)
    return runner.summarize(verbose=False).attempted, "".join(report)


def main(module_names: list[str]) -> int:
    failed = 0
    for module_name in module_names:
        examples, report = run_examples(module_name)
        print(f"{report}{module_name}: {examples} examples")
        failed += bool(report)
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
