"""Threads that do one thing after another beside the step's own."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any


class Worker:
    """A thread that does what it is given in order; it begins with the first, and goes with this.

    What must have happened is waited for with the ``Future`` that ``start`` returns, which raises
    what was raised there.  A process that is forked off has a thread of its own.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._process = -1
        self._thread: ThreadPoolExecutor
        self._started: list[Future] = []

    def start(self, job: Callable[[], Any]) -> Future:
        """Do ``job`` behind what has been started before."""
        if self._process != os.getpid():
            self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"zerofx {self.name}")
            self._process, self._started = os.getpid(), []
        self._started = [future for future in self._started if not future.done()]
        future: Future = Future()
        self._started.append(future)  # first: an interrupt of what follows abandons it too
        self._thread.submit(_do, job, future)
        return future

    def abandon(self) -> None:
        """Leave out what has not begun, and return when nothing is under way."""
        if self._process == os.getpid():
            wait([future for future in self._started if not future.cancel()])
        self._started = []


def _do(job: Callable[[], Any], future: Future) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = job()
    except BaseException as error:
        future.set_exception(error)
        del job, future  # which the error's traceback would keep, and be kept by
    else:
        future.set_result(result)
