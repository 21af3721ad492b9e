"""Ranks of one machine read each other's memory: what they gather is copied once, by no socket.

Linux lets a process read the memory of another one of the same user (``process_vm_readv``), as
MPI libraries do between ranks of a node.  A rank writes on its board where the data of each
collective lies, and reads what it needs of the others' when it waits.  Two ranks on 2 cores,
16 MiB gathered: 1.6 to 2.2 ms against 6.6 to 7.1 over gloo's sockets (docs/measured.md).
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import platform
import secrets
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from ctypes import c_int64, c_void_p
from dataclasses import dataclass

import torch
import torch.distributed as dist

from zerofx import compat
from zerofx.errors import StepError

SLOTS = 2**14
"""The most collectives that may be in flight at once."""

_NUMBERS_PER_EPOCH = 2**40


class _Entry(ctypes.Structure):
    """The address of one collective's data.  The number is written last: then the rest is there.

    ``program`` is that of the step that started it, 0 for none.
    """

    _fields_ = (
        ("address", c_int64),
        ("nbytes", c_int64),
        ("program", c_int64),
        ("number", c_int64),
    )


class _Progress(ctypes.Structure):
    """The number of a rank's failed steps, and of the collectives that it has read since."""

    _fields_ = (("failures", c_int64), ("finished", c_int64))


class _Board(ctypes.Structure):
    """The memory that a rank lets others read; after a failure steps use other entries."""

    _fields_ = (("nonce", c_int64), ("progress", _Progress), ("entries", _Entry * (2 * SLOTS)))


class _Range(ctypes.Structure):
    _fields_ = (("address", c_void_p), ("nbytes", ctypes.c_size_t))


@dataclass(frozen=True)
class _Peer:
    """Another rank: its process, and where its board is.  Errors name it by its ``number``."""

    rank: int
    number: int
    process: int
    board: int


_Moment = tuple[int, int]
"""When a rank had had so many failures, and finished so many collectives since."""


class AnotherProgramError(StepError):
    """Rank ``peer`` runs ``program`` where this one runs another."""

    def __init__(self, message: str, peer: int, program: int) -> None:
        super().__init__(message)
        self.peer, self.program = peer, program


