"""Pieces of sentences that messages share."""

from pathlib import Path

import pytest

import mpipipe
from mpipipe.text import exact_bytes, how_to_install, shown_bytes
from mpipipe.train.config import parse_bytes, tomllib


def test_bytes_are_shown_in_the_largest_unit_of_which_there_is_one():
    shown = [shown_bytes(count) for count in (0, 1, 999, 1536, 1 << 20, (1 << 30) - 1, 3 << 30, 5000 << 40)]
    assert shown == ["0 bytes", "1 byte", "999 bytes", "1.5 KiB", "1 MiB", "1024 MiB", "3 GiB", "5000 TiB"]
    assert [exact_bytes(900), exact_bytes(2048)] == ["900 bytes", "2 KiB (2048 bytes)"]
    assert [shown_bytes(count * 1024) for count in (999.4, 999.6)] == ["999 KiB", "1000 KiB"]


@pytest.mark.parametrize("count", [0, 1536, 5 << 20, 3 << 30, 7 << 40])
def test_what_is_shown_is_read_as_a_limit(count):
    assert parse_bytes(shown_bytes(count).removesuffix(" bytes")) == count


@pytest.mark.parametrize("extra", ["plot", "tokens", "cuda13", "mpich", "torch", "jax"])
def test_what_an_error_says_to_install_is_an_extra(extra):
    project = tomllib.loads(Path(mpipipe.__file__).parents[1].joinpath("pyproject.toml").read_text())
    assert extra in project["project"]["optional-dependencies"]
    assert f"'.[{extra}]'" in how_to_install(extra)
