"""Have parameters' first values there, equal on all ranks, a few parameters at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import nn

from zerofx import compat
from zerofx.deferred.ledger import LEDGER
from zerofx.plan import ParameterInfo
from zerofx.runtime.flat import COALESCED_BYTES, make_equal

Member = tuple[nn.Parameter, ParameterInfo]


def batches(members: Iterable[Member]) -> Iterator[list[Member]]:
    """Cut a list of parameters where what has come together is worth a message.

    A large one is alone: it is all that a rank then has whole.
    """
    batch: list[Member] = []
    nbytes = 0
    for parameter, info in members:
        if batch and nbytes + info.nbytes > COALESCED_BYTES:
            yield batch
            batch, nbytes = [], 0
        batch.append((parameter, info))
        nbytes += info.nbytes
    if batch:
        yield batch


def make(parameter: nn.Parameter, communicator: Any) -> None:
    """Have a parameter's memory there; its values where other ranks take them from.

    That is rank 0, and all ranks for memory that something else looks into as well.
    """
    is_overwritten = communicator.rank != 0 and not compat.is_memory_shared(parameter)
    LEDGER.make(parameter, with_values=not is_overwritten)


def have_values(members: Sequence[Member], communicator: Any) -> None:
    """Make those whose making was deferred, and all of them equal to rank 0's.  Collective."""
    for parameter, _ in members:
        make(parameter, communicator)
    make_equal([parameter for parameter, _ in members], communicator)
