"""A rank's part of a tensor, as torch.distributed.checkpoint takes it to be written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from zerofx import compat
from zerofx.checkpoint.boxes import Box, boxes_of
from zerofx.runtime.parameters.snapshots import Snapshot


@dataclass(frozen=True)
class Changes:
    """What a piece is read from: ``sources``, that only a compiled update of a parameter changes.

    ``read`` of the piece then gives what was there before, whenever it is called before that.
    """

    parameter: nn.Parameter
    sources: Sequence[torch.Tensor]
    name: str


class FlatPiece(torch.Tensor):
    """Elements ``start`` to ``stop`` of a tensor, flat with its dimensions in ``order``.

    It has the tensor's shape and dtype and no memory: ``read`` gives the elements when they are
    written, ``[stop - start]``, so that of what lies in files little is in memory at a time.  A
    tensor subclass, for torch.distributed.checkpoint asks nothing else for its parts
    (``__create_write_items__`` and so on are its protocol); nothing can be computed with it.
    """

    order: tuple[int, ...]
    read: Callable[[], torch.Tensor]
    boxes: list[Box]
    changes: Changes | None

    @staticmethod
    def __new__(
        cls,
        shape: Sequence[int],
        order: Sequence[int],
        bounds: tuple[int, int],
        dtype: torch.dtype,
        read: Callable[[], torch.Tensor],
        changes: Changes | None = None,
    ) -> FlatPiece:
        piece = compat.tensor_without_memory(cls, tuple(shape), dtype)
        piece.order, piece.read, piece.changes = tuple(order), read, changes
        piece.boxes = boxes_of(tuple(shape), order, *bounds)
        return piece

    def __init__(self, *_arguments: Any) -> None:
        """All is in ``__new__``: a tensor's takes no such arguments."""

    def __repr__(self) -> str:
        return f"FlatPiece(shape={tuple(self.shape)}, dtype={self.dtype}, {self.boxes})"

    def taken(self, snapshot: Snapshot) -> FlatPiece:
        """The same with its elements as they are now, in host memory of its own.

        They are copied by ``snapshot`` if only updates change them, else at once.
        """
        copy = compat.tensor_without_memory(FlatPiece, tuple(self.shape), self.dtype)
        copy.order, copy.boxes, copy.changes = self.order, self.boxes, None
        if self.changes is not None:
            copy.read = snapshot.add(
                self.changes.parameter, self.changes.sources, self.read, self.changes.name
            )
        else:
            values = self.read().detach().to("cpu", copy=True)
            copy.read = lambda: values
        return copy

    def __create_write_items__(self, fqn: str, _object: Any) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, box.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk_of(box), properties, self.size()),
            )
            for box in self.boxes
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [chunk_of(box) for box in self.boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        # By offset: the number in the index is that of the chunk among those of all ranks.
        (box,) = (box for box in self.boxes if torch.Size(box.offsets) == index.offset)
        return view_of(self.read(), box, self.order)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> torch.Tensor:
        raise NotImplementedError(f"{func} needs a tensor's values, and a FlatPiece is its name")


def chunk_of(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))


def view_of(values: torch.Tensor, box: Box, order: Sequence[int]) -> torch.Tensor:
    """View a box's part of a flat range in the box's shape.

    Shapes: ``[stop - start]`` -> ``box.sizes``; its dimensions lie in ``order`` in memory.
    """
    flat = values[box.start : box.start + box.numel].view([box.sizes[dim] for dim in order])
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return flat.permute(inverse)
