"""Connections that keep a checkpoint's ranks together, and writing behind a training."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import pickle
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from zerofx import compat
from zerofx.accelerator import current_as_here
from zerofx.checkpoint.contents import bound_parameters
from zerofx.errors import CheckpointError, MismatchError, RankError
from zerofx.options import environment
from zerofx.runtime.comm.agreement import rendezvous
from zerofx.runtime.comm.communication import Communicator, default_group
from zerofx.runtime.parameters.parameter import ParameterState
from zerofx.runtime.parameters.registry import REGISTRY

logger = logging.getLogger("zerofx")

Result = TypeVar("Result")
Answer = TypeVar("Answer")

_TIMEOUT = timedelta(minutes=30)
"""The time that one rank may write while others wait: torch's own limit for a collective."""

_LOST = "checkpoints/lost"
"""The key that counts, in the store of a group, how often one of its ranks has lost the others."""

_KINDS = (
    ValueError,
    FileExistsError,
    FileNotFoundError,
    MismatchError,
    RankError,
    CheckpointError,
)
"""The errors that keep their type on other ranks, the first that fits; others are RankErrors."""


class Ranks:
    """The ranks of one checkpoint: all succeed, or all raise.

    They have connections of their own, over CPUs, because a checkpoint may be written beside the
    collectives of a training.  Each group makes them once, and anew when one of its ranks has lost
    them.  All ranks talk to rank 0; if one ends, its connections close, and the others fail at
    once.
    """

    _known: weakref.WeakKeyDictionary[dist.ProcessGroup, tuple[int, Ranks]] = (
        weakref.WeakKeyDictionary()
    )
    """Each group's connections, and how often its ranks had lost some when they were made."""

    @classmethod
    def of(cls, bounds: Collection[ParameterState], group: Any, name: str) -> Ranks:
        """Return once all ranks that hold ``bounds`` have called this with ``name``.

        If nothing is bound yet: all ranks of ``group``, or of the world if that is None.

        Raises: ValueError if the parameters are of several groups, or not of ``group``;
        RuntimeError if a rank does not join.
        """
        communicators = {bound.ranks: bound.communicator for bound in bounds}
        if len(communicators) > 1:
            raise ValueError(
                "the model's parameters are sharded over different process groups, and one "
                "checkpoint is written by the ranks of one. Save the parts of the model by "
                "themselves."
            )
        if not communicators and group is None:
            group = default_group(environment())
        found = next(iter(communicators.values()), None) or Communicator.of(group)
        if group is not None and Communicator.of(group).group is not found.group:
            raise ValueError(
                "process_group is not the one that the model is sharded over: leave it out, it is "
                "for models that no compiled step has seen yet"
            )
        if found.world_size == 1:
            return cls(None, 0, 1)
        assert found.group is not None
        barrier, store = REGISTRY.barrier, compat.tensors.agreement_store(found.group)
        barrier.confirm_writes([b for b in barrier.written if b.ranks is found.group])
        lost, known = cls._known.get(found.group, (0, None))
        if known is not None and known._group is None:
            store.add(_LOST, 1)
        rendezvous(store, name, found.rank, found.world_size, barrier.load_timeout_s)
        now_lost = store.add(_LOST, 0)
        if known is None or lost != now_lost:
            known = cls(_connected(found), found.rank, found.world_size)
            cls._known[found.group] = now_lost, known
        return known

    def __init__(self, group: dist.Backend | None, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self._group = group

    def exchange(
        self,
        work: Callable[[], Result],
        decide: Callable[[list[Result]], Sequence[Answer]],
    ) -> Answer:
        """Do ``work`` on every rank; rank 0 ``decide``s on the results each rank's answer.

        Raises: what ``work`` or ``decide`` raised, on the rank where it did; on the others the same
        in words.  RankError if a rank does not answer any more.
        """
        if self.world_size == 1:
            return decide([work()])[0]
        others = range(1, self.world_size)
        sent: list[dist.Work] = []  # kept until they are complete
        failure = None
        try:
            result, failure = _outcome(work)
            if self.rank > 0:
                sent = self._send((_told(failure), result), 0)
                failed, told, answer = self._receive(0)
                with contextlib.suppress(RuntimeError):  # rank 0 has ended, but has answered
                    sent.append(self._connection.send([_thanks()], 0, 0))
            else:
                reports: list[Any] = [(_told(failure), result)]
                reports += [self._receive(rank) for rank in others]
                failed, told = next(((r, t) for r, (t, _) in enumerate(reports) if t), (0, None))
                answers: Sequence[Any] | None = None
                if told is None:
                    answers, failure = _outcome(lambda: decide([its for _, its in reports]))
                    told = _told(failure)
                thanks = [self._connection.recv([_thanks()], rank, 0) for rank in others]
                for rank in others:
                    sent += self._send((failed, told, answers and answers[rank]), rank)
                for received in thanks:
                    received.wait()
                answer = answers and answers[0]
            for complete in sent:
                complete.wait()
        except BaseException as error:
            self._group = None  # closes its connections: no rank waits for this one
            if not isinstance(error, RuntimeError):
                raise
            if "timed out" in str(error).lower():
                why = f"has had no answer from another rank in {_TIMEOUT.seconds // 60} minutes"
            else:
                why = (
                    "has lost the other ranks: one of them has ended, or was interrupted while it "
                    "saved or loaded; their logs say why"
                )
            raise RankError(f"rank {self.rank} {why} ({error})") from failure or error
        if failure is not None:
            raise failure
        if told is not None:
            kind, words = told
            raise kind(f"on rank {failed}: {words}")
        return answer

    @compat.tensors.past_all_modes()
    def _send(self, value: object, rank: int) -> list[dist.Work]:
        """Begin to send.  Wait when the other has answered: gloo forgets a send whose receiver ends
        after it has asked for it (2.11 to 2.15), and to wait for that takes the whole timeout.
        """
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        size = torch.tensor([data.numel()], device="cpu")
        return [self._connection.send([tensor], rank, 0) for tensor in (size, data)]

    @compat.tensors.past_all_modes()
    def _receive(self, rank: int) -> Any:
        size = torch.empty(1, dtype=torch.int64, device="cpu")
        self._connection.recv([size], rank, 0).wait()
        data = torch.empty(int(size), dtype=torch.uint8, device="cpu")
        self._connection.recv([data], rank, 0).wait()
        return pickle.loads(data.numpy().tobytes())

    @property
    def _connection(self) -> dist.Backend:
        if self._group is None:
            raise RuntimeError("an earlier save or load has ended so")
        return self._group

    def together(self, work: Callable[[], Result]) -> list[Result]:
        """Do ``work`` on every rank, and return every rank's result, by rank.  Collective.

        Raises: as ``exchange``.
        """
        return self.exchange(work, lambda results: [results] * self.world_size)

    def on_first(self, work: Callable[[], Result]) -> Result:
        """Do ``work`` on rank 0, and return its result on all ranks.  Collective."""
        return self.together(lambda: work() if self.rank == 0 else None)[0]  # type: ignore[return-value]

    def check_same(self, **values: object) -> None:
        """Raise ValueError on all ranks unless all were given the same ``values``, by name."""
        gathered = self.together(lambda: {name: str(value) for name, value in values.items()})
        for name in values:
            found = [of_rank[name] for of_rank in gathered]
            if len(set(found)) > 1:
                listed = ", ".join(f"rank {rank}: {value!r}" for rank, value in enumerate(found))
                raise ValueError(
                    f"ranks were given different values of {name} ({listed}), and all write to or "
                    "read from one checkpoint. Make it the same on all: a time or a random name "
                    "can be chosen by rank 0 and broadcast."
                )


@compat.tensors.past_all_modes()
def _thanks() -> torch.Tensor:
    return torch.ones(1, device="cpu")


def _connected(communicator: Communicator) -> dist.Backend:
    """Connect the ranks once more, by gloo, for checkpoints alone.

    torch does not know of this group: ``destroy_process_group`` leaves it alone, and it needs no
    store any more.  So a checkpoint that is being written then is completed.
    """
    assert communicator.group is not None
    store = compat.tensors.agreement_store(communicator.group)
    number = store.add(f"checkpoints/{communicator.rank}", 1)
    return dist.ProcessGroupGloo(
        dist.PrefixStore(f"checkpoints/{number}", store),
        communicator.rank,
        communicator.world_size,
        _TIMEOUT,
    )


def _outcome(work: Callable[[], Result]) -> tuple[Result | None, Exception | None]:
    try:
        return work(), None
    except Exception as error:
        return None, error


def _told(error: Exception | None) -> tuple[type[Exception], str] | None:
    if error is None:
        return None
    words = str(error) or type(error).__name__
    kind = next((kind for kind in _KINDS if isinstance(error, kind)), None)
    return (kind, words) if kind else (RankError, f"{type(error).__name__}: {words}")


class Saving:
    """A checkpoint that is being written, or has been.

    ``wait`` raises its error; without a ``wait``, the next ``zerofx.save`` or ``zerofx.load`` does,
    or the process ends with exit code 1.  One at a time is written in the background: the ``last``.
    """

    last: ClassVar[Saving | None] = None

    def __init__(self, path: Path) -> None:
        self.path = path
        self.was_raised = False  # the error, if there is one
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Write it by ``work`` in a thread, for which the interpreter waits before it ends.

        Call ``meet`` before.
        """
        Saving.last = self
        given = work, current_as_here()
        self._thread = threading.Thread(target=self._run, args=given, name="zerofx checkpoint")
        self._thread.start()

    def _run(self, work: Callable[[], None], take_device: Callable[[], None]) -> None:
        take_device()
        _yield_to_others()
        try:
            work()
        except BaseException as error:
            if isinstance(error, Exception):
                self._error = error
            else:
                self._error = CheckpointError(f"{self.path} was not written: {error!r}")
            logger.error("checkpoint %s was not written: %s", self.path, error)
            logger.debug("%s", traceback.format_exc())
            _drop_tracebacks(error)
            atexit.register(self._fail_at_exit)

    def _fail_at_exit(self) -> None:
        """End the process as failed, after all else that is done at exit."""
        atexit.unregister(self._fail_at_exit)
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)

    def done(self) -> bool:
        """Return whether it is complete, or has failed."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self, timeout_s: float | None = None) -> Path:
        """Return its path when all ranks have written it.

        Raises: CheckpointError if it could not be written; TimeoutError.
        """
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                raise TimeoutError(f"{self.path} is still being written after {timeout_s:g} s")
        if self._error is not None:
            self.was_raised = True
            atexit.unregister(self._fail_at_exit)
            raise self._error
        return self.path

    result = wait


def _drop_tracebacks(error: BaseException | None) -> None:
    """Free what the functions hold that raised an error: the copies that were to be written."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def _yield_to_others() -> None:
    """Take a thirtieth of a CPU that others want, where the system can; with 19 it starves."""
    if sys.platform == "linux":  # elsewhere the call is about all threads
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 15)


def meet(model: nn.Module, optimizers: Sequence[Optimizer], process_group: Any, name: str) -> Ranks:
    """Return when all ranks are here, and no step or save is working on these objects.

    Raises: the error of the last save, if it has not been raised on one of the ranks; as
    ``Ranks.of``; RuntimeError in a compiled call.
    """
    REGISTRY.refuse_in_call(name)
    bounds = bound_parameters(model, *optimizers)
    REGISTRY.settle(bounds, optimizers)
    ranks = Ranks.of(bounds, process_group, name)
    last, Saving.last = Saving.last, None
    ranks.together(lambda: last.wait() if last is not None and not last.was_raised else None)
    return ranks
