"""The process that compiles for the ranks of a machine, as its own program.

It imports what compiling needs once, and compiles in processes that it forks off, one for a rank.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import signal
import socket
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

from zerofx import compat
from zerofx.compat.compile_cache import turn_to_compile
from zerofx.ir.packing import unpacked
from zerofx.lower.compile_process import Work
from zerofx.lower.regions import compiled_region

IDLE_S = 600.0
"""As long as it has nothing to do before it ends: the first call of some takes minutes."""


def serve(listens: int, address: str, ranks: int) -> None:
    """Compile for those who connect, with so many processes at most, until the last has closed.

    ``listens`` is the descriptor of a socket that listens at ``address``, a file in a folder of its
    own, which goes with this process.
    """
    os.dup2(2, 1)  # what compilers print is nothing that the training prints
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # whatever who has started it does with it
    compat.rehearsal.warm_up()
    server = _Server(socket.socket(fileno=listens), ranks, compat.inductor.keys())
    try:
        server.run()
    finally:
        shutil.rmtree(os.path.dirname(address), ignore_errors=True)
        server.end()
    os._exit(0)  # what torch does at an end takes a second, in which a rank has no whole core


@dataclass
class _Child:
    """A process that compiles, by its number; ``ends`` can be read when it has ended."""

    number: int
    ends: Connection
    texts: list[str]


@dataclass
class _Server:
    """Has one thread, so that it can fork."""

    listener: socket.socket
    most: int
    keys: dict[str, Any]
    clients: dict[Connection, bytes] = field(default_factory=dict)  # with their settings
    waiting: list[tuple[bytes, Work]] = field(default_factory=list)
    children: list[_Child] = field(default_factory=list)
    asked: set[str] = field(default_factory=set)
    done: set[str] = field(default_factory=set)

    def run(self) -> None:
        """Compile until the last client has closed, or for ``IDLE_S`` nobody has asked."""
        has_begun = False
        while self.clients or not has_begun:
            ends = [child.ends for child in self.children]
            ready = set(wait([self.listener, *self.clients, *ends], None if ends else IDLE_S))
            if not ready:
                return
            for child in [one for one in self.children if one.ends in ready]:
                self._has_ended(child)
            for client in [one for one in self.clients if one in ready]:
                self._receive(client)
            if self.listener in ready:
                self._accept()
                has_begun = True
            self._start()

    def _accept(self) -> None:
        client = Connection(self.listener.accept()[0].detach())
        self.clients[client] = b""
        self._tell(client, self.keys)

    def end(self) -> None:
        """End what compiles still: nobody needs it."""
        for child in self.children:
            os.kill(child.number, signal.SIGTERM)

    def _tell(self, client: Connection, message: object) -> None:
        with contextlib.suppress(OSError):  # it has ended, which is read later
            client.send_bytes(pickle.dumps(message))

    def _receive(self, client: Connection) -> None:
        """Read what a client wants compiled, behind its settings; or let go of one that closes."""
        try:
            message = client.recv_bytes()
        except (EOFError, OSError):
            del self.clients[client]
            client.close()
            return
        if not self.clients[client]:
            self.clients[client] = message
        else:
            works = pickle.loads(message)
            for work in works:
                if work.text not in self.asked:
                    self.asked.add(work.text)
                    self.waiting.append((self.clients[client], work))
            if done := [work.text for work in works if work.text in self.done]:
                self._tell(client, done)

    def _start(self) -> None:
        """Divide what waits among processes, as many as there may be yet."""
        num_free = self.most - len(self.children)
        if not self.waiting or num_free <= 0:
            return
        (settings, _), *_ = self.waiting
        mine = [work for its, work in self.waiting if its == settings]
        self.waiting = [each for each in self.waiting if each[0] != settings]
        mine.sort(key=lambda work: len(work.packed), reverse=True)
        for share in (mine[at::num_free] for at in range(min(num_free, len(mine)))):
            self._fork(settings, share)

    def _fork(self, settings: bytes, share: Sequence[Work]) -> None:
        reads, writes = os.pipe()
        number = os.fork()
        if number:
            os.close(writes)
            self.children.append(_Child(number, Connection(reads), [w.text for w in share]))
            return
        try:
            os.close(reads)
            held = [*self.clients, *(child.ends for child in self.children)]
            for descriptor in (self.listener.fileno(), *(one.fileno() for one in held)):
                os.close(descriptor)
            compat.inductor.set_settings(pickle.loads(settings))
            _compile_all(share)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)  # however it went: what is missing, those compile who need it

    def _has_ended(self, child: _Child) -> None:
        self.children.remove(child)
        child.ends.close()
        os.waitpid(child.number, 0)
        self.done.update(child.texts)
        for client in self.clients:
            self._tell(client, child.texts)


def _compile_all(left: Sequence[Work]) -> None:
    """Compile all, or wait for other processes that do."""
    while left:
        with contextlib.ExitStack() as turns:
            done = _compile_together(left, turns)
        if not done:  # others are compiling all that are left
            done = left[:1]
            with turn_to_compile(done[0].text):
                pass
        left = [work for work in left if work not in done]


def _compile_together(works: Sequence[Work], turns: contextlib.ExitStack) -> Sequence[Work]:
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