class PeerMemory:
    """The memory of the ranks of one group, all on this machine.

    Every rank posts and finishes the same collectives in the same order.  A step that fails on
    one rank is an error on those that wait for it, where sockets would hang.
    """

    _connected: weakref.WeakKeyDictionary[dist.ProcessGroup, PeerMemory | None] = (
        weakref.WeakKeyDictionary()
    )

    @classmethod
    def of(cls, group: dist.ProcessGroup, numbers: Sequence[int] = ()) -> PeerMemory | None:
        """Connect the ranks of a group; None if one cannot read another.  Collective, once.

        Errors name its ranks by these ``numbers``, or by their own.
        """
        if group not in cls._connected:
            memory = cls(group, numbers)
            cls._connected[group] = memory if memory.is_readable else None
        return cls._connected[group]

    @classmethod
    def decline(cls, group: dist.ProcessGroup) -> None:
        """Leave a group to its sockets.  All ranks must.

        Raises: ValueError if its ranks read each other's memory already.
        """
        if cls._connected.setdefault(group, None) is not None:
            raise ValueError(
                "peer_memory=False, but the ranks of this process group read each other's memory "
                "already, for a function compiled before: choose alike for all, or pass another "
                "process_group"
            )

    def __init__(self, group: dist.ProcessGroup, numbers: Sequence[int] = ()) -> None:
        self.rank = group.rank()
        self.world_size = group.size()
        numbers = numbers or range(self.world_size)
        self.number = numbers[self.rank]
        self.timeout_s = compat.tensors.timeout_s(group)
        self.board = _Board(nonce=secrets.randbits(62))
        self.count = 0
        self.program = 0  # of the step that this rank is in
        self._open: dict[int, tuple] = {}  # what is not finished here, by number
        self._leaving: deque[tuple[_Moment, tuple]] = deque()  # what is not finished elsewhere
        self._seen = _Progress(), _Entry()
        self._read = _process_vm_readv()
        address = ctypes.addressof(self.board)
        card = torch.tensor(
            [os.getpid(), address, self.board.nonce, self._read is not None], device="cpu"
        )
        cards = [torch.empty_like(card) for _ in range(self.world_size)]
        dist.all_gather(cards, card, group=group)
        known = [card.tolist() for card in cards]
        self.peers = [
            _Peer(rank, numbers[rank], process, board)
            for rank, (process, board, *_) in enumerate(known)
            if rank != self.rank
        ]
        is_known = (self._nonce(peer) == known[peer.rank][2] for peer in self.peers)
        readable = torch.tensor(
            int(all(able for *_, able in known) and all(is_known)), device="cpu"
        )
        dist.all_reduce(readable, dist.ReduceOp.MIN, group=group)
        self.is_readable = bool(readable)
        if self.is_readable:
            atexit.register(_settle_at_exit, weakref.ref(self))

    def post(self, sources: Sequence[torch.Tensor]) -> int:
        """Let the others read contiguous tensors until all have finished; return their number."""
        if not all(source.is_contiguous() for source in sources):
            raise ValueError("others read a source's bytes from its first on: make it contiguous")
        self.forget()
        if len(self._open) + len(self._leaving) >= SLOTS:
            raise StepError(
                f"{SLOTS} collectives are in flight, and no more can be: turn bucket on"
            )
        self.count += 1
        number = self.board.progress.failures * _NUMBERS_PER_EPOCH + self.count
        entry = self.board.entries[_slot(number)]
        addresses = (c_int64 * len(sources))(*(source.data_ptr() for source in sources))
        entry.address = ctypes.addressof(addresses)
        entry.nbytes = sum(source.nbytes for source in sources)
        entry.program = self.program
        entry.number = number
        self._open[number] = (addresses, *sources)
        return number

    def find(self, peer: _Peer, number: int, sources: Sequence[torch.Tensor]) -> list[int]:
        """Wait until a peer has posted a collective; return where its tensors like these lie.

        Raises: StepError if the peer's step has failed, or it posts something else;
        AnotherProgramError if that is of another program than this rank's; RuntimeError if the
        peer is dead or does not come within the group's timeout.
        """
        nbytes = sum(source.nbytes for source in sources)
        pause_s, deadline = 0.0, 0.0
        while True:
            progress, entry = self._look(peer, number)
            if entry.number == number:
                self._look(peer, number)  # the address may have been read before it was written
                mine = self.board.entries[_slot(number)].program
                if entry.program != mine:
                    raise AnotherProgramError(
                        f"rank {peer.number} runs another program than rank {self.number}: the "
                        "ranks call different functions, or one that their arguments lead "
                        "different ways. Call the same compiled functions in the same order, and "
                        "decide alike on all ranks what a step does.",
                        peer.number,
                        entry.program,
                    )
                if entry.nbytes != nbytes:
                    raise StepError(
                        f"rank {peer.number} sends {entry.nbytes} bytes where rank {self.number} "
                        f"expects {nbytes}: the ranks call different functions, or one has "
                        "skipped a call. Call the same compiled functions in the same order."
                    )
                addresses = (c_int64 * len(sources))()
                where = _Range(entry.address, ctypes.sizeof(addresses))
                self._transfer(peer, (_range(addresses),), (where,))
                return list(addresses)
            if progress.failures > self.board.progress.failures:
                raise StepError(
                    f"the step failed on rank {peer.number}, so rank {self.number} cannot finish "
                    f"it: look at what rank {peer.number} says. The ranks may have updated "
                    "different parameters: go on from a checkpoint."
                )
            now = time.monotonic()
            deadline = deadline or now + self.timeout_s
            if now > deadline:
                raise RuntimeError(
                    f"rank {peer.number} did not take part within {self.timeout_s:g} s, the "
                    "process group's timeout"
                )
            time.sleep(pause_s)
            pause_s = min(pause_s + 2e-6, LONGEST_PAUSE_S)

    def copy(self, peer: _Peer, parts: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Copy a peer's bytes from each address into the contiguous tensor beside it.

        Raises: RuntimeError if the peer is dead.
        """
        for first in range(0, len(parts), MOST_RANGES):
            some = parts[first : first + MOST_RANGES]
            local = tuple(_Range(into.data_ptr(), into.nbytes) for _, into in some)
            remote = tuple(_Range(address, into.nbytes) for address, into in some)
            copied = self._transfer(peer, local, remote)
            for here, there in zip(local, remote, strict=True):  # at most 2 GiB at once
                done = min(copied, here.nbytes)
                copied -= done
                while done < here.nbytes:
                    left = here.nbytes - done
                    mine, its = (_Range(one.address + done, left) for one in (here, there))
                    done += self._transfer(peer, (mine,), (its,))

    def finish(self, number: int) -> None:
        """Say that this rank will read no more of a collective, and wait until nobody will.

        Its source's memory is this rank's own then: a program counts it as free.

        Raises: RuntimeError if the others do not finish it within the group's timeout.
        """
        progress = self.board.progress
        progress.finished += 1
        source = self._open.pop(number)
        self._leaving.append(((progress.failures, progress.finished), source))
        self.settle()

    def forget(self) -> bool:
        """Let go of what all others have finished too; return whether nothing is left."""
        if self._leaving:
            slowest = min(map(self._moment, self.peers))
            while self._leaving and self._leaving[0][0] <= slowest:
                self._leaving.popleft()
        return not self._leaving

    def settle(self, timeout_s: float | None = None) -> None:
        """Wait until the others have finished what this rank has: then its memory is its own.

        Raises: RuntimeError if they do not within ``timeout_s``, by default the group's.
        """
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit_s
        pause_s = 0.0
        while not self.forget():
            if time.monotonic() > deadline:
                raise RuntimeError(f"a rank did not finish the step within {limit_s:g} s")
            time.sleep(pause_s)
            pause_s = min(pause_s + 2e-6, LONGEST_PAUSE_S)

    def fail(self) -> None:
        """Tell the others that a step has failed here, and drop out of what is in flight.

        What was posted stays readable until they have failed too.
        """
        progress = self.board.progress
        failed = progress.failures + 1, 0
        self._leaving.extend((failed, source) for source in self._open.values())
        self._open.clear()
        self.count = 0
        progress.finished = 0
        progress.failures += 1

    def _moment(self, peer: _Peer) -> _Moment:
        """Return a peer's progress; a dead one will read nothing more."""
        try:
            progress, _ = self._look(peer, 0)
        except RuntimeError:
            return sys.maxsize, 0
        return progress.failures, progress.finished

    def _look(self, peer: _Peer, number: int) -> tuple[_Progress, _Entry]:
        progress, entry = self._seen
        slot = peer.board + _Board.entries.offset + _slot(number) * ctypes.sizeof(_Entry)
        self._transfer(
            peer,
            (_range(progress), _range(entry)),
            (
                _Range(peer.board + _Board.progress.offset, ctypes.sizeof(_Progress)),
                _Range(slot, ctypes.sizeof(_Entry)),
            ),
        )
        return progress, entry

    def _nonce(self, peer: _Peer) -> int | None:
        nonce = c_int64()
        try:
            self._transfer(peer, (_range(nonce),), (_Range(peer.board, ctypes.sizeof(nonce)),))
        except RuntimeError:
            return None
        return nonce.value

    def _transfer(self, peer: _Peer, local: tuple[_Range, ...], remote: tuple[_Range, ...]) -> int:
        number = len(local)
        ranges = _Range * number
        assert self._read is not None, "asked only of those who said they can"
        copied = self._read(peer.process, ranges(*local), number, ranges(*remote), number, 0)
        if copied <= 0:
            reason = os.strerror(ctypes.get_errno())
            raise RuntimeError(
                f"rank {peer.number} (process {peer.process}) cannot be read: {reason}. It "
                "has probably died: look at its log"
            )
        return copied


MOST_RANGES = 512
"""Of one call; the system takes 1,024."""

LONGEST_PAUSE_S = 2e-4
"""The time that a waiting rank sleeps between two looks at a peer's board."""

EXIT_S = 5.0
"""The time that exit gives others to finish reading; one that never does must not hold it up."""


def _slot(number: int) -> int:
    failures, count = divmod(number, _NUMBERS_PER_EPOCH)
    return failures % 2 * SLOTS + count % SLOTS


def _range(value: ctypes.Structure | ctypes.Array | c_int64) -> _Range:
    return _Range(ctypes.addressof(value), ctypes.sizeof(value))


def _process_vm_readv() -> Callable[..., int] | None:
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return None  # stores become visible in program order on x86 alone
    function = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
    if function is not None:
        unsigned = ctypes.c_ulong
        function.argtypes = (ctypes.c_int, c_void_p, unsigned, c_void_p, unsigned, unsigned)
        function.restype = ctypes.c_ssize_t
    return function


def _settle_at_exit(memory: weakref.ref[PeerMemory]) -> None:
    known = memory()
    if known is not None:
        with contextlib.suppress(RuntimeError):
            known.settle(EXIT_S)
