"""Threads of our own, beside the one that calls a step."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from zerofx.accelerator import current_as_here


class Job:
    """Stands for one call that a worker makes."""

    def __init__(self, future: Future) -> None:
        self._future = future

    def result(self) -> Any:
        """Return what it returns, when it has ended.  Raises: what it raises."""
        try:
            return self._future.result()
        finally:
            del self  # the error's traceback would keep this frame, and that the error

    def done(self) -> bool:
        return self._future.done()


class Worker:
    """A thread that does what it is given in order; it begins with the first, and goes with this.

    A process that is forked off has a thread of its own.  ``check_order`` watches the jobs of
    workers, and of no other executor.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._process = -1  # whose thread there is
        self._thread: ThreadPoolExecutor

    def start(self, job: Callable[[], Any]) -> Job:
        """Do ``job`` behind what has been started before."""
        if self._process != os.getpid():
            name = f"zerofx {self.name}"
            self._thread = ThreadPoolExecutor(1, name, initializer=current_as_here())
            self._process = os.getpid()
        return Job(self._thread.submit(job))

    def abandon(self) -> None:
        """Leave out what has not begun, and return when nothing is under way."""
        if self._process == os.getpid():
            self._process = -1
            self._thread.shutdown(cancel_futures=True)
