"""How the ranks that write or read a checkpoint keep together: all succeed, or all raise."""

from __future__ import annotations

import atexit
import contextlib
import weakref
from collections.abc import Callable, Collection
from typing import Any, TypeVar

import torch.distributed as dist

from zerofx import compat
from zerofx.checkpoint.errors import CheckpointError, MismatchError
from zerofx.options import environment
from zerofx.runtime.comm.agreement import rendezvous
from zerofx.runtime.comm.communication import Communicator, default_group
from zerofx.runtime.parameters.parameter import BoundParameter
from zerofx.runtime.parameters.registry import REGISTRY

Result = TypeVar("Result")

_KINDS = (ValueError, FileExistsError, FileNotFoundError, MismatchError, CheckpointError)
"""The errors that keep their type on other ranks; others are CheckpointErrors there."""


class Ranks:
    """The ranks of one checkpoint, and a group of their own to talk in.

    A write goes on behind the training, whose collectives must not meet those of the write: the
    group is gloo's, over CPUs, whatever the training uses.  It is made once for each group.
    """

    _known: weakref.WeakKeyDictionary[dist.ProcessGroup, Ranks] = weakref.WeakKeyDictionary()

    @classmethod
    def of(cls, bounds: Collection[BoundParameter], group: Any, name: str) -> Ranks:
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
            members = dist.get_process_group_ranks(found.group)
            control = dist.new_group(members, backend="gloo", use_local_synchronization=True)
            cls._known[found.group] = cls(control, found.rank, found.world_size)
        return cls._known[found.group]

    def __init__(self, group: dist.ProcessGroup | None, rank: int, world_size: int) -> None:
        self.group, self.rank, self.world_size = group, rank, world_size

    @classmethod
    def end_all(cls) -> None:
        """At exit: end the threads of these groups, which would need an interpreter.

        One that drops a tensor while the interpreter shuts down kills the process ("terminate
        called without an active exception").  A group joins its threads when nobody has it.
        """
        while cls._known:
            _, ranks = cls._known.popitem()
            group, ranks.group = ranks.group, None
            with contextlib.suppress(ValueError):  # the user has destroyed it
                dist.destroy_process_group(group)
            del group

    def together(self, work: Callable[[], Result]) -> list[Result]:
        """Do ``work`` on every rank, and return what each has got, by rank.  Collective.

        Raises: what it raised, on the rank where it did; on the others the same in words.
        """
        result, failure = None, None
        try:
            result = work()
        except Exception as error:
            failure = error
        if self.world_size == 1:
            if failure is not None:
                raise failure
            return [result]  # type: ignore[list-item]
        told = None if failure is None else _told(failure)
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, (told, result), group=self.group)
        if failure is not None:
            raise failure
        for rank, (other, _) in enumerate(gathered):
            if other is not None:
                kind, words = other
                raise _KINDS[kind](f"on rank {rank}: {words}")
        return [result for _, result in gathered]

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


atexit.register(Ranks.end_all)


def _told(error: Exception) -> tuple[int, str]:
    kinds = [number for number, kind in enumerate(_KINDS) if isinstance(error, kind)]
    exact = [number for number in kinds if type(error) is _KINDS[number]]
    words = str(error) or type(error).__name__
    if not kinds:
        words = f"{type(error).__name__}: {words}"
    return (exact or kinds or [len(_KINDS) - 1])[0], words
