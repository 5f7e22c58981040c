"""The emulated device has the names, parameters and numbers of CuPy itself."""

import inspect

import pytest

from gpu_emulator import cupy_surface as surface

AGAIN = "a name of CuPy that is new here: make the file again, as gpu_emulator/cupy_surface.py says"
INTEGERS = {"", "int", "size_t", "ssize_t", "intptr_t", "ptrdiff_t", "Py_ssize_t", "long long"}
VARIADIC = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD


# -- without CuPy


def difference(name, thing):
    """How an emulated thing differs from what the file has under its name, or ""."""
    real = surface.written()[name]
    if isinstance(real, int):
        return "" if thing == real and not isinstance(thing, bool) else f"{thing}, in CuPy {real}"
    if isinstance(thing, type) != real.startswith(surface.CLASS):
        return f"a class or none, in CuPy {real}"
    if callable(thing) == (real == surface.ATTRIBUTE):
        return f"to be called or not, in CuPy {real}"
    if not callable(thing) or (isinstance(thing, type) and issubclass(thing, Exception)):
        return ""
    expected = surface.parameters(name)
    given = list(inspect.signature(thing).parameters.values())
    given = [each for each in given if each.name != "self"]
    if expected is None or (given and given[0].kind in VARIADIC and given[0].name == "rest"):  # it refuses every call
        return ""
    ours = [(each.name, each.default is not each.empty) for each in given if each.kind not in VARIADIC[1:]]
    theirs = [(each.name.lstrip("*"), each.optional) for each in expected]
    wrong = [
        one.name for one, other in zip(given, expected)
        if one.annotation == "int" and other.c_type not in INTEGERS
    ]  # fmt: skip
    return "" if ours == theirs and not wrong else f"{inspect.signature(thing)}, in CuPy {real}"


def test_the_emulated_device_has_names_parameters_and_numbers_of_cupy():
    found = {}
    for name, thing in surface.emulated().items():
        found[name] = difference(name, thing) if name in surface.written() else AGAIN
    assert len(found) > 150 and {name: text for name, text in found.items() if text} == {}


# -- with CuPy, which needs no GPU for this


def installed():
    return pytest.importorskip("cupy", reason="CuPy is not installed (pip install 'cupy-cuda13x>=14,<15')")


@pytest.mark.judges
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("library", ["", *surface.LIBRARIES])
def test_the_file_is_what_the_installed_cupy_has(library):
    installed()
    names = [name for name in surface.written() if next(filter(name.startswith, surface.LIBRARIES), "") == library]
    try:
        found = {name: surface.described(name) for name in names}
    except ImportError as error:
        pytest.skip(f"{library} needs {surface.LIBRARIES[library]}: {str(error).splitlines()[0]}")
    assert found == {name: surface.written()[name] for name in names}, (
        "make the file again: gpu_emulator/cupy_surface.py"
    )
