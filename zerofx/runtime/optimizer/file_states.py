"""Optimizer states that are in files between steps, and what stands for them meanwhile.

A bucket's states are one layout: all of the first state's shards, one behind the other, then all
of the next one's, so that one kernel takes them as they lie in memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zerofx.errors import FileTierError
from zerofx.runtime.memory.flat import ordinary_tensors, without_base
from zerofx.runtime.optimizer.lazy_states import LateState
from zerofx.runtime.parameters.guarded import GuardedState
from zerofx.runtime.storage.disk import BucketLayout, Field
from zerofx.runtime.storage.file_bucket import FiledBucket, Left
from zerofx.runtime.storage.tier import FileTier

States = Sequence[dict[str, Any]]
"""What ``optimizer.state`` holds of a bucket's parameters, in the bucket's order."""


@dataclass(frozen=True)
class Part:
    """One state of some parameters of a bucket: ``numels`` are (place in it, elements)."""

    name: str
    dtype: torch.dtype
    numels: tuple[tuple[int, int], ...]

    @property
    def field(self) -> Field:
        kind = str(self.dtype).removeprefix("torch.")
        return Field(f"{self.name} ({kind})", self.dtype, sum(numel for _, numel in self.numels))


Parts = tuple[Part, ...]


def parts_of(kept: Sequence[Mapping[str, tuple[torch.dtype, int]]]) -> Parts:
    """Lay out what is kept per element, by each parameter's states' names: dtype and length."""
    found: dict[tuple[str, torch.dtype], list[tuple[int, int]]] = {}
    for place, states in enumerate(kept):
        for name, (dtype, numel) in states.items():
            found.setdefault((name, dtype), []).append((place, numel))
    return tuple(
        Part(name, dtype, tuple(numels))
        for (name, dtype), numels in sorted(found.items(), key=lambda item: str(item[0]))
    )


def parts_there(states: States) -> Parts:
    """The layout of the states that there are, wherever they lie."""
    return parts_of(
        [
            {name: (value.dtype, value.numel()) for name, value in per_element(state)}
            for state in states
        ]
    )


def per_element(state: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """The states that are there per element: not the count of steps."""
    for name, value in list(state.items()):
        if isinstance(value, Tensor) and value.dim():
            yield name, value


class StateBucket(FiledBucket):
    """The states of one group of updates.

    ``stubs`` stand for its values in ``optimizer.state`` while nobody updates them, by place and
    name; none while it holds nothing.
    """

    what = "optimizer states"
    is_copied_by_gpu = False

    def __init__(
        self,
        tier: FileTier,
        name: str,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[nn.Parameter],
        parts: Parts,
    ) -> None:
        super().__init__(tier, name)
        self.optimizer = weakref.ref(optimizer)
        self.parameters = [weakref.ref(parameter) for parameter in parameters]
        self.parts = parts
        self.stubs: dict[tuple[int, str], GuardedState] = {}

    @property
    def layout(self) -> BucketLayout:
        return BucketLayout(self.name, tuple(part.field for part in self.parts))

    @property
    def key(self) -> Hashable:
        return _key(self.optimizer(), [reference() for reference in self.parameters])

    def is_of(self, optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> bool:
        """Return whether it is for these very objects."""
        mine = [reference() for reference in self.parameters]
        return self.optimizer() is optimizer and all(
            one is other for one, other in zip(mine, parameters, strict=True)
        )

    def states(self) -> States:
        """What the optimizer holds of its parameters now."""
        optimizer = self.optimizer()
        if optimizer is None:
            return [{} for _ in self.parameters]
        return [optimizer.state.get(reference(), {}) for reference in self.parameters]

    def is_whole_of(self, states: States) -> bool:
        """Whether these are all its own, and all that it holds."""
        there = {
            (place, name): value
            for place, state in enumerate(states)
            for name, value in per_element(state)
        }
        return (
            bool(self.stubs)
            and there.keys() == self.stubs.keys()
            and all(there[key] is stub for key, stub in self.stubs.items())
        )

    @property
    def is_gone(self) -> bool:
        return self.optimizer() is None

    def has_any(self) -> bool:
        return any(
            getattr(value, "bucket", None) is self
            for state in self.states()
            for _, value in per_element(state)
        )

    def make_whole(self) -> None:
        """Have all states at hand that come from elsewhere: a state dict, or other buckets."""
        states = self.states()
        if not self.is_whole_of(states):
            bring_back(states)
            self.forget()

    def arrive(self, views: Mapping[str, Tensor]) -> None:
        """Have the optimizer hold what is in memory, with what comes from elsewhere copied there.

        States of another kind than were expected stay where they are.
        """
        states = self.states()
        if not self.stubs:
            for state in states:
                state.update(
                    (name, value.cpu()) for name, value in state.items() if _is_elsewhere(value)
                )
            if parts_there(states) != self.parts:
                return
            self.take(states, views)
        self.give(states, views)

    def leave(self, views: Mapping[str, Tensor]) -> Left:
        """Take the states back from the optimizer, with those that its update has made."""
        states = self.states()
        parts = parts_there(states)
        if not parts:
            return Left.NOTHING
        if parts != self.parts:
            return Left.RELAYOUT
        is_new = not self.stubs
        self.take(states, views)
        return Left.NEW if is_new else Left.KNOWN

    def give(self, states: States, views: Mapping[str, Tensor]) -> None:
        """Have the optimizer hold what is in memory, each parameter its part of it."""
        for place, name, value in self._cut(views):
            states[place][name] = value

    def take(self, states: States, views: Mapping[str, Tensor]) -> None:
        """Copy what does not lie in the bucket's memory already there; leave stubs.

        What a stub of this bucket stands for lies there: ``give``, or this, was interrupted.
        """
        for place, name, view in self._cut(views):
            value = states[place][name]
            if value is self.stubs.get((place, name)):
                continue
            if value.data_ptr() != view.data_ptr():
                view.copy_(value)
        self.leave_stubs(states)

    def leave_stubs(self, states: States) -> None:
        """Put what stands for the values in their place."""
        if not self.stubs:
            with ordinary_tensors():
                for part in self.parts:
                    for place, numel in part.numels:
                        stub = _without_memory(part.dtype, numel)
                        stub.bucket, stub.place, stub.state_name = self, place, part.name
                        stub.field_name = part.field.name
                        stub.of = f"state {part.name!r} of {self.name!r}"
                        self.stubs[place, part.name] = stub
        for (place, name), stub in self.stubs.items():
            states[place][name] = stub

    def forget(self) -> None:
        """Hold nothing: the optimizer's values come from elsewhere now."""
        for stub in self.stubs.values():
            stub.bucket = None
        self.stubs = {}

    def lay_out_anew(self) -> None:
        self.forget()
        self.parts = parts_there(self.states())

    def pick(self, stub: GuardedState, fields: Mapping[str, Tensor]) -> Tensor:
        """What a stub stands for, of all that has been read."""
        (part,) = (part for part in self.parts if part.field.name == stub.field_name)
        lengths = [numel for _, numel in part.numels]
        places = [place for place, _ in part.numels]
        return fields[stub.field_name].split(lengths)[places.index(stub.place)]

    def _cut(self, views: Mapping[str, Tensor]) -> Iterator[tuple[int, str, Tensor]]:
        with ordinary_tensors():
            for part in self.parts:
                values = views[part.field.name].split([numel for _, numel in part.numels])
                for (place, _), value in zip(part.numels, values, strict=True):
                    yield place, part.name, without_base(value)


