"""Calls of NCCL that keep the host until other ranks come, made on a thread.

The rank itself waits in the one loop (wait.py), where it hears of failures and can give up. The thread then stays
inside NCCL for as long as the process lives, and keeps nobody: it is a daemon. CuPy lets go of Python's lock in there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from mpipipe import arrays
from mpipipe.errors import BackendError

Result = TypeVar("Result")


class Task(Generic[Result]):
    """A function that runs on a thread of its own, with this thread's GPU; `Test()` is true once it has ended.

    Parameters
    ----------
    function : callable
        Without arguments.
    what : str
        What it does, for errors.
    """

    def __init__(self, function: Callable[[], Result], what: str) -> None:
        self.function, self.what, self.gpu = function, what, arrays.current_gpu()
        self.found: list[Result] = []
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, name=f"mpipipe {what}", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            arrays.use_gpu(self.gpu)
            self.found.append(self.function())
        except BaseException as error:
            self.error = error

    def Test(self) -> bool:
        """Whether the function has ended, well or not."""
        return not self.thread.is_alive()

    def result(self) -> Result:
        """What the function returned, once `Test()` was true.

        Raises
        ------
        BackendError
            Where it has raised.
        """
        if self.error is not None:
            raise BackendError(
                f"{self.what} failed",
                found=f"{type(self.error).__name__}: {self.error}",
                remedy="NCCL_DEBUG=INFO makes NCCL say more; MPIPIPE_NCCL=off does without it",
            ) from self.error
        return self.found[0]
