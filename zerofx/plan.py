"""What is sharded and how: plain data about parameters, no tensors, no process group."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch


def shard_numel(numel: int, world_size: int) -> int:
    """Return the elements that every rank owns of a flat buffer, padding included.

    Units: elements.  Source: ZeRO, Rajbhandari et al. 2020, section 5.
    """
    return -(-numel // world_size)


def shard_bounds(numel: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return the half-open element range of the unpadded buffer that ``rank`` owns.

    The buffer is padded to ``world_size`` equal shards; the last ranks may own only
    padding, so ``start == stop`` is possible.

    Shapes: f32[16, 8] on 4 ranks gives 32 elements each.  Units: elements.
    Raises: ValueError if ``rank`` is outside ``[0, world_size)``.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is outside [0, {world_size})")
    per_rank = shard_numel(numel, world_size)
    return min(rank * per_rank, numel), min((rank + 1) * per_rank, numel)


@dataclass(frozen=True)
class ParameterInfo:
    """One parameter of the step.

    ``index`` is its position in the table and the ``parameter`` argument of every
    ``zerofx::`` operator.  A parameter is flattened in *storage order*: its dimensions
    are permuted so that the last varies fastest in memory, which makes the flat buffer of
    a channels-last weight a view of it, like that of a contiguous one.
    """

    index: int
    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    world_size: int

    @cached_property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @cached_property
    def shard_numel(self) -> int:
        return shard_numel(self.numel, self.world_size)

    @property
    def padded_numel(self) -> int:
        return self.shard_numel * self.world_size

    @cached_property
    def storage_order(self) -> tuple[int, ...]:
        """The dimensions from slowest to fastest in memory; ``(0, 1, ...)`` if contiguous."""
        return storage_order(self.shape, self.stride)

    @property
    def is_contiguous(self) -> bool:
        return self.storage_order == tuple(range(len(self.shape)))


def storage_order(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...]:
    """Return the dimensions of a dense tensor from slowest to fastest in memory.

    Raises: ValueError if the tensor has holes or overlaps (an expanded or strided view).
    """
    order = tuple(sorted(range(len(shape)), key=lambda dim: (-stride[dim], dim)))
    # Dimensions of size 1 may carry any stride: place them where they already stand.
    contiguous, expected = list(order), 1
    for dim in reversed(order):
        if shape[dim] == 1:
            continue
        if stride[dim] != expected and math.prod(shape) > 0:
            raise ValueError(f"a tensor of shape {shape} and strides {stride} is not dense")
        expected *= shape[dim]
    sized = [dim for dim in contiguous if shape[dim] != 1]
    if sized == sorted(sized):
        return tuple(range(len(shape)))
    return order


@dataclass(frozen=True)
class ParameterTable:
    """Every parameter of one step, in order of first appearance among its inputs."""

    parameters: tuple[ParameterInfo, ...]

    def __iter__(self):
        return iter(self.parameters)

    def __len__(self) -> int:
        return len(self.parameters)

    def __getitem__(self, index: int) -> ParameterInfo:
        return self.parameters[index]
