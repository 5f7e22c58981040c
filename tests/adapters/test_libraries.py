"""PyTorch and JAX are optional: imported when they are asked for, and missed with a remedy."""

import subprocess
import sys

import pytest

from mpipipe import adapters
from mpipipe.errors import BackendError


@pytest.mark.parametrize("library", ["torch", "jax"])
def test_a_library_that_is_missing_is_named_with_a_remedy(monkeypatch, library):
    for name in [name for name in sys.modules if name.startswith("mpipipe.adapters.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    for what, given in (("loss", [None]), ("stage", [None] * (1 + (library == "jax")))):
        with pytest.raises(BackendError, match="cannot be imported") as caught:
            getattr(adapters, f"{library}_{what}")(*given)
        assert f"'.[{library}]'" in caught.value.remedy


def test_neither_library_is_imported_by_the_package():
    text = (
        "import sys, mpipipe, mpipipe.adapters, mpipipe.optim; print([n for n in ('torch', 'jax') if n in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60)
    assert found.stdout == "[]\n", found.stderr
