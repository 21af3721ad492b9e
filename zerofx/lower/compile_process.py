"""A process beside the training that compiles for it: what it has compiled is in Inductor's cache.

Inductor saves the state of random numbers and restores it, and holds Python's lock: in a thread it
would draw a step's masks twice, and slow it down.  There is one process for the ranks of a machine,
for what it imports takes longer than what it compiles (``compile_server``).
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection
from queue import SimpleQueue
from typing import Any

import torch.distributed as dist

from zerofx import compat
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

NOT_ON_DEVICES = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""Has torch look for GPUs without CUDA, which works in no process that is forked off later."""

ENDED = (
    "the ranks compile what is missing, when a step begins, for the process that compiles for "
    "start=at_once is not there"
)


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
    """Has the process of this machine compile, and tells when each work is in Inductor's cache.

    Of ``ranks`` on the machine that share a ``store`` and a cache, the first to ask starts it.  It
    lives until all that have asked close, or have ended, or nobody has asked for long.  If it ends
    by itself, all that it was given counts as done: whoever needs it compiles it.
    """

    def __init__(self, store: dist.Store | None = None, ranks: int = 1) -> None:
        self._done: dict[str, threading.Event] = {}
        self._has_ended = threading.Event()
        self._is_closed = False
        self._is_ready: threading.Event | None = None  # this one, to take over
        self.process: subprocess.Popen[bytes] | None = None  # if this one has started it
        self._of = os.getpid()  # one that is forked off has no threads of this
        self._to_send: SimpleQueue[Any] = SimpleQueue()
        self._to_send.put(compat.inductor.settings())
        try:
            self._connection, self._address, self.process = _connected(store, ranks)
        except OSError as error:
            logger.warning("%s: %s", ENDED, error)
            self._prepare()
            self._has_ended.set()
            return
        self._socket = socket.socket(fileno=os.dup(self._connection.fileno()))
        for run in (self._send, self._listen):
            threading.Thread(target=run, name="zerofx beside", daemon=True).start()

    def compile(self, works: Sequence[Work]) -> None:
        """Have those compiled that are not under way."""
        new = [work for work in works if work.text not in self._done]
        if new:
            self._done.update((work.text, threading.Event()) for work in new)
            self._to_send.put(new)

    @property
    def has_ended(self) -> bool:
        """Return whether nothing more will be compiled by it."""
        return self._has_ended.is_set() or self._of != os.getpid()

    def is_done(self, text: str) -> bool:
        """Return whether what ``text`` describes need not be waited for any longer.

        So is what one was asked for that has ended since.
        """
        if self._of != os.getpid():
            return True
        done = self._done.get(text)
        has_come = done is None or done.is_set() or self._has_ended.is_set()
        return has_come and self._is_ready is not None and self._is_ready.is_set()

    def wait(self, text: str) -> None:
        """Return when that is so."""
        while not self.is_done(text):
            time.sleep(0.01)

    def close(self) -> None:
        """Need it no longer; what it is compiling for nobody else is lost."""
        if self.has_ended or self._is_closed:
            return
        self._is_closed = True
        self._to_send.put(None)  # ends the thread
        with contextlib.suppress(OSError):  # it has ended
            self._socket.shutdown(socket.SHUT_RDWR)  # whoever else holds it, having been forked

    def _prepare(self, keys: dict[str, Any] | None = None) -> None:
        if self._is_ready is None:
            with contextlib.suppress(RuntimeError):  # the training ends, and takes nothing over
                self._is_ready = compat.inductor.prepare_beside(keys)

    def _send(self) -> None:
        """Send what is to be compiled: the process reads it once it has imported torch."""
        with contextlib.suppress(OSError):
            while (message := self._to_send.get()) is not None:
                self._connection.send_bytes(pickle.dumps(message))

    def _listen(self) -> None:
        """Note what is done; at first comes what the process has found out for all ranks."""
        with contextlib.suppress(EOFError, OSError):
            self._prepare(pickle.loads(self._connection.recv_bytes()))
            while True:
                done = pickle.loads(self._connection.recv_bytes())
                for text in self._done.keys() & done:
                    self._done[text].set()
        self._prepare()
        self._has_ended.set()
        self._connection.close()
        self._socket.close()
        if not (self._is_closed or all(done.is_set() for done in self._done.values())):
            logger.warning("%s: it has ended", ENDED)
        if self.process is not None:
            self.process.wait()
            shutil.rmtree(os.path.dirname(self._address), ignore_errors=True)  # if it was killed


def _connected(
    store: dist.Store | None, ranks: int
) -> tuple[Connection, str, subprocess.Popen[bytes] | None]:
    """Return a connection to the machine's process, its address, and it if this has started it."""
    name = f"compiles on {socket.gethostname()} into {compat.compile_cache.folder()}"
    where = tempfile.gettempdir()
    folder = tempfile.mkdtemp(prefix="zerofx-", dir=where if len(where) < LONGEST else "/tmp")
    own = os.path.join(folder, "compiles")  # where nobody but this user may connect
    is_started = False
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(own)
            listener.listen()  # from now on others can connect: it accepts them when it is there
            address = ended = ""
            while True:
                address = own if store is None else store.compare_set(name, ended, own).decode()
                try:
                    connection = Client(address, "AF_UNIX")
                    break
                except OSError:
                    if address == own:
                        raise
                    ended = address
            process = _started(listener, own, ranks) if address == own else None
            is_started = process is not None
            return connection, address, process
    finally:
        if not is_started:
            shutil.rmtree(folder, ignore_errors=True)


LONGEST = 80
"""The longest path of a folder that may have a socket's in it, which takes no more than 104."""


def _started(listener: socket.socket, address: str, ranks: int) -> subprocess.Popen[bytes]:
    listens = listener.fileno()
    code = f"""{LET_OTHERS_GO_FIRST}
from zerofx.lower.compile_server import serve
serve({listens}, {address!r}, {ranks})
"""
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.DEVNULL,
        pass_fds=[listens],
        env={**environment(), **NOT_ON_DEVICES, "PYTHONPATH": paths, "PYTHONSAFEPATH": "1"},
        start_new_session=True,  # Ctrl-C is for the training, with which it ends
    )
