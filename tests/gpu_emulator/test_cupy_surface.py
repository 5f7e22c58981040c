"""The emulated device has the names, parameters and numbers of CuPy itself."""

from __future__ import annotations

import inspect

import ml_dtypes
import numpy as np
import pytest

from gpu_emulator import cupy_surface as surface
from mpipipe import arrays

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


VIEWS = {
    "a row": lambda x: x[1],
    "a column": lambda x: x[:, 2],
    "an element": lambda x: x[1, 2, ...],
    "backwards and every second": lambda x: x[::-1, 1::2],
    "a new axis": lambda x: x[None, ..., -1],
    "transposed": lambda x: x.T,
    "reshaped": lambda x: x.reshape(2, 6),
    "flat": lambda x: x.reshape(-1),
    "reshaped by a tuple, and its end": lambda x: x.reshape((4, 3))[1:],
    "axes by number": lambda x: x.transpose(1, 0),
    "axes exchanged": lambda x: x.swapaxes(0, 1),
    "bytes": lambda x: x.view(np.uint8)[2:, 3:],
    "nothing": lambda x: x[3:],
    "a transposed piece": lambda x: x[1:2].T,
    "a part of a row with its axis": lambda x: x[1:2, 1:3],
    "split into more axes": lambda x: x.reshape(3, 2, 2)[:, 1],
}
DTYPES = ["float32", "float64", "float16", ml_dtypes.bfloat16, "int32", "int64", "complex64"]


@pytest.fixture(params=VIEWS)
def view(request):
    return VIEWS[request.param]


def check_geometry(view, make):
    """Compare views of numpy's arrays with those of make(numpy's array), in each dtype."""
    for dtype in DTYPES:
        host = np.arange(12).reshape(3, 4).astype(dtype)
        check_view(view, host, make(host))


def check_view(view, host, device):
    theirs, ours = view(host), view(device)
    assert (ours.shape, ours.strides, ours.dtype) == (theirs.shape, theirs.strides, theirs.dtype)
    assert (ours.ndim, ours.size, ours.nbytes, ours.itemsize) == (
        theirs.ndim, theirs.size, theirs.nbytes, theirs.itemsize
    )  # fmt: skip
    assert ours.flags.c_contiguous == theirs.flags.c_contiguous and ours.base is device
    if theirs.size:
        offset = theirs.ctypes.data - host.ctypes.data
        assert arrays.address(ours) - arrays.address(device) == offset


def test_views_of_the_emulated_device_are_those_of_numpy(emulated_gpu, view):
    check_geometry(view, arrays.upload)


@pytest.mark.judges
@pytest.mark.filterwarnings("ignore")
def test_views_of_cupy_are_those_of_numpy(view):
    """Over host memory, at which no kernel looks: CuPy makes views without a GPU."""
    cupy = installed()

    def make(host):
        memory = cupy.cuda.UnownedMemory(host.ctypes.data, host.nbytes, host, 0)
        return cupy.ndarray(host.shape, host.dtype, cupy.cuda.MemoryPointer(memory, 0))

    check_geometry(view, make)
