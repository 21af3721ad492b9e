"""Checkpoints that are written while the training goes on."""

from __future__ import annotations

import atexit
import contextlib
import gc
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from zerofx.checkpoint.contents import bound_parameters
from zerofx.checkpoint.meeting import Ranks
from zerofx.runtime.parameters.registry import REGISTRY

logger = logging.getLogger("zerofx")


class Saving:
    """A checkpoint that is being written, or has been.

    Its error is raised by ``wait``, and by the next ``zerofx.save`` or ``zerofx.load`` if nobody
    has waited.
    """

    def __init__(self, path: Path, work: Callable[[], None]) -> None:
        self.path = path
        self._work: Callable[[], None] | None = work
        self._error: Exception | None = None
        self._was_raised = False
        self._thread: threading.Thread | None = None

    def run(self) -> None:
        """Write it now.  Raises: what goes wrong."""
        work, self._work = self._work, None
        assert work is not None, "it is written once"
        work()

    def start(self) -> None:
        """Write it in a thread of its own, for which the interpreter waits before it ends."""
        self._thread = threading.Thread(target=self._run_behind, name="zerofx checkpoint")
        self._thread.start()

    def _run_behind(self) -> None:
        _yield_to_others()
        try:
            self.run()
        except Exception as error:
            self._error = error
            logger.error("checkpoint %s was not written: %s", self.path, error)
            atexit.register(self._fail_at_exit)

    def _fail_at_exit(self) -> None:
        """End the process as failed, after all else that is done at exit."""
        atexit.unregister(self._fail_at_exit)
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)

    def done(self) -> bool:
        """Whether it is complete, or has failed."""
        return self._thread is None or not self._thread.is_alive()

    @property
    def is_settled(self) -> bool:
        """Whether it is done, and its error has been raised if there is one."""
        return self.done() and (self._error is None or self._was_raised)

    def wait(self, timeout_s: float | None = None) -> Path:
        """Return its path when all ranks have written it.

        Raises: CheckpointError if it could not be written; TimeoutError.
        """
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                raise TimeoutError(f"{self.path} is still being written after {timeout_s:g} s")
        if self._error is not None:
            self._was_raised = True
            atexit.unregister(self._fail_at_exit)
            raise self._error
        return self.path

    result = wait


def _yield_to_others() -> None:
    """Have this thread run when the training leaves a CPU idle; where the system can say so."""
    if sys.platform == "linux":  # elsewhere this is about all threads
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Keep Python from collecting garbage for the moment in which many objects are made.

    A plan is as many as tensors have parts, on the first rank those of all ranks.  They would have
    Python look through everything there is, which stops the training (0.3 s in a process that has
    compiled two models) and finds nothing.
    """
    is_on = gc.isenabled()
    if is_on:
        gc.disable()
    try:
        yield
    finally:
        if is_on:
            gc.enable()


class Writer:
    """Writes checkpoints of this process behind its back, one at a time."""

    def __init__(self) -> None:
        self._last: Saving | None = None

    def start(self, saving: Saving) -> Saving:
        """Begin to write; ``wait`` has been called before."""
        self._last = saving
        saving.start()
        return saving

    def wait(self, ranks: Ranks) -> None:
        """Return when nothing is being written any more.  Collective.

        Raises: what the last one has, if nobody has been told on one of the ranks.
        """
        last = self._last

        def finish() -> None:
            if last is not None and not last.is_settled:
                last.wait()

        self._last = None
        ranks.together(finish)


WRITER = Writer()


def meet(model: nn.Module, optimizers: Sequence[Optimizer], process_group: Any, name: str) -> Ranks:
    """Return when all ranks are here, and nothing is under way that is about these objects."""
    bounds = bound_parameters(model, *optimizers)
    REGISTRY.settle(bounds, optimizers)
    ranks = Ranks.of(bounds, process_group, name)
    WRITER.wait(ranks)
    return ranks
