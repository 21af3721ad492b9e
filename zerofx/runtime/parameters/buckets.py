"""The operators on parts of a program's buckets: copied, or taken where they lie."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch
import torch.nn.functional as F

from zerofx.ir.mesh import DATA
from zerofx.ir.parameters import ParameterInfo, ParameterTable
from zerofx.runtime.comm.communication import Communicator
from zerofx.runtime.memory.flat import (
    Seen,
    copy_range,
    flat_pieces,
    flatten_bucket,
    ordinary_tensors,
    pack,
    start_in_storage,
    take_shard,
    view_of_pack,
    whole_from_flat,
)
from zerofx.runtime.parameters.bucket_memory import BucketMemory
from zerofx.runtime.parameters.parameter import ParameterState, SecondShard


class Buckets:
    """Cuts, packs and reduces the parts of buckets, with the memory that they live in.

    ``in_place`` are the buckets, as their parameters' indices, that the program may write to
    before its last copies do; ``moved_out`` the parameters of which it only moves a shard to the
    host.  A call is ``begin_call``, the program's operators, ``end_call``.
    """

    def __init__(
        self,
        communicator: Communicator,
        table: ParameterTable,
        in_place: Iterable[Sequence[int]],
        moved_out: Collection[int],
    ) -> None:
        self.communicator = communicator
        self.table = table
        self.in_place, self.moved_out = list(in_place), moved_out
        self._bounds: Sequence[ParameterState] = ()
        self._with_memory: list[Sequence[int]] = []  # of ``in_place``, those that live in one
        self._lent: dict[int, BucketMemory] = {}  # of those that are only moved out from there
        self._homes: dict[int, BucketMemory] = {}  # of this call's parameters that have moved in
        # By where their own parts are, and the number of their elements.
        self._gathered_into: dict[tuple[int, int], torch.Tensor] = {}
        self._cuts: dict[
            object, tuple[torch.Tensor, set[int]]
        ] = {}  # buffers, and the parameters in them
        self._parameter_storages: set[int] = set()
        # Where in their storage the shards of a bucket began that were packed last.
        self._starts: dict[tuple, tuple[Seen, int | None]] = {}

    def bind(self, bounds: Sequence[ParameterState]) -> None:
        """Know the program's parameters, and so the memory of its buckets."""
        self._bounds, self._with_memory = bounds, []
        for parameters in self.in_place:
            memory = bounds[parameters[0]].memory
            if memory is not None and len(memory.infos) == len(parameters):
                if all(bounds[index].memory is memory for index in parameters):
                    self._with_memory.append(parameters)

    def begin_call(self, wholes: Iterable[torch.Tensor]) -> None:
        """Move parameters into their buckets' memory that have left it.

        What is sent from the memory of these, which the call has whole, is copied first.
        """
        for parameters in self._with_memory:
            memory = self._bounds[parameters[0]].memory
            assert memory is not None, "the caller holds its parameters"
            if memory.move_in() and memory.flat.numel():  # what is empty lies nowhere
                self._homes.update(dict.fromkeys(parameters, memory))
                self._note_gathers(memory.own, memory.flat)
        moved_in: set[BucketMemory] = set()
        for index in self.moved_out:
            home = self._bounds[index].memory
            if home is not None and (home in moved_in or home.move_in()):
                self._lent[index] = home
                moved_in.add(home)
        self._parameter_storages = {whole.untyped_storage().data_ptr() for whole in wholes}

    def _note_gathers(self, own: torch.Tensor, flat: torch.Tensor) -> None:
        """Have this rank's part of a buffer gathered to where it lies in it, hop by hop."""
        mesh, part, numel = self.communicator.mesh, own, own.numel()
        for axis in reversed(mesh.hops):
            numel *= mesh.size(axis)
            begin = own.storage_offset() - flat.storage_offset()
            into = flat.narrow(0, begin - begin % numel, numel)
            self._gathered_into[part.data_ptr(), part.numel()] = into
            part = into

    def end_call(self) -> None:
        """Forget the call, also after one that has failed."""
        self._cuts.clear()
        self._homes.clear()
        self._lent.clear()
        self._gathered_into.clear()

    def all_gather_start(
        self, shard: torch.Tensor, world_size: int, axis: str = DATA
    ) -> torch.Tensor:
        into = self._gathered_into.get((shard.data_ptr(), shard.numel()))
        return self.communicator.along(axis).all_gather_start(shard, world_size, into)

    def refill_start(
        self,
        shard: torch.Tensor,
        parameters: list[int],
        world_size: int,
        is_new: bool = False,
        axis: str = DATA,
    ) -> torch.Tensor:
        """Gather a second shard to where it is kept, unless what is there is of these values."""
        bounds, along = [self._bounds[index] for index in parameters], self.communicator.along(axis)
        versions, known = [bound.version for bound in bounds], bounds[0].second_shards
        same = (one for one in known if one.bounds == bounds and one.flat.dtype == shard.dtype)
        second = next(same, None)
        if second is None:
            with ordinary_tensors():
                second = SecondShard(bounds, shard.new_empty(shard.numel() * world_size))
            known.append(second)
        if second.versions == versions and not is_new:
            return along.there(second.flat)
        second.versions = [] if is_new else versions
        own = second.flat.narrow(0, along.rank * shard.numel(), shard.numel())
        own.copy_(shard)
        return along.all_gather_start(own, world_size, second.flat)

    def reduce_scatter_start(
        self, flat: torch.Tensor, reduction: str, world_size: int, axis: str = DATA
    ) -> torch.Tensor:
        return self.communicator.along(axis).reduce_scatter_start(flat, reduction, world_size)

    def all_to_all_start(
        self, parts: torch.Tensor, world_size: int, axis: str = DATA
    ) -> torch.Tensor:
        return self.communicator.along(axis).all_to_all_start(parts)

    def write_back(
        self, gathered: torch.Tensor, wholes: list[torch.Tensor], parameters: list[int]
    ) -> None:
        """Copy a bucket's new values to its parameters, if they do not live there already."""
        if self._homes.get(parameters[0]) is None:
            for whole, index in zip(wholes, parameters, strict=True):
                info = self.table[index]
                whole.copy_(whole_from_flat(gathered[info.place.offset :], info))
            return
        for whole in wholes:  # as a copy would: a graph built on the old values is stale
            torch.autograd.graph.increment_version(whole)

    def take_shard(
        self, whole: torch.Tensor, parameter: int, shard_numel: int, axis: str = ""
    ) -> torch.Tensor:
        """Copy this rank's range, next to those of its bucket's other parameters.

        Of a parameter that lives in its bucket's memory, it is the range itself.
        """
        info = self.table.cut(parameter, axis)
        memory = self._homes.get(parameter)
        if memory is None:
            memory = self._lent.get(parameter)
        if memory is not None and id(whole) in memory.shards:
            return memory.shards[id(whole)]
        if not info.shares_bucket:
            return take_shard(whole, info, info.rank)
        key = (info.place.bucket, whole.dtype, axis)
        buffer, taken = self._cuts.get(key, (None, {parameter}))
        if parameter in taken:  # once more, maybe of another value: into memory of its own
            buffer = self.communicator.buffers.empty(info.place.shard_numel, whole).zero_()
            taken = set()
            self._cuts[key] = buffer, taken
        taken.add(parameter)
        shard = buffer.narrow(0, info.position_in_shard, info.shard_numel)
        copy_range(shard, whole, info, info.rank)
        return shard

    def pack(
        self, shards: list[torch.Tensor], parameters: list[int], numel: int, axis: str = ""
    ) -> torch.Tensor:
        memory = self._homes.get(parameters[0])
        if memory is not None and memory.is_made_of(shards):
            return memory.own
        # What is packed may travel from where it is: later shards do not come next to it.
        self._cuts.pop((self.table[parameters[0]].place.bucket, shards[0].dtype, axis), None)
        infos = [self.table.cut(index, axis) for index in parameters]
        key = (axis, *parameters)
        seen, start = self._starts.get(key, (None, None))
        if seen is None or not seen.again(shards):
            start = start_in_storage(shards, infos)
            self._starts[key] = Seen(shards), start
        return pack(shards, infos) if start is None else view_of_pack(shards, infos, start)

    def flatten_bucket(
        self, wholes: list[torch.Tensor], parameters: list[int], numel: int
    ) -> torch.Tensor:
        infos = [self.table[index] for index in parameters]
        return flatten_bucket(wholes, infos, self.communicator.buffers)

    def reduce_bucket_start(
        self,
        wholes: list[torch.Tensor],
        parameters: list[int],
        numel: int,
        reduction: str,
        world_size: int,
        axis: str = DATA,
    ) -> torch.Tensor:
        """Start reducing a bucket, from where its gradients are if the transport can."""
        infos = [self.table[index] for index in parameters]
        started = self._reduce_pieces("reduce_scatter", wholes, infos, reduction, axis)
        if started is not None:
            return started
        flat = flatten_bucket(wholes, infos, self.communicator.buffers)
        return self.reduce_scatter_start(flat, reduction, world_size, axis)

    def all_reduce_bucket_start(
        self,
        wholes: list[torch.Tensor],
        parameters: list[int],
        numel: int,
        reduction: str,
        axis: str = DATA,
    ) -> torch.Tensor:
        """Start all-reducing a bucket, from where its gradients are if the transport can."""
        infos = [self.table[index].contiguous for index in parameters]
        started = self._reduce_pieces("all_reduce", wholes, infos, reduction, axis)
        if started is not None:
            return started
        flat = flatten_bucket(wholes, infos, self.communicator.buffers)
        return self.communicator.along(axis).all_reduce_start(flat, reduction, in_place=True)

    def _reduce_pieces(
        self,
        kind: str,
        wholes: list[torch.Tensor],
        infos: list[ParameterInfo],
        reduction: str,
        axis: str,
    ) -> torch.Tensor | None:
        """Start reducing a bucket from where its gradients are; None if that cannot be."""
        communicator = self.communicator.along(axis)
        if not communicator.takes_pieces(wholes[0]):
            return None
        pieces, offsets = flat_pieces(list(map(self._own_memory, wholes)), infos)
        numel = infos[0].place.shard_numel * infos[0].world_size
        if not pieces:
            return None
        return communicator.pieces_start(kind, pieces, offsets, numel, reduction)

    def all_reduce_start(
        self, input: torch.Tensor, reduction: str, axis: str = DATA
    ) -> torch.Tensor:
        communicator = self.communicator.along(axis)
        return communicator.all_reduce_start(self._own_memory(input), reduction)

    def _own_memory(self, value: torch.Tensor) -> torch.Tensor:
        """A copy of what is a parameter's memory, which an update may write before others read.

        The gradient of ``a`` in ``(a * b).sum()`` is ``b``, and a compiler may say just that.
        """
        storage = value.untyped_storage().data_ptr()
        return value.clone() if storage in self._parameter_storages else value

    def mask_padding(
        self, shard: torch.Tensor, parameter: int, identity: float, axis: str = ""
    ) -> torch.Tensor:
        info = self.table.cut(parameter, axis)
        start, stop = info.owned_by(info.rank)
        valid = stop - start
        length = max(shard.numel(), 1)
        if valid == length:
            return shard
        return F.pad(shard[:valid], (0, length - valid), value=identity)
