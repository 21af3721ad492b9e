"""The parameters that this rank has shards of, or keeps whole, between steps.

A parameter stays the very same Python object for its whole life.  At stage 3 its storage is
exchanged for an empty one and its values live in a flat shard; its class is plain while a
zero-compiled function runs, so that Dynamo always sees ordinary parameters, and guarded
(``guarded.py``) in between, so that every other reader gets an error that explains it.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from zerofx import compat
from zerofx.accelerator import is_accelerator
from zerofx.deferred.ledger import LEDGER
from zerofx.deferred.tape import Source
from zerofx.ir.parameters import ParameterInfo, Place
from zerofx.runtime.comm.agreement import Agreement
from zerofx.runtime.memory.copies import GIVEN_COPIES
from zerofx.runtime.memory.flat import make_equal, ordinary_tensors
from zerofx.runtime.parameters.barrier import Barrier
from zerofx.runtime.parameters.bucket_memory import BucketMemory
from zerofx.runtime.parameters.claims import Claims, check_same_options, check_same_place
from zerofx.runtime.parameters.first_values import Member, batches, have_values, make
from zerofx.runtime.parameters.gradients import GradientRegistry, allow_accumulation
from zerofx.runtime.parameters.guarded import Kept, check_guardable, guarded_class
from zerofx.runtime.parameters.parameter import ParameterState, ShardBucket, State
from zerofx.runtime.storage.bucket import Location, Reader
from zerofx.runtime.storage.memory import DeviceMemory, HostMemory, Memory
from zerofx.runtime.storage.tier import FileTiers


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
        self.delayed: set[Any] = set()  # of ``DelayedUpdates``
        self._bound: dict[int, ParameterState] = {}
        self._claims = Claims()
        self._guarded: list[tuple[Any, type, type]] | None = None
        self._depth = 0
        self._calling: Counter[int] = Counter()  # threads in a compiled call
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
        function of the same model changes nothing.  Collective if there are new parameters; without
        them a rank may have compiled alone, and buffers that it has not seen stay its own.

        Raises: ValueError or TypeError, before anything has changed, for a parameter bound with
        another stage, other ranks or another layout, one that cannot be sharded, or buffers that
        lie otherwise on other ranks; RuntimeError if there are new ones and not all ranks have
        come.
        """
        with self._lock, ordinary_tensors():
            new: dict[int, tuple[nn.Parameter, ParameterInfo]] = {}
            for parameter, info in parameters:
                bound = self.lookup(parameter)
                if bound is not None:
                    check_same_options(bound, communicator, stage)
                    check_same_place(bound, info)
                    if not bound.matches(info) and bound.state is not State.OPEN:
                        self._follow(bound, parameter)
                elif id(parameter) not in new:
                    check_guardable(parameter, info.name)
                    self._claims.claim(parameter, info.name)
                    new[id(parameter)] = (parameter, info)
            if new:
                (_, first), *others = new.values()
                name = f"the first call with parameter {first.name!r} and {len(others)} others"
                self.barrier.wait_to_bind(communicator, name)
                _check_same_buffers(buffers, communicator, self.barrier.load_timeout_s)
            new_buffers = self._claims.unseen(buffers)
            if new:
                make_equal(new_buffers, communicator)
            members: dict[int, list[Member]] = {}
            for parameter, info in new.values():
                members.setdefault(info.place.bucket, []).append((parameter, info))
            if stage == 3:
                self._shard(members, communicator, on_host, on_sharded, sources)
            else:
                self._keep_whole(members, communicator, stage, moves_whole and stage > 0)
            for its in members.values():
                errors: dict[str, torch.Tensor] = {}
                for parameter, _ in its:
                    self._bound[id(parameter)].errors = errors
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
        buckets: dict[int, tuple[object, torch.Tensor]] = {}
        missing = {number: len(its) for number, its in members.items()}
        for batch in batches(itertools.chain.from_iterable(members.values())):
            waiting = [self._add(*member, communicator, stage=3) for member in batch]
            with self._undone_for(waiting):
                for bound in waiting:
                    info, number = bound.info, bound.info.place.bucket
                    location = Location.HOST if info.index in on_host else Location.DEVICE
                    if number not in buckets:
                        buckets[number] = object(), self._zeros(info, location)
                    bound.bucket, flat = buckets[number]
                    bound.live_in(flat, location)
                    bound.freed()  # now, while no parameter is whole
                have_values([one for one in batch if one[1].index not in sources], communicator)
                while waiting:
                    bound = waiting[0]
                    if bound.info.index in sources:
                        bound.read(sources[bound.info.index])
                    else:
                        bound.free()
                    waiting.pop(0)
                    self._guard_again(bound)
                    number = bound.info.place.bucket
                    missing[number] -= 1
                    if not missing[number]:
                        del buckets[number]
                        on_sharded([self._bound[id(one)] for one, _ in members[number]])

    @contextlib.contextmanager
    def _undone_for(self, waiting: list[ParameterState]) -> Iterator[None]:
        """If this fails, forget those that are waiting by then: they are as they were."""
        try:
            yield
        except BaseException:
            for bound in waiting:
                self._drop(bound, id(bound.parameter))
            raise

    def _zeros(self, info: ParameterInfo, location: Location) -> torch.Tensor:
        """Memory for this rank's shard of a parameter's bucket."""
        memory, is_pinned = self.memory(location, info.device), is_accelerator(info.device)
        return memory.empty(info.kept.place.shard_numel, info.dtype, is_pinned).zero_()

    def _keep_whole(
        self, members: Mapping[int, list[Member]], communicator: Any, stage: int, moves: bool
    ) -> None:
        """Take charge of new parameters that stay whole, by bucket; they may move to its memory."""
        added: list[ParameterState] = []
        with self._undone_for(added):
            for its in members.values():
                home = BucketMemory(its, its[0][1].rank) if moves else None
                if home is not None:
                    home.move_in(partial(make, communicator=communicator))
                bucket = home or object()
                for member in its:
                    added.append(self._add(*member, communicator, stage))
                    added[-1].bucket = bucket
            for batch in batches(itertools.chain.from_iterable(members.values())):
                have_values(batch, communicator)

    def memory(self, location: Location, device: torch.device) -> Memory:
        """The host's memory, or that of a device."""
        return self.host if location is Location.HOST else DeviceMemory(device, self.host)

    def place(self, bounds: Iterable[ParameterState], location: Location) -> None:
        """Move shards to host memory, or back to their devices: those of a bucket side by side.

        For what functions with other options have bound, or used since.
        """
        with self._lock:
            buckets: dict[tuple, list[ParameterState]] = {}
            for bound in dict.fromkeys(bounds):
                key = (bound.bucket, bound.info.dtype, bound.info.device)
                buckets.setdefault(key, []).append(bound)
            for (*_, device), members in buckets.items():
                members.sort(key=lambda bound: (bound.info.place.offset, bound.info.numel))
                infos = [bound.info for bound in members]
                bucket = ShardBucket(self.memory(location, device), "", infos)
                bucket.adopt(members)
                bucket.acquire()

    def _add(
        self, parameter: nn.Parameter, info: ParameterInfo, communicator: Any, stage: int
    ) -> ParameterState:
        key = id(parameter)

        def forget(reference: Any) -> None:
            if key in self._bound and self._bound[key].reference is reference:
                self._drop(self._bound[key], key)

        reference = weakref.ref(parameter, forget)
        bound = self._bound[key] = ParameterState(
            reference, info, stage, communicator, type(parameter), self.host
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
        bound.retire()
        self._guarded = None
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
            if self._depth == 0:
                GIVEN_COPIES.check()  # first: somebody may have made its warning an error
            self._depth += 1
            self._calling[threading.get_ident()] += 1
            if self._depth > 1:
                return
            self.epoch += 1
            LEDGER.make_plain()
            for reference, own, _ in self._swaps():
                parameter = reference()
                if parameter is not None:
                    parameter.__class__ = own
            self.gradients.make_plain()

    def refuse_in_call(self, what: str) -> None:
        """Refuse to look at models in a compiled call, as a signal's handler may try.

        Raises: RuntimeError.
        """
        if self._calling[threading.get_ident()]:
            raise RuntimeError(
                f"{what} was called while a compiled step runs, when parameters are between two "
                "values, and sharded ones have no memory. In a signal's handler set a flag, and do "
                "it after the call."
            )

    def exit_call(self) -> None:
        """Guard them again, and let go of the gradients that nothing refers to any more."""
        with self._lock:
            self._depth -= 1
            self._calling[threading.get_ident()] -= 1
            if self._depth > 0:
                return
            self.gradients.guard_again()
            LEDGER.guard_again()
            for reference, _, guarded in self._swaps():
                parameter = reference()
                if parameter is not None:
                    parameter.__class__ = guarded

    def _swaps(self) -> list[tuple[Any, type, type]]:
        """The classes of what is guarded between calls: kept, for every call goes through them."""
        if self._guarded is None:
            self._guarded = [
                (bound.reference, bound.own_class, guarded_class(bound.own_class))
                for bound in self
                if bound.state is State.SHARDED
            ]
        return self._guarded

    def _guard_again(self, bound: ParameterState) -> None:
        self._guarded = None
        if self._depth == 0:
            bound.parameter.__class__ = guarded_class(bound.own_class)

    def open(self, bounds: Sequence[ParameterState], opened: contextlib.ExitStack) -> None:
        """Give sharded parameters their whole values and own classes.  Collective.

        ``opened`` is to ``close`` each.
        """
        self.settle(bounds)  # all, before the reader keeps what one of their buckets holds
        reader = Reader()
        for bound in bounds:
            with self._lock:
                whole, parameter = bound.gather(reader), bound.parameter
                parameter.__class__ = bound.own_class
                parameter.data = whole  # type: ignore[union-attr]
                bound.state, self._guarded = State.OPEN, None
                opened.callback(self.close, bound)

    def close(self, bound: ParameterState) -> None:
        """Undo ``open``, if it has not been given back: keep this rank's range of its values."""
        with self._lock:
            parameter = bound.parameter
            if bound.state is State.RETIRED or parameter is None:
                return
            bound.state = State.SHARDED
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
            GIVEN_COPIES.forget()
            bound.write(whole)
            self.barrier.note_write(bound, how)

    def settle(
        self, bounds: Collection[ParameterState], optimizers: Collection[torch.optim.Optimizer] = ()
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
            value = GIVEN_COPIES.give(bound.name, bound.gather().cpu())
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
                allow_accumulation(bound)
            self._drop(bound, id(parameter))


def _check_same_buffers(
    buffers: Sequence[torch.Tensor], communicator: Any, timeout_s: float
) -> None:
    """Refuse buffers that are not laid out as on other ranks, which get rank 0's bytes.

    Raises: ValueError on all ranks, with the first that differs.
    """
    if communicator.world_size == 1:
        return
    store = compat.tensors.agreement_store(communicator.group)
    agreement = Agreement(store, communicator.rank, communicator.world_size, "buffers")
    mine = "\n".join(map(_layout_in_words, buffers)).encode()
    first, *others = (
        value.decode().split("\n") for value in agreement.exchange((), mine, timeout_s)
    )
    for rank, its in enumerate(others, 1):
        pairs = itertools.zip_longest(first, its, fillvalue="absent")
        for number, (here, there) in enumerate(pairs):
            if here != there:
                name = _name_of(buffers[number]) if number < len(buffers) else "a buffer"
                raise ValueError(
                    f"{name} is {here or 'absent'} on rank 0 and {there or 'absent'} on rank "
                    f"{rank}, and before the first call every rank gets rank 0's buffers. Make it "
                    "the same on all ranks, or give it to the step as an argument."
                )


def _layout_in_words(buffer: torch.Tensor) -> str:
    strides = "" if buffer.is_contiguous() else f" of strides {tuple(buffer.stride())}"
    return f"{buffer.dtype} {tuple(buffer.shape)}{strides} ({buffer.device.type})"


def _name_of(buffer: torch.Tensor) -> str:
    """Name a buffer for an error.  Looks through all that Python holds."""
    for module in gc.get_objects():
        if issubclass(type(module), nn.Module):  # isinstance would ask lazily loaded ones
            for name, value in module.__dict__.get("_buffers", {}).items():
                if value is buffer:
                    return f"buffer {name!r} of a {type(module).__name__}"
    return "a buffer"


REGISTRY = ParameterRegistry()
Kept._keepers = REGISTRY
