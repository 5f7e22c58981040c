"""What the package shows of itself."""

import importlib
import subprocess
import sys

import pytest

import mpipipe


def test_the_face_of_the_package_is_what_a_first_example_needs():
    assert {"Pipeline", "Mesh", "Ring", "world", "nn", "optim", "schedules"} <= set(dir(mpipipe))
    assert all(hasattr(mpipipe, name) for name in dir(mpipipe))
    assert not [name for name in dir(mpipipe) if name.startswith("_") and name != "__version__"]


@pytest.mark.parametrize(
    "room",
    """adapters attention attention.cost checkpoint errors exchange job.inprocess language language.data
    language.models language.models.huggingface nn optim planning schedules tracing train""".split(),
)
def test_a_room_lists_its_public_names_and_no_others(room):
    module = importlib.import_module(f"mpipipe.{room}")
    assert dir(module) == sorted(module.__all__)
    assert all(hasattr(module, name) for name in module.__all__)
    assert dir(mpipipe) == sorted(mpipipe.__all__)


STARTS = """
import sys, mpipipe
print([name for name in ("numpy", "mpi4py", "cupy") if name in sys.modules])
sys.modules["cupy"] = None  # as where it is not installed
from mpipipe import arrays, nn
from mpipipe.train import train
print({"cudnn", "torch", "mpi4py.MPI"} & set(sys.modules), arrays.check_device("auto"))
try:
    nn.Stage([nn.Linear(2, 2)], device="cuda")
except mpipipe.errors.BackendError as error:
    print(error)
"""


def test_the_package_starts_without_numpy_and_mpi_and_works_without_cupy():
    done = subprocess.run([sys.executable, "-c", STARTS], capture_output=True, text=True, timeout=50)
    assert done.stdout.startswith("[]\nset() cpu\na GPU was asked for, and CuPy cannot be imported"), done.stderr
    assert "`pip install '.[cuda13]'`" in done.stdout


def test_a_module_that_never_was_is_not_found_as_usual():
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'mpipipe\.nothing'$"):
        importlib.import_module("mpipipe.nothing")
    with pytest.raises(AttributeError, match=r"^module 'mpipipe' has no attribute 'nothing'$"):
        _ = mpipipe.nothing


def test_threads_that_ask_for_the_training_at_once_all_get_it():
    program = """
import threading, mpipipe.train
names, found = ("train", "TrainConfig"), {}
together = threading.Barrier(2)
def ask(name):
    together.wait()
    found[name] = getattr(mpipipe.train, name)
threads = [threading.Thread(target=ask, args=(name,)) for name in names]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(sorted(found))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50)
    assert done.stdout == "['TrainConfig', 'train']\n", done.stderr
