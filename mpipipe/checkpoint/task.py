"""Work of this rank in a thread of its own, which can be waited for, asked for its error, and given up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

Result = TypeVar("Result")


class Task(Generic[Result]):
    """A call in a thread. The thread is a daemon: the end of the interpreter does not wait for it.

    Parameters
    ----------
    work : called once, in the thread
    name : of the thread

    Attributes
    ----------
    error : what ended the work, if it did not end well
    seconds : how long the work took, once it has ended
    """

    def __init__(self, work: Callable[[], Result], name: str) -> None:
        self._work = work
        self._ended = threading.Event()
        self._results: list[Result] = []
        self.error: BaseException | None = None
        self.seconds = 0.0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # the system has no thread left
            self.error = error
            self._ended.set()

    def _run(self) -> None:
        start = time.monotonic()
        try:
            self._results.append(self._work())
        except BaseException as error:  # whatever it is, the ranks are to hear of it
            self.error = error
        finally:
            self.seconds = time.monotonic() - start
            self._ended.set()

    @property
    def ended(self) -> bool:
        """Whether the work has ended, well or not."""
        return self._ended.is_set()

    @property
    def problem(self) -> Exception | None:
        """The error, as one that can be raised for all ranks."""
        if self.error is None or isinstance(self.error, Exception):
            return self.error
        return RuntimeError(f"{type(self.error).__name__} in a thread: {self.error}")

    @property
    def result(self) -> Result:
        """What the work returned, once it has ended well."""
        return self._results[0]

    def wait(self, seconds: float) -> bool:
        """Wait for the end, so long at most; return whether it has come."""
        return self._ended.wait(seconds)
