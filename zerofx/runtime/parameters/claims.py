"""The memory that this process has taken charge of, and the refusal of what does not fit it."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from zerofx.ir.parameters import ParameterInfo
from zerofx.runtime.parameters.parameter import ParameterState


class Claims:
    """The storages of bound parameters, and the buffers that all ranks have as rank 0's."""

    def __init__(self) -> None:
        self._buffers = WeakIdKeyDictionary()
        self._claims = WeakIdKeyDictionary()  # by storage: first byte, end, parameter, its name

    def unseen(self, buffers: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return those of these buffers that have not been here before; note them."""
        unseen = []
        for buffer in buffers:
            if buffer in self._buffers:
                continue
            if buffer.is_meta:
                raise ValueError(
                    f"a buffer of shape {tuple(buffer.shape)} is on the meta device and has no "
                    "values. Materialize the model before its first step."
                )
            self._buffers[buffer] = None
            unseen.append(buffer)
        return unseen

    def claim(self, parameter: nn.Parameter, name: str) -> None:
        """Refuse two parameter objects over the same memory: each would get a shard of its own."""
        start = parameter.storage_offset() * parameter.itemsize
        stop = start + parameter.nbytes
        claims = self._claims.setdefault(parameter.untyped_storage(), [])
        for other_start, other_stop, other, other_name in claims:
            if other() is parameter:
                return
            if other() is not None and start < other_stop and other_start < stop:
                raise ValueError(
                    f"parameters {other_name!r} and {name!r} are two nn.Parameter objects over the "
                    "same memory, and each would be sharded and updated on its own. Tie them by "
                    "assigning the same object: `b.weight = a.weight`."
                )
        claims.append((start, stop, weakref.ref(parameter), name))


def check_same_options(bound: ParameterState, communicator: Any, stage: int) -> None:
    """Refuse a parameter that is bound at another stage or to other ranks.  Raises: ValueError."""
    remedy = (
        "A model is bound by the first zero-compiled function it goes through, evaluation "
        "included: give every function that touches it the same options, or call "
        "zerofx.unshard(model, optimizer) first."
    )
    if bound.stage != stage:
        raise ValueError(
            f"parameter {bound.name!r} is bound at ZeRO stage {bound.stage}, and this function "
            f"asks for stage {stage}. {remedy}"
        )
    mine, other = bound.communicator, communicator
    ranks = [(c.mesh, getattr(c, "group", None)) for c in (mine, other)]
    if mine is not other and ranks[0] != ranks[1]:
        raise ValueError(
            f"parameter {bound.name!r} is bound to another process group (rank {mine.rank} of "
            f"{mine.world_size}) than this function asks for (rank {other.rank} of "
            f"{other.world_size}). {remedy}"
        )


def check_same_place(bound: ParameterState, info: ParameterInfo) -> None:
    """Refuse a parameter that has been bound anew in other buckets.  Raises: ValueError.

    A program is laid out like the parameters that are bound when it is compiled, and does not
    follow those that are bound later.
    """
    mine, other = bound.info.place, info.place
    same = (mine.offset, mine.extent, mine.shard_numel) == (
        (other.offset, other.extent, other.shard_numel)
    )
    if bound.stage > 0 and not same:
        raise ValueError(
            f"parameter {bound.name!r} has been given back by zerofx.unshard since this function "
            "was compiled, and another function has sharded it in other buckets. Call "
            "torch.compiler.reset(), and this function is compiled anew, or give all functions "
            "options={'bucket': False}."
        )
