"""The parameters that this rank has shards of, or keeps whole, between steps.

A parameter stays the very same Python object for its whole life.  At stage 3 its storage is
exchanged for an empty one and its values live in a flat shard; its class is plain while a
zero-compiled function runs, so that Dynamo always sees ordinary parameters, and guarded
(``guarded.py``) in between, so that every other reader gets an error that explains it.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import nn

from zerofx.deferred.ledger import LEDGER
from zerofx.deferred.tape import Source
from zerofx.ir.parameters import ParameterInfo, Place
from zerofx.runtime.memory.flat import make_equal, ordinary_tensors
from zerofx.runtime.memory.pages import prefer_huge_pages
from zerofx.runtime.parameters.barrier import Barrier
from zerofx.runtime.parameters.bucket_memory import BucketMemory
from zerofx.runtime.parameters.claims import Claims, check_same_options, check_same_place
from zerofx.runtime.parameters.first_values import Member, batches, have_values, make
from zerofx.runtime.parameters.gradients import GradientRegistry, allow_accumulation
from zerofx.runtime.parameters.guarded import Kept, check_guardable, guarded_class
from zerofx.runtime.parameters.parameter import ParameterState, State
from zerofx.runtime.storage.bucket import Location
from zerofx.runtime.storage.host import HostMemory
from zerofx.runtime.storage.tier import FileTiers


class Delayed(Protocol):
    """Updates that one function leaves to its next call, and whose values no shard holds yet."""

    def settle(
        self,
        bounds: Collection[ParameterState],
        optimizers: Collection[torch.optim.Optimizer] = (),
        taken_over: Collection[Any] = (),
    ) -> None: ...

    def drop_retired(self) -> None: ...


class ParameterRegistry:
    """Every parameter bound in this process, shared by all its zero-compiled functions.

    An entry goes when its parameter does.  ``delayed`` are all updates that are delayed to a
    later call, ``attached`` what each optimizer has been given to keep its states sharded.
    """

    def __init__(self, join_timeout_s: float = 30.0, load_timeout_s: float = 300.0) -> None:
        self.epoch = 0  # moves at every compiled call: values may have changed
        self.attached: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self.barrier = Barrier(join_timeout_s, load_timeout_s)
        self.host = HostMemory()
        self.files = FileTiers(self.host)
        self.delayed: set[Delayed] = set()
        self._bound: dict[int, ParameterState] = {}
        self._claims = Claims()
        self._guarded: list[tuple[Any, type, type]] | None = None
        self._depth = 0
        self._lock = threading.RLock()
        self.gradients = GradientRegistry(self._lock)

    def __len__(self) -> int:
        return len(self._bound)

    def __iter__(self) -> Iterator[ParameterState]:
        return iter(list(self._bound.values()))

    def lookup(self, parameter: Any) -> ParameterState | None:
        """The entry of ``parameter``, or None if no compiled function has seen it."""
        bound = self._bound.get(id(parameter))
        return bound if bound is not None and bound.reference() is parameter else None

    def keeper(self, tensor: torch.Tensor) -> ParameterState | None:
        """The entry behind a parameter or behind a gradient's stub."""
        return self.lookup(tensor) or self.gradients.lookup(tensor)

    def bind(
        self,
        parameters: Sequence[tuple[nn.Parameter, ParameterInfo]],
        buffers: Sequence[torch.Tensor],
        communicator: Any,
        stage: int,
        moves_whole: bool = False,
        on_host: Collection[int] = (),
        on_sharded: Callable[[list[ParameterState]], None] = lambda bounds: None,
        sources: Mapping[int, Source] = MappingProxyType({}),
    ) -> list[ParameterState]:
        """Take charge of a step's parameters: make them rank 0's, and shard them at stage 3.

        At stages 1 and 2, with ``moves_whole``, they move into their bucket's memory.  Shards of
        parameters with these indices ``on_host`` are made in host memory.  ``on_sharded`` is called
        with the parameters of a bucket when they have been sharded, before the next one's are.

        Parameters whose making was deferred are made here.  At stage 3 one is whole at a time, and
        small ones together; at the others what is made stays whole.  Of those with these
        ``sources``, by index, each rank reads its shard, as all ranks have agreed to do (stage 3).

        Only what has not been seen before is touched, so that a second compilation or another
        function of the same model changes nothing.  Collective for new ones.

        Raises: ValueError or TypeError, before anything has changed, for a parameter bound with
        another stage, other ranks or another layout, or one that cannot be sharded.
        """
        with self._lock, ordinary_tensors():
            new: dict[int, tuple[nn.Parameter, ParameterInfo]] = {}
            for parameter, info in parameters:
                bound = self.lookup(parameter)
                if bound is not None:
                    check_same_options(bound, communicator, stage)
                    check_same_place(bound, info)
                    if not bound.matches(info) and not bound.is_open:
                        self._follow(bound, parameter)
                elif id(parameter) not in new:
                    check_guardable(parameter, info.name)
                    self._claims.claim(parameter, info.name)
                    new[id(parameter)] = (parameter, info)
            new_buffers = self._claims.unseen(buffers)
            make_equal(new_buffers, communicator)
            members: dict[int, list[Member]] = {}
            for parameter, info in new.values():
                members.setdefault(info.place.bucket, []).append((parameter, info))
            if stage == 3:
                self._shard(members, communicator, on_host, on_sharded, sources)
            else:
                self._keep_whole(members, communicator, stage, moves_whole and stage > 0)
            return [self._bound[id(parameter)] for parameter, _ in parameters]

    def _shard(
        self,
        members: Mapping[int, list[Member]],
        communicator: Any,
        on_host: Collection[int],
        on_sharded: Callable[[list[ParameterState]], None],
        sources: Mapping[int, Source],
    ) -> None:
        """Cut new parameters, by bucket, to their shards: whole are those of a batch at a time."""
        buckets: dict[int, object] = {}
        memory: dict[int, torch.Tensor] = {}
        missing = {number: len(its) for number, its in members.items()}
        for batch in batches(itertools.chain.from_iterable(members.values())):
            bounds = [self._add(*member, communicator, stage=3) for member in batch]
            for bound in bounds:
                info, number = bound.info, bound.info.place.bucket
                location = Location.HOST if info.index in on_host else Location.DEVICE
                if info.shares_bucket:
                    bound.bucket = buckets.setdefault(number, object())
                if info.shares_bucket or location is Location.HOST:
                    if number not in memory:
                        memory[number] = self._empty_bucket(info, location)
                    bound.live_in(memory[number], location)
                bound.freed()  # now, while no parameter is whole
            have_values([one for one in batch if one[1].index not in sources], communicator)
            for bound in bounds:
                if bound.info.index in sources:
                    bound.read(sources[bound.info.index])
                else:
                    bound.free()
                self._guard_again(bound)
                number = bound.info.place.bucket
                missing[number] -= 1
                if not missing[number]:
                    memory.pop(number, None)
                    on_sharded([self._bound[id(parameter)] for parameter, _ in members[number]])

    def _keep_whole(
        self, members: Mapping[int, list[Member]], communicator: Any, stage: int, moves: bool
    ) -> None:
        """Take charge of new parameters that stay whole, by bucket; they may move to its memory."""
        for its in members.values():
            bounds = [self._add(*member, communicator, stage) for member in its]
            bucket: object = object() if its[0][1].shares_bucket else None
            home = BucketMemory(its, communicator.rank) if moves else None
            if home is not None:
                home.move_in(partial(make, communicator=communicator))
            for bound in bounds:
                bound.bucket = home or bucket
        for batch in batches(itertools.chain.from_iterable(members.values())):
            have_values(batch, communicator)

    def _empty_bucket(self, info: ParameterInfo, location: Location) -> torch.Tensor:
        if location is Location.HOST:
            pinned = info.device.type == "cuda"
            return self.host.empty(info.place.shard_numel, info.dtype, pinned).zero_()
        buffer = torch.zeros(info.place.shard_numel, dtype=info.dtype, device=info.device)
        prefer_huge_pages(buffer)
        return buffer

    def place(self, bounds: Iterable[ParameterState], location: Location) -> None:
        """Move shards to host memory, or back to their devices: those of a bucket side by side.

        For what functions with other options have bound, or used since.
        """
        with self._lock, ordinary_tensors():
            buckets: dict[tuple, list[ParameterState]] = {}
            for bound in dict.fromkeys(bounds):
                key = (bound.bucket or bound, bound.info.dtype, bound.info.device)
                buckets.setdefault(key, []).append(bound)
            for members in buckets.values():
                members.sort(key=lambda bound: (bound.info.place.offset, bound.info.numel))
                device = members[0].info.device
                shards = [bound.values() for bound in members if bound.shard is not None]
                if location is Location.HOST:
                    parts = self.host.take_in_shards(shards, pinned=device.type == "cuda")
                else:
                    lengths = [shard.numel() for shard in shards]
                    parts = list(torch.cat([s.to(device) for s in shards]).split(lengths))
                for bound, part in zip(members, parts, strict=True):
                    bound.move_to(part, location)

    def _add(
        self, parameter: nn.Parameter, info: ParameterInfo, communicator: Any, stage: int
    ) -> ParameterState:
        key = id(parameter)

        def forget(reference: Any) -> None:
            if key in self._bound and self._bound[key].reference is reference:
                self._drop(self._bound[key], key)

        own = type(parameter)
        guarded = guarded_class(own)  # type: ignore[arg-type]
        reference = weakref.ref(parameter, forget)
        bound = self._bound[key] = ParameterState(
            reference, info, stage, communicator, own, guarded, host=self.host
        )
        return bound

    def places(self, parameters: Sequence[nn.Parameter]) -> dict[int, Place | None]:
        """Return the places of those of ``parameters`` that are bound already, by position.

        None is a bucket of its own.  A bucket goes by the first of its parameters here.
        """
        found: dict[int, Place | None] = {}
        numbers: dict[tuple[int, torch.dtype], int] = {}
        for index, parameter in enumerate(parameters):
            bound = self.lookup(parameter)
            if bound is None:
                continue
            place = bound.info.assigned
            if place is not None:
                number = numbers.setdefault((id(bound.bucket), bound.info.dtype), index)
                place = replace(place, bucket=number)
            found[index] = place
        return found

    def _drop(self, bound: ParameterState, key: int) -> None:
        self._bound.pop(key, None)
        self.barrier.written.pop(bound, None)
        self.gradients.forget(bound)
        self._guarded = None
        bound.retire()
        for delayed in list(self.delayed):
            delayed.drop_retired()

    def while_idle(self, function: Callable[[], None]) -> None:
        """Call it if no compiled call is under way, and let none begin meanwhile."""
        with self._lock:
            if self._depth == 0:
                function()

    def enter_call(self) -> None:
        """Make parameters and gradients plain for the duration of a compiled call."""
        with self._lock:
            self._depth += 1
            if self._depth > 1:
                return
            self.epoch += 1
            LEDGER.make_plain()
            for reference, own, _ in self._swaps():
                parameter = reference()
                if parameter is not None:
                    parameter.__class__ = own
            self.gradients.make_plain()

    def exit_call(self) -> None:
        """Guard them again, and let go of the gradients that nothing refers to any more."""
        with self._lock:
            self._depth -= 1
            if self._depth > 0:
                return
            self.gradients.guard_again()
            LEDGER.guard_again()
            for reference, _, guarded in self._swaps():
                parameter = reference()
                if parameter is not None:
                    parameter.__class__ = guarded

    def _swaps(self) -> list[tuple[Any, type, type]]:
        if self._guarded is None:
            self._guarded = [
                (bound.reference, bound.own_class, bound.guarded_class)
                for bound in self
                if bound.state is State.SHARDED
            ]
        return self._guarded

    def _guard_again(self, bound: ParameterState) -> None:
        self._guarded = None
        if self._depth == 0:
            bound.parameter.__class__ = bound.guarded_class

    def open(self, bound: ParameterState) -> None:
        """Give a sharded parameter its whole value and its own class.  Collective; nests."""
        with self._lock:
            if bound.open_count == 0:
                self.settle([bound])
                whole, parameter = bound.gather(), bound.parameter
                parameter.__class__ = bound.own_class
                parameter.data = whole  # type: ignore[union-attr]
                self._guarded = None
                bound.state = State.OPEN
            bound.open_count += 1

    def close(self, bound: ParameterState) -> None:
        """Undo one ``open``: the last one keeps this rank's range of what was written."""
        with self._lock:
            bound.open_count -= 1
            parameter = bound.parameter
            if bound.open_count or bound.retired:
                return
            bound.state = State.SHARDED
            if parameter is None:
                return
            try:
                self._follow(bound, parameter)
            except ValueError:
                self.retire(bound)
                raise
            bound.free()
            self._guard_again(bound)

    def write(self, bound: ParameterState, whole: torch.Tensor) -> None:
        """Keep this rank's range of ``whole`` as the sharded parameter's value."""
        with self._lock:
            self.settle([bound])
            how = "load_state_dict() or copy_()"
            bound.write(whole)
            self.barrier.note_write(bound, how)

    def settle(
        self,
        bounds: Collection[ParameterState],
        optimizers: Collection[torch.optim.Optimizer] = (),
    ) -> None:
        """Wait for delayed updates of these and what they were left with, and store them.

        Raises: what an update has raised.
        """
        for delayed in list(self.delayed):
            delayed.settle(bounds, optimizers)

    def value_for_state_dict(self, bound: ParameterState, destination: Any) -> torch.Tensor:
        """Return the whole value on the CPU, for ``Module.state_dict`` to put in ``destination``.

        A parameter with two names is gathered once: as in plain torch, both entries share memory.
        Collective.
        """
        self.settle([bound])
        self.barrier.wait_once(destination, self.epoch, [bound], "state_dict()")
        value = bound.snapshot_in(destination, self.epoch)
        if value is None:
            value = bound.gather().cpu()
            bound.take_snapshot(value, self.epoch)
            return value
        return value.detach()

    def _follow(self, bound: ParameterState, parameter: nn.Parameter) -> None:
        was = bound.info
        bound.follow(parameter)
        if bound.info is not was:
            self.gradients.forget(bound)
            bound.stub = bound.gradient = None

    def retire(self, bound: ParameterState) -> None:
        """Forget a parameter, which must be whole by now, and leave it plain."""
        with self._lock:
            parameter = bound.parameter
            if parameter is not None:
                parameter.__class__ = bound.own_class
                allow_accumulation(bound, parameter)
            self._drop(bound, id(parameter))


REGISTRY = ParameterRegistry()
Kept._keepers = REGISTRY
