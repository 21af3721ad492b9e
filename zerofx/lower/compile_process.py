"""A process beside the training that compiles for it: what it has compiled is in Inductor's cache.

Inductor saves the state of random numbers and restores it, and holds Python's lock: in a thread it
would draw a step's masks twice, and slow it down.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from queue import Empty, Queue
from typing import IO, Any

from zerofx import compat
from zerofx.compat.compile_cache import turn_to_compile
from zerofx.ir.packing import unpacked
from zerofx.lower.regions import compiled_region
from zerofx.options import environment

logger = logging.getLogger("zerofx")


NICE = 3
"""The process's: half of a core's time that others get.  With more, full speed comes later."""

LET_OTHERS_GO_FIRST = f"""
import contextlib, os
os.nice({NICE})
with contextlib.suppress(OSError), open("/proc/self/autogroup", "w") as group:
    group.write("{NICE}")
"""
"""Has the process have less of a core than the training where both want it, from its start on.

An operator waits for the last of its threads.  With an equal claim on two cores, steps of one rank
took 4 to 14 times as long, and so most take 2 to 3 times as long (November 2026).  A session of its
own has its own claim, as a whole, where Linux groups processes by sessions.
"""


@dataclass(frozen=True)
class Work:
    """Something to compile.

    ``text`` describes all that compiling depends on, as ``turn_to_compile`` takes it.  ``packed``
    is the graph of a region, with what ``compiled_region`` takes beside it, or that of an update,
    ``of_any_length``, with inputs of it.
    """

    text: str
    packed: bytes
    of_any_length: bool = False


class CompileProcess:
    """Compiles what it is given, largest first, and tells when each is in Inductor's cache.

    It lives until ``close``, or until this process has ended, however it does.  If it ends by
    itself, all that it was given counts as done: whoever needs it compiles it.
    """

    def __init__(self) -> None:
        self._done: dict[str, threading.Event] = {}
        self._has_ended = threading.Event()
        self._is_closed = False
        code = f"{LET_OTHERS_GO_FIRST}\nfrom {__name__} import serve\nserve()"
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**environment(), "PYTHONPATH": paths, "PYTHONSAFEPATH": "1"},
            start_new_session=True,  # Ctrl-C is for the training, with which it ends
        )
        self._to_send: Queue[Any] = Queue()
        self._to_send.put(compat.inductor.settings())
        for run in (self._send, self._listen):
            threading.Thread(target=run, name="zerofx beside", daemon=True).start()
        self._is_ready = compat.inductor.prepare_beside()

    def compile(self, work: Work) -> None:
        """Have something compiled, if it is not under way."""
        if work.text not in self._done:
            self._done[work.text] = threading.Event()
            self._to_send.put(work)

    def is_done(self, text: str) -> bool:
        """Return whether what ``text`` describes need not be waited for any longer."""
        has_come = self._done[text].is_set() or self._has_ended.is_set()
        return has_come and self._is_ready.is_set()

    def wait(self, text: str) -> None:
        """Return when that is so."""
        self._is_ready.wait()
        while not self.is_done(text):
            self._done[text].wait(0.01)

    def close(self) -> None:
        """End the process; what it is compiling is lost."""
        self._is_closed = True
        self._to_send.put(None)

    def _send(self) -> None:
        """Send what is to be compiled: the process reads it once it has imported torch."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError), self._process.stdin as requests:
            message: Any = self
            while message is not None:  # which ends it: others may hold the pipe, if they fork
                message = self._to_send.get()
                pickle.dump(message, requests)
                requests.flush()

    def _listen(self) -> None:
        """Note what is done."""
        assert self._process.stdout is not None
        with contextlib.suppress(EOFError, OSError, pickle.UnpicklingError):
            while True:
                self._done[pickle.load(self._process.stdout)].set()
        self._has_ended.set()
        status = self._process.wait()
        if not self._is_closed:
            logger.warning(
                "the process that compiles for start=at_once has ended (status %d): the ranks "
                "compile what is missing, when a step begins",
                status,
            )


def serve() -> None:
    """Compile what comes through standard input, and answer through standard output."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what compilers print is no answer
    requests: IO[bytes] = sys.stdin.buffer
    compat.inductor.set_settings(pickle.load(requests))
    waiting: Queue[Work] = Queue()

    def listen() -> None:
        try:
            while (work := pickle.load(requests)) is not None:
                waiting.put(work)
        finally:
            os._exit(0)  # the training has ended, or needs nothing more

    threading.Thread(target=listen, daemon=True).start()
    left: list[Work] = []
    while True:
        left += _arrived(waiting, wait=not left)
        left.sort(key=lambda work: len(work.packed), reverse=True)
        with contextlib.ExitStack() as turns:
            done = _compile_together(left, turns)
        if not done:  # other ranks are compiling all that are left
            done = left[:1]
            with turn_to_compile(done[0].text):
                pass
        for work in done:
            left.remove(work)
            pickle.dump(work.text, answers)
        answers.flush()


def _arrived(waiting: Queue[Work], wait: bool) -> list[Work]:
    found = [waiting.get()] if wait else []
    while True:
        try:
            found.append(waiting.get_nowait())
        except Empty:
            return found


def _compile_together(works: Sequence[Work], turns: contextlib.ExitStack) -> list[Work]:
    """Compile what no other process does, until ``turns`` are over, and its C++ kernels together.

    What fails is left to whoever needs it.
    """
    mine = []
    with contextlib.suppress(Exception), compat.cpp_kernels.kernels_together():
        for work in works:
            if turns.enter_context(turn_to_compile(work.text, waits=False)):
                mine.append(work)
                with contextlib.suppress(Exception):
                    _compile(work)
    return mine


def _compile(work: Work) -> None:
    (gm,), (sample, *others) = unpacked(work.packed)
    values = [one.made() for one in sample]
    if work.of_any_length:
        compat.inductor.CompiledForAnyLength(gm).compile(values)
    else:
        compiled_region(gm, values, *others)
