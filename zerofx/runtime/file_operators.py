"""A program's buckets in files, and the operators that read them and let go of them."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from zerofx.errors import FileTierError, StepError
from zerofx.ir import ops
from zerofx.ir.offload import changes_files, released_at, slot_of, uses_of_files
from zerofx.ir.parameters import ParameterTable
from zerofx.ir.rules import FILES
from zerofx.ir.sizes import hinted_bytes
from zerofx.runtime.optimizer.setup import Trained
from zerofx.runtime.optimizer.update import OptimizerRunner
from zerofx.runtime.parameters.parameter import ParameterState, ShardBucket
from zerofx.runtime.parameters.registry import REGISTRY
from zerofx.runtime.storage.bucket import Bucket, ValueBucket
from zerofx.runtime.storage.copies import Copies
from zerofx.runtime.storage.tier import FileTier


@dataclass(frozen=True)
class _Use:
    """One of ``uses_of_files``: of parameters' states in an optimizer, their shards, or a slot."""

    parameters: tuple[int, ...] = ()
    optimizer: int | None = None
    slot: int = -1


class ProgramFiles:
    """The buckets of a ``tier`` that a program uses, and those that are in memory in a call.

    A call is ``begin``, the program's operators, ``tier.finish`` or ``failed``, ``end_call``.
    Values of one ``copies``'s programs share their buckets, slot by slot.

    Raises: StepError or FileTierError if there is no room for what is new.
    """

    def __init__(
        self,
        tier: FileTier,
        graph: fx.Graph,
        trained: Trained,
        runners: Mapping[int, OptimizerRunner],
        copies: Copies,
    ) -> None:
        self.tier, self.table, self.copies = tier, trained.table, copies
        nodes = uses_of_files(graph)
        self._uses = list(map(_use_of, nodes))
        self._groups = _shard_groups(self._uses, self.table)
        self.parameters = frozenset(index for group in self._groups for index in group)
        """Those whose shards the program takes from files."""
        self._states = {
            use: runners[use.optimizer].states.bucket_in(tier, use.parameters)
            for use in dict.fromkeys(self._uses)
            if use.optimizer is not None
        }
        self._new_shards: dict[tuple[int, ...], ShardBucket] = {}  # by the parameters to adopt it
        self._in_shards = self._find_shards(list(map(REGISTRY.lookup, trained.tensors)))
        self._find_values(nodes)
        self._events = _events(graph, dict(zip(nodes, self._uses, strict=True)))
        self._reserve()
        # The bytes that a call reads, if nothing is in host memory before it is used; and writes.
        self.read_bytes = self.written_bytes = 0
        for node, use in zip(nodes, self._uses, strict=True):
            nbytes = sum(bucket.nbytes for bucket in self._buckets_of(use))
            if ops.is_wait(node):
                self.read_bytes += nbytes
            if changes_files(released_at(node)):
                self.written_bytes += nbytes
        self._reading: dict[int, tuple[Tensor, _Use]] = {}  # by what stands for it
        # By the identity of what stands for an activation: that, and the bucket that it is in.
        self._values: dict[int, tuple[Tensor, ValueBucket]] = {}
        self._changed: set[tuple[int, int]] = set()  # whose states are not as they were in files

    @property
    def buckets(self) -> list[Bucket]:
        """As the program uses them, each time it does."""
        return [bucket for use in self._uses for bucket in self._buckets_of(use)]

    def _find_shards(self, bounds: Sequence[ParameterState | None]) -> dict[int, ShardBucket]:
        """Return the bucket of each parameter's shard.

        Those of a group that have none are given one, which adopts them when a call begins.
        """
        found: dict[int, ShardBucket] = {}
        for group in self._groups:
            files = {index: self._file_of(bounds[index]) for index in group}
            lacking = tuple(index for index, file in files.items() if file is None)
            if lacking and lacking not in self._new_shards:
                self._new_shards[lacking] = self._shard_bucket(lacking)
            found |= {i: file or self._new_shards[lacking] for i, file in files.items()}
        return found

    def _file_of(self, bound: ParameterState | None) -> ShardBucket | None:
        """Return the bucket of a parameter's shard in this tier; None if it has none here."""
        file = bound.file if bound is not None else None
        return file if file is not None and file.place is self.tier else None

    def _shard_bucket(self, group: tuple[int, ...]) -> ShardBucket:
        names = [self.table[index].name for index in group]
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        name = self.tier.name(f"{names[0]}{more}")
        return ShardBucket(self.tier, name, [self.table[index] for index in group])

    def _find_values(self, nodes: Sequence[fx.Node]) -> None:
        sizes: dict[int, int] = {}
        for node in nodes:
            if not ops.is_wait(node):
                sizes[slot_of(node)] = max(sizes.get(slot_of(node), 0), hinted_bytes(node))
        for slot, nbytes in sizes.items():
            if (self.tier, slot) not in self.copies.slots:
                name = self.tier.name(f"activation {slot}")
                bucket = ValueBucket(self.tier, name, nbytes, self.table[0].device)
                self.copies.slots[self.tier, slot] = bucket

    def _buckets_of(self, use: _Use) -> list[Bucket]:
        if use.optimizer is not None:
            return [self._states[use]]
        if use.slot >= 0:
            return [self.copies.slots[self.tier, use.slot]]
        return list(dict.fromkeys(self._in_shards[index] for index in use.parameters))

    def _reserve(self) -> None:
        """Have room on disk and in host memory for all buckets.

        Raises: StepError or FileTierError if there is none.
        """
        self.tier.reserve(self.buckets, self._most_in_use({}))
        self._num_grown = self.tier.num_grown

    def _most_in_use(self, to_be: Mapping[Bucket, int]) -> int:
        """The most bytes that are in use at once in the program; of some buckets ``to_be``."""
        alive: Counter[Bucket] = Counter()
        now = most = 0
        for use, change in self._events:
            for bucket in self._buckets_of(use):
                was_there = alive[bucket] > 0
                alive[bucket] += change
                if was_there != (alive[bucket] > 0):
                    now += change * to_be.get(bucket, bucket.layout.nbytes)
            most = max(most, now)
        return most

    def take_in(self, bounds: Sequence[ParameterState]) -> None:
        """Let go of a bucket's shards, which have just been made, in favour of their files.

        Raises: FileTierError if a write fails.
        """
        by_index = {bound.info.index: bound for bound in bounds}
        group = next((one for one in self._groups if by_index.keys() >= set(one)), None)
        if group is None or group not in self._new_shards:
            return
        bucket = self._new_shards.pop(group)
        bucket.adopt([by_index[index] for index in group])
        try:
            self.tier.begin([bucket])
            bucket.acquire()
            bucket.release()
            self.tier.finish()
        except BaseException as error:
            self.tier.failed(error)
            raise

    # In a call

    def begin(self, bounds: Sequence[ParameterState]) -> None:
        """Start a call over these parameters, in the table's order.

        Raises: FileTierError if what files hold is lost, StepError if there is no room for what
        has been elsewhere since the last call, or has grown; nothing has changed then.
        """
        self._in_shards = self._find_shards(bounds)
        in_use = set(self._in_shards.values())
        self._new_shards = {of: new for of, new in self._new_shards.items() if new in in_use}
        if self._new_shards or self._num_grown != self.tier.num_grown:
            try:
                self._reserve()
            except FileTierError as error:
                if self.tier.lost is not None:
                    raise
                raise StepError(str(error)) from error  # after which nothing is lost
        for of, bucket in self._new_shards.items():
            bucket.adopt([bounds[index] for index in of])
        self._new_shards = {}
        self.tier.begin(self.buckets)

    def fetch_start(
        self,
        evicted: Tensor | None,
        what: str,
        parameters: Sequence[int] = (),
        optimizer: int | None = None,
        nbytes: int = 0,
    ) -> Tensor:
        """Ask for what files hold: the cache reads ahead by itself, in the order of the waits."""
        if evicted is not None:
            return evicted
        started = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._reading[id(started)] = started, _Use(tuple(parameters), optimizer)
        return started

    def wait(self, started: Tensor) -> Tensor:
        """Have what has been asked for in host memory.  Raises: FileTierError."""
        if id(started) in self._values:
            return self._value_there(*self._values.pop(id(started)))
        for bucket in self._buckets_of(self._reading[id(started)][1]):
            bucket.acquire()
        return started

    def note_changes(self, optimizer: int, parameters: Iterable[int]) -> None:
        """Have these states written when they are let go of."""
        self._changed.update((optimizer, parameter) for parameter in parameters)

    def evict(
        self,
        there: Tensor,
        what: str,
        parameters: Sequence[int] = (),
        optimizer: int | None = None,
        changed: bool = True,
    ) -> Tensor:
        """Let go of states, shards or a value, which are written to files if they have changed."""
        if what == "value":
            return self._evict_value(there, changed)
        _, use = self._reading.pop(id(there))
        if optimizer is not None:  # an update may have been skipped
            group = {(optimizer, parameter) for parameter in parameters}
            changed &= not group.isdisjoint(self._changed)
            self._changed -= group
        for bucket in self._buckets_of(use):
            bucket.release(dirty=changed)
        return there

    def offload_start(self, value: Tensor, slot: int) -> Tensor:
        """Start copying a value to its bucket's memory, with more room if it has grown."""
        bucket = self.copies.slots[self.tier, slot]
        nbytes = self.copies.span_bytes(value)
        if nbytes > bucket.num_bytes:
            padded = ValueBucket(self.tier, bucket.name, nbytes, bucket.device).layout.nbytes
            self.tier.grow(bucket, nbytes, self._most_in_use({bucket: padded}))
        host = self.copies.offload_start(value, slot, self.tier)
        self._values[id(host)] = host, bucket
        return host

    def _evict_value(self, value: Tensor, changed: bool) -> Tensor:
        _, bucket = self._values.pop(id(value))
        REGISTRY.host.settle(value)  # the device has waited for the copy, and the host has not
        if not changed:
            bucket.release(void=True)
            return value
        bucket.release()
        layout = value.shape, value.stride()
        filed = torch.empty_strided(*layout, dtype=value.dtype, device="meta")
        self._values[id(filed)] = filed, bucket
        return filed

    def _value_there(self, filed: Tensor, bucket: ValueBucket) -> Tensor:
        memory = bucket.acquired()
        length = memory.numel() // filed.itemsize * filed.itemsize
        there = memory[:length].view(filed.dtype).as_strided(filed.shape, filed.stride())
        self._values[id(there)] = there, bucket
        return there

    def failed(self, error: BaseException, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Leave a call that has failed, when no update writes to what is there any more.

        If shards are lost by it, so are their ``optimizers``' states, wherever these are.
        """
        self.tier.failed(error, optimizers if self.parameters else ())

    def end_call(self) -> None:
        """Forget the call, also after one that has failed."""
        self._reading.clear()
        self._values.clear()
        self._changed.clear()

    def kernels(self) -> dict[object, Any]:
        """The function that runs each operator that is about files."""
        return {
            ops.fetch_start: self.fetch_start,
            (ops.wait, FILES): self.wait,
            ops.evict: self.evict,
        }


def _events(graph: fx.Graph, uses: Mapping[fx.Node, _Use]) -> list[tuple[_Use, int]]:
    """Return the beginnings (1) and ends (-1) of uses, in program order."""
    ends = {released_at(node): use for node, use in uses.items()}
    found = []
    for node in graph.nodes:
        if node in uses:
            found.append((uses[node], 1))
        if node in ends:
            found.append((ends[node], -1))
    return found


def _use_of(node: fx.Node) -> _Use:
    if not ops.is_wait(node):
        return _Use(slot=slot_of(node))
    (start,) = node.args
    evicted = start.args[0]
    if evicted is not None:
        return _Use(slot=slot_of(evicted.args[0].args[0]))
    parameters = tuple(ops.argument(start, "parameters"))
    return _Use(parameters, ops.argument(start, "optimizer"))


def _shard_groups(uses: Iterable[_Use], table: ParameterTable) -> list[tuple[int, ...]]:
    """Parameters whose shards are in files together: those of a bucket, in its order."""
    of_shards = (use.parameters for use in uses if use.optimizer is None)
    indices = dict.fromkeys(itertools.chain.from_iterable(of_shards))
    groups: dict[tuple, list[int]] = {}
    for index in indices:
        info = table[index]
        where = ("bucket", info.place.bucket) if info.shares_bucket else ("alone", index)
        groups.setdefault((*where, info.dtype, info.device), []).append(index)
    return [
        tuple(sorted(group, key=lambda index: table[index].place.offset))
        for group in groups.values()
    ]
