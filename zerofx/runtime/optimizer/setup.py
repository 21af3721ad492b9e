"""What a program trains, and how it keeps that on the device and in host memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from zerofx.codegen.rewrite.storage import Precision
from zerofx.ir.parameters import ParameterTable
from zerofx.runtime.optimizer.delayed import DelayedUpdates
from zerofx.runtime.optimizer.update import PLAIN
from zerofx.runtime.storage.copies import Mover
from zerofx.runtime.storage.tier import FileTier


@dataclass(frozen=True)
class Trained:
    """What a program is about: the table's parameters, buffers, and optimizers by their handle."""

    table: ParameterTable
    tensors: Sequence[nn.Parameter]
    buffers: Sequence[torch.Tensor]
    optimizers: Mapping[int, torch.optim.Optimizer]


@dataclass(frozen=True)
class DeviceSetup:
    """How a program keeps what it trains on the device.

    With ``moves_whole`` whole parameters live in their bucket's memory; ``in_place`` are the
    buckets, as their parameters' indices, that the program may write to before its last copies do.
    With ``reuses_buffers`` a layer's buffers are given out again, and kept until the call ends.
    """

    stage: int
    precision: Precision = PLAIN
    moves_whole: bool = False
    in_place: Sequence[Sequence[int]] = ()
    reuses_buffers: bool = True


@dataclass(frozen=True)
class HostSetup:
    """What a program has in host memory.

    The ``mover`` makes its moves; with ``keeps_states`` optimizer states live there, and updates
    run there, those of a bucket as one with ``joins_updates``.  ``open_files`` opens the tier for
    those that a program reads from files.  With ``delayed`` updates go on into the next call, which
    stores what they have made.
    """

    mover: Mover
    keeps_states: bool = False
    joins_updates: bool = False
    open_files: Callable[[], FileTier] | None = None
    delayed: DelayedUpdates | None = None
