"""The objects that a program trains, and what it is given to train them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from zerofx.codegen.kernels import Keep
from zerofx.codegen.rewrite.storage import Precision
from zerofx.ir.parameters import ParameterTable
from zerofx.options import Options
from zerofx.runtime.optimizer.delayed import DelayedUpdates
from zerofx.runtime.storage.copies import Copies
from zerofx.runtime.storage.tier import FileTier
from zerofx.runtime.turns import Turns


@dataclass(frozen=True)
class Trained:
    """A program's objects: the table's parameters, buffers, and optimizers by their handle.

    ``replaced`` are the parameters that get a gradient whatever they had for one.
    """

    table: ParameterTable
    tensors: Sequence[nn.Parameter]
    buffers: Sequence[torch.Tensor]
    optimizers: Mapping[int, torch.optim.Optimizer]
    replaced: frozenset[int] = frozenset()


@dataclass(frozen=True)
class UpdateSettings:
    """The settings by which one rank updates an optimizer's parameters.

    Data, gradients and states are this rank's flat shards if ``sharded``; ``rank`` is named in
    errors.  ``gradients_read_later`` are the parameters whose gradient something reads after the
    update.  ``keep_source`` is given the kernels that are generated.  ``precision`` is what states
    are kept in.  ``owned`` are the parameters whose update may need them whole: the
    optimizer's own step, if it is to take its ``own_step``.  Those ``on_host``
    are updated on CPU tensors, and their states are kept in host memory.  Those that are not
    sharded may be ``seen_flat`` by updates that run together, as shards are.
    """

    rank: int
    sharded: bool
    gradients_read_later: Collection[int] = ()
    keep_source: Keep | None = None
    precision: Precision = Precision()
    owned: Collection[int] = ()
    own_step: bool = False
    on_host: Collection[int] = ()
    seen_flat: bool = False


@dataclass(frozen=True)
class ProgramSetup:
    """The options of a program, and what its function has for it.

    ``copies`` makes its moves.  ``in_place`` are the buckets, as their parameters' indices, that it
    may write to before its last copies do.  Updates run together if ``joins_updates``, those in
    host memory as one for each bucket.  ``open_files`` opens the tier for what it reads from files.
    With ``delayed``, updates go on into the next call, which stores what they have made.  ``turns``
    says whether this rank has data in a call.
    """

    options: Options
    copies: Copies
    turns: Turns
    in_place: Sequence[Sequence[int]]
    joins_updates: bool
    open_files: Callable[[], FileTier]
    delayed: DelayedUpdates | None
