"""Chooses the tests of device code that jobs/gpu_check.sh runs on a GPU: `pytest -p support.gpu_selection`.

cuDNN takes 0.1 to 0.5 s to plan each new graph, and does so anew in each thread. In half precision the tests of rings
in one process alone need a thousand plans. With --few-plans, each mask and each way to cut a sequence is tested in one
of the two half types.
"""

from __future__ import annotations

from typing import Any

import pytest

HALVES = "float16", "bfloat16"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--few-plans", action="store_true", help="leave out tests in half precision that others resemble")
    parser.addoption("--several-ranks", action="store_true", help="only tests that all ranks run together")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    from support.harness import is_collective

    chosen = [
        item
        for item in items
        if not (config.getoption("several_ranks") and not is_collective(item))
        and not (config.getoption("few_plans") and is_spare(item.originalname, getattr(item, "callspec", None)))
    ]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(chosen)])
    items[:] = chosen


def is_spare(test: str, callspec: Any) -> bool:
    """Whether other tests make much the same plans as this test function with these parameters."""
    given = {} if callspec is None else callspec.params
    dtype = given.get("dtype")
    if dtype not in HALVES:
        return False
    if test == "test_local_attention_equals_dense":
        return given["kernel"] == "" and dtype == "bfloat16"  # as test_all_masks_by_cudnn
    return test == "test_all_masks_by_cudnn" and dtype == "float16"
