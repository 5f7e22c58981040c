"""Stands in for pytest-mpi where that is missing: `pytest -p support.mpi_stand_in`. It has what these tests use."""

from pathlib import Path

import pytest
from mpi4py import MPI


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--with-mpi", action="store_true", help="accepted, as by pytest-mpi")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "mpi: a test that all ranks run together; min_size=n: skipped on fewer than n")


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers(name="mpi"):
        if MPI.COMM_WORLD.size < mark.kwargs.get("min_size", 1):
            pytest.skip(f"needs {mark.kwargs['min_size']} ranks, here are {MPI.COMM_WORLD.size}")


@pytest.fixture
def mpi_tmp_path(tmp_path: Path) -> Path:
    """The tmp_path of rank 0, on every rank."""
    return Path(MPI.COMM_WORLD.bcast(str(tmp_path)))
