"""How the ranks that write or read a checkpoint keep together: all succeed, or all raise."""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from zerofx import compat
from zerofx.checkpoint.errors import CheckpointError, MismatchError, RankError
from zerofx.options import environment
from zerofx.runtime.comm.agreement import rendezvous
from zerofx.runtime.comm.communication import Communicator, default_group
from zerofx.runtime.parameters.parameter import ParameterState
from zerofx.runtime.parameters.registry import REGISTRY

Result = TypeVar("Result")
Answer = TypeVar("Answer")

_TIMEOUT = timedelta(minutes=30)
"""How long one rank may take to write what others have written: torch's own for a collective."""

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
    """The ranks of one checkpoint, and a group of their own to talk in.

    A write goes on behind the training, whose collectives must not meet those of the write: they
    have connections of their own, over CPUs, whatever the training uses.  These are made once for
    each group.  All talk to rank 0 alone: it, or any other, ends, and all hear of it at once.
    """

    _known: weakref.WeakKeyDictionary[dist.ProcessGroup, Ranks] = weakref.WeakKeyDictionary()

    @classmethod
    def of(cls, bounds: Collection[ParameterState], group: Any, name: str) -> Ranks:
        """Return once all ranks have called this with ``name``: those that hold ``bounds``.

        Those of ``group`` if nothing is bound yet, the world if that is None.

        Raises: ValueError for parameters of several groups, or another one's; RuntimeError if a
        rank does not join.
        """
        communicators = {id(bound.communicator): bound.communicator for bound in bounds}
        if len(communicators) > 1:
            raise ValueError(
                "the model's parameters are sharded over different process groups, and one "
                "checkpoint is written by the ranks of one. Save the parts of the model by "
                "themselves."
            )
        if not communicators and group is None:
            group = default_group(environment())
        found = next(iter(communicators.values()), None) or Communicator.of(group)
        if group is not None and Communicator.of(group) is not found:
            raise ValueError(
                "process_group is not the one that the model is sharded over: leave it out, it is "
                "for models that no compiled step has seen yet"
            )
        if communicators:
            REGISTRY.barrier.wait(bounds, name)
        elif found.world_size > 1:
            store = compat.agreement_store(found.group)
            rendezvous(store, name, found.rank, found.world_size, REGISTRY.barrier.join_timeout_s)
        if found.world_size == 1:
            return cls(None, 0, 1)
        assert found.group is not None
        if found.group not in cls._known:
            cls._known[found.group] = cls(_connected(found), found.rank, found.world_size)
        return cls._known[found.group]

    def __init__(self, group: dist.Backend | None, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self._group = group

    def exchange(
        self,
        work: Callable[[], Result],
        decide: Callable[[list[Result]], Sequence[Answer]],
    ) -> Answer:
        """Do ``work`` on every rank; rank 0 gets all results and decides each rank's answer.

        Raises: what ``work`` or ``decide`` raised, on the rank where it did; on the others the same
        in words.  RankError if a rank does not answer any more.
        """
        if self.world_size == 1:
            return decide([work()])[0]
        result, failure = _outcome(work)
        others = range(1, self.world_size)
        try:
            if self.rank > 0:
                self._send((_told(failure), result), 0)
                failed, told, answer = self._receive(0)
            else:
                reports: list[Any] = [(_told(failure), result)]
                reports += [self._receive(rank) for rank in others]
                failed, told = next(((r, t) for r, (t, _) in enumerate(reports) if t), (0, None))
                answers: Sequence[Any] | None = None
                if told is None:
                    answers, failure = _outcome(lambda: decide([its for _, its in reports]))
                    told = _told(failure)
                for rank in others:
                    self._send((failed, told, answers and answers[rank]), rank)
                answer = answers and answers[0]
        except BaseException as error:
            self._group = None  # closes its connections: no rank waits for this one
            if not isinstance(error, RuntimeError):
                raise
            raise RankError(
                f"rank {self.rank} has lost the other ranks: one of them has ended, or was "
                f"interrupted while it saved or loaded; their logs say why ({error})"
            ) from failure or error
        if failure is not None:
            raise failure
        if told is not None:
            kind, words = told
            raise _KINDS[kind](f"on rank {failed}: {words}")
        return answer

    def _send(self, value: object, rank: int) -> None:
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        for tensor in (torch.tensor([data.numel()]), data):
            self._connection.send([tensor], rank, 0).wait()

    def _receive(self, rank: int) -> Any:
        size = torch.empty(1, dtype=torch.int64)
        self._connection.recv([size], rank, 0).wait()
        data = torch.empty(int(size), dtype=torch.uint8)
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
        """Do ``work`` on rank 0, and return what it has got on all.  Collective."""
        return self.together(lambda: work() if self.rank == 0 else None)[0]  # type: ignore[return-value]

    def check_same(self, **values: object) -> None:
        """Raise ValueError on all ranks unless all have come with the same ``values``, by name."""
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


def _connected(communicator: Communicator) -> dist.Backend:
    """Connect the ranks once more, by gloo, for checkpoints alone.

    torch does not know of this group: ``destroy_process_group`` leaves it alone, and it needs no
    store any more, so a checkpoint that is under way then is completed.
    """
    assert communicator.group is not None
    store = compat.agreement_store(communicator.group)
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


def _told(error: Exception | None) -> tuple[int, str] | None:
    if error is None:
        return None
    words = str(error) or type(error).__name__
    for number, kind in enumerate(_KINDS):
        if isinstance(error, kind):
            return number, words
    return _KINDS.index(RankError), f"{type(error).__name__}: {words}"
