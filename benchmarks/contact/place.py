"""The place where sections run: GPUs at full size, or the CPU for a rehearsal."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from models import Sizes
from ranks import on_ranks
from torch import nn

from contact.sections import FOLDER
from zerofx.runtime.comm.communication import Communicator
from zerofx.runtime.comm.gloo import GlooTransport

T = TypeVar("T")

RANKS_S = 300.0
"""The time that ranks may take, once started."""

MOST_RANKS = 4
"""Of checks: more show no more, and all compile at once."""


@dataclass(frozen=True)
class Place:
    """This machine; it travels to ranks.

    ``folder`` is for what a section writes, and is removed behind it.  Times that ranks may take
    are multiplied by ``patience``.
    """

    gpus: int
    folder: Path
    patience: float = 1.0

    @classmethod
    def here(cls, patience: float) -> Place:
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return cls(gpus, Path(os.environ[FOLDER]), patience)

    @property
    def is_rehearsal(self) -> bool:
        return not self.gpus

    def pick(self, on_gpu: T, rehearsed: T) -> T:
        """Return a size: the one for a GPU, or the one to rehearse with."""
        return rehearsed if self.is_rehearsal else on_gpu

    @property
    def device(self) -> torch.device:
        """The device of this process: each rank's is current."""
        if self.is_rehearsal:
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())

    @property
    def num_ranks(self) -> int:
        """Two at least, which share a GPU if there is but one."""
        return max(2, min(self.gpus, MOST_RANKS))

    def on_ranks(
        self, worker: Callable[..., Any], *arguments: Any, timeout_s: float = RANKS_S
    ) -> list[Any]:
        """Return what ``worker(self, *arguments)`` returned on every rank."""
        how = {"timeout_s": timeout_s * self.patience, "on_one_gpu": self.gpus == 1}
        try:
            return on_ranks(_work, self.num_ranks, self, worker, arguments, **how)
        except SystemExit as error:
            why = str(error).rpartition(": ")[2]
            raise RuntimeError(f"{worker.__name__} on {self.words}: {why}; see the log") from None

    def built(self, sizes: Sizes, dtype: torch.dtype = torch.float32) -> nn.Module:
        """Build a model on this device, with the same values on every rank."""
        torch.manual_seed(0)
        with self.device:
            return sizes.build().to(dtype)

    def finish(self) -> None:
        """Wait for all that this process's device was given."""
        if not self.is_rehearsal:
            torch.cuda.synchronize()

    def seconds(self, run: Callable[[], Any]) -> float:
        """Time a call, all that it starts on the device included."""
        self.finish()
        started = time.perf_counter()
        run()
        self.finish()
        return time.perf_counter() - started

    @property
    def words(self) -> str:
        """How ranks reach each other here."""
        if self.is_rehearsal:
            return f"{self.num_ranks} ranks on the CPU over gloo"
        if self.gpus == 1:
            return "2 ranks on one GPU over gloo"
        return f"{self.num_ranks} GPUs over NCCL"


def _work(rank: int, num_ranks: int, place: Place, worker: Callable, arguments: tuple) -> Any:
    if place.gpus == 1:
        _move_over_gloo()
    return worker(place, *arguments)


def _move_over_gloo() -> None:
    """Have zerofx move an accelerator's tensors over gloo, which it refuses to.

    For ranks on one GPU, which NCCL refuses: gloo stages in host memory what it is given.
    """
    connect = Communicator._connect

    def connect_over_gloo(self: Communicator, device: str, group: dist.ProcessGroup) -> Any:
        if device == "cpu":
            return connect(self, device, group)
        return GlooTransport(group, self.buffers)

    Communicator._connect = connect_over_gloo
