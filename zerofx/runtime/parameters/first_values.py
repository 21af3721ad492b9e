"""Have parameters' first values there, equal on all ranks, a few parameters at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from zerofx import compat
from zerofx.deferred.ledger import LEDGER
from zerofx.deferred.tape import Source
from zerofx.ir.parameters import ParameterInfo
from zerofx.runtime.memory.flat import in_batches, make_equal

Member = tuple[nn.Parameter, ParameterInfo]


def batches(members: Iterable[Member]) -> Iterator[list[Member]]:
    """Cut a list of parameters into those that come together: a large one is alone.

    It is all that a rank then has whole.
    """
    return in_batches(members, lambda member: member[1].nbytes)


def read_by_all(members: Iterable[Member]) -> dict[int, Source]:
    """Those of new parameters that each rank could read its own part of, by index: from files."""
    found = ((info.index, LEDGER.source_of(parameter)) for parameter, info in members)
    return {index: source for index, source in found if source is not None}


def digest_of(sources: Mapping[int, Source]) -> bytes:
    """Return bytes that are equal on ranks that would read the same; empty for nothing."""
    lines = [f"{index} {sources[index].name}" for index in sorted(sources)]
    return hashlib.sha256("\n".join(lines).encode()).digest() if lines else b""


def make(parameter: nn.Parameter, communicator: Any) -> None:
    """Have a parameter's memory there; its values where other ranks take them from.

    That is rank 0, and all ranks for memory that something else looks into as well.
    """
    is_overwritten = communicator.rank != 0 and not compat.tensors.is_memory_shared(parameter)
    LEDGER.make(parameter, with_values=not is_overwritten)


def have_values(members: Sequence[Member], communicator: Any) -> None:
    """Make those whose making was deferred, and all of them equal to rank 0's.  Collective."""
    for parameter, _ in members:
        make(parameter, communicator)
    make_equal([parameter for parameter, _ in members], communicator)