Group = tuple[torch.optim.Optimizer, Sequence[nn.Parameter], str, Parts]
"""Whose states a bucket holds, what it is called, and what it will hold."""


def state_buckets(tier: FileTier, groups: Sequence[Group]) -> list[StateBucket]:
    """Return the buckets of these groups of updates: those that there are, or new ones."""
    found: list[StateBucket] = []
    for optimizer, parameters, words, parts in groups:
        bucket = tier.find(_key(optimizer, parameters))
        assert bucket is None or isinstance(bucket, StateBucket), "no other one has such a key"
        is_known = bucket is not None and bucket.is_of(optimizer, parameters)
        if bucket is None or not is_known or not (bucket.stubs or bucket.parts == parts):
            # One that holds nothing yet is not worth its room if it is of another layout.
            bucket = StateBucket(tier, tier.name(words), optimizer, parameters, parts)
        found.append(bucket)
    return found


def _key(optimizer: Any, parameters: Sequence[Any]) -> Hashable:
    return (id(optimizer), *map(id, parameters))


class Reader:
    """Reads states for who wants them out of turn, a bucket at a time.

    It keeps the last one that it has read: drop it when it has served.
    """

    def __init__(self) -> None:
        self._bucket: StateBucket | None = None
        self._fields: Mapping[str, Tensor] = {}

    def value(self, stub: GuardedState) -> Tensor:
        """A copy of what a stub stands for; on the CPU if it is in files.

        Raises: FileTierError if it is gone; StepError if it is in a checkpoint, and that is gone.
        """
        if isinstance(stub, LateState):
            return stub.read()
        bucket = stub.bucket
        if bucket is None:
            raise FileTierError(
                f"{stub.of} has been replaced since this tensor stood for it, by load_state_dict or"
                " by a function without offload_tier='nvme': take it from optimizer.state_dict()"
            )
        if bucket is not self._bucket:
            self._bucket, self._fields = None, {}  # before there is another
            self._fields = bucket.tier.read(bucket)
            self._bucket = bucket
        with ordinary_tensors():
            return bucket.pick(stub, self._fields).clone()

    def state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """One parameter's state with values in place of stubs."""
        return {
            name: self.value(value) if isinstance(value, GuardedState) else value
            for name, value in state.items()
        }


def bring_back(states: States) -> None:
    """Have the optimizer hold values where it holds stubs, in memory beside the cache's bound."""
    reader = Reader()
    for state in states:
        state.update(reader.state(state))


def _is_elsewhere(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.device.type != "cpu"


def _without_memory(dtype: torch.dtype, numel: int) -> GuardedState:
    tensor = torch.empty(numel, dtype=dtype)
    tensor.untyped_storage().resize_(0)
    tensor.__class__ = GuardedState
    return tensor
