"""The flat memory that the whole parameters of a bucket live in, at stages 1 and 2."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
from torch import nn

from zerofx import compat
from zerofx.ir.parameters import ParameterInfo
from zerofx.runtime.memory.flat import ordinary_tensors, with_own_storage
from zerofx.runtime.memory.pages import prefer_huge_pages


class BucketMemory:
    """A flat buffer whose ranges are parameters: one that all ranks' updated shards make up.

    Each parameter is a tensor over its range with a storage object of its own, so that saving,
    copying or tracing one knows nothing of its neighbours.  Shapes: ``flat`` is
    ``[shard_numel * world_size]``, ``own`` this rank's ``[shard_numel]`` of it.
    """

    def __init__(self, members: Sequence[tuple[nn.Parameter, ParameterInfo]], rank: int) -> None:
        self.parameters = [weakref.ref(parameter) for parameter, _ in members]
        self.infos = [info for _, info in members]
        self.rank = rank
        self.flat = self.own = torch.empty(0)  # until the parameters move in
        self.shards: dict[int, torch.Tensor] = {}  # this rank's, by the parameter's identity
        self._addresses: list[int] = []

    def move_in(self, make: Callable[[nn.Parameter], None] = lambda parameter: None) -> bool:
        """Move parameters here that live elsewhere; return whether all live here now.

        ``make`` is called with each before it is copied: it need not be there before.

        A bucket stays where it is, and is updated there, while something else has memory of its
        parameters: a view that the user took, another process.
        """
        parameters = [p for p in (reference() for reference in self.parameters) if p is not None]
        if len(parameters) < len(self.parameters):
            return False
        if self._addresses == [parameter.data_ptr() for parameter in parameters]:
            return all(parameter.dtype == self.flat.dtype for parameter in parameters)
        return self._move(parameters, make)

    def _move(self, parameters: list[nn.Parameter], make: Callable[[nn.Parameter], None]) -> bool:
        first = parameters[0]
        for parameter, info in zip(parameters, self.infos, strict=True):
            layout = (tuple(parameter.shape), tuple(parameter.stride()))
            if layout != (info.shape, info.stride) or _is_shared(parameter):
                return False
            if (parameter.dtype, parameter.device) != (first.dtype, first.device):
                return False
        with ordinary_tensors():
            place = self.infos[0].place
            numel = place.shard_numel * self.infos[0].world_size
            flat = torch.zeros(numel, dtype=first.dtype, device=first.device)
            prefer_huge_pages(flat)
            self.flat = flat
            self.own = flat.narrow(0, self.rank * place.shard_numel, place.shard_numel)
            self.shards = {
                id(parameter): self.own.narrow(0, info.position_in_shard, info.shard_numel)
                for parameter, info in zip(parameters, self.infos, strict=True)
            }
            for parameter, info in zip(parameters, self.infos, strict=True):
                if info.numel:
                    make(parameter)
                    whole = with_own_storage(flat.narrow(0, info.place.offset, info.numel), info)
                    parameter.data = whole.copy_(parameter.detach())
        self._addresses = [parameter.data_ptr() for parameter in parameters]
        return True

    def is_made_of(self, shards: Sequence[torch.Tensor]) -> bool:
        """Return whether these are this rank's ranges of all parameters, here, in order."""
        mine = [self.shards[id(reference())].data_ptr() for reference in self.parameters]
        return mine == [shard.data_ptr() for shard in shards]

    def leave(self, parameter: nn.Parameter) -> None:
        """Give a parameter that lives here memory of its own."""
        if parameter.data_ptr() in self._addresses:
            with ordinary_tensors():
                parameter.data = parameter.detach().clone(memory_format=torch.preserve_format)


def _is_shared(parameter: nn.Parameter) -> bool:
    """Return whether another tensor, or another process, has this parameter's memory too."""
    between_processes = parameter.device.type == "cpu" and parameter.is_shared()
    return between_processes or compat.tensors.is_memory_shared(parameter)
