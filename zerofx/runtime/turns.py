"""Calls of ranks that have no batch: they take part in everything, and add nothing to it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator

import torch

from zerofx.errors import StepError


class NoDataAnywhere(BaseException):  # noqa: N818 - no error, and nobody's handler is to take it
    """No rank has data: the call ends, and nothing has changed."""


class Turns(threading.local):
    """Knows whether this rank has data in the call under way in a thread, and how many have."""

    def __init__(self) -> None:
        self._with_data = True
        self._flags: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}
        self.ranks_with_data = 0  # of the last call without

    @contextlib.contextmanager
    def without_data(self) -> Iterator[None]:
        """Surround a call of a rank that has none."""
        self._set(False)
        try:
            yield
        finally:
            self._set(True)

    def _set(self, with_data: bool) -> None:
        self._with_data = with_data
        for flag in self._flags.values():
            flag.fill_(float(with_data))

    def check(self, why_not: str) -> None:
        """Raise StepError where a rank has no data for a program that cannot do without."""
        if why_not and not self._with_data:
            raise StepError(f"zerofx.no_data: {why_not}")

    def has_data(self, dtype: torch.dtype, device: torch.device, why_not: str = "") -> torch.Tensor:
        if (dtype, device) not in self._flags:
            flag = torch.full((), float(self._with_data), dtype=dtype, device=device)
            self._flags[dtype, device] = flag
        return self._flags[dtype, device]

    def end_without_data(self, ranks: torch.Tensor) -> None:
        """Raise NoDataAnywhere if no rank has data; a rank that has some knows that one has."""
        if self._with_data:
            return
        self.ranks_with_data = int(ranks.item())
        if not self.ranks_with_data:
            raise NoDataAnywhere

    @contextlib.contextmanager
    def kept_without(self, of_batch: Iterable[torch.Tensor]) -> Iterator[None]:
        """Leave what a program writes of a batch as it is, if this rank has none."""
        before = [] if self._with_data else [(tensor, tensor.clone()) for tensor in of_batch]
        try:
            yield
        finally:
            for tensor, value in before:
                tensor.copy_(value)
