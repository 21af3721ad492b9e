"""An optimizer's states: their place (device, host memory, files) and their bytes.

A bucket's states in files are one layout: all of the first state's shards, one behind the other,
then all of the next one's, so that one kernel takes them as they lie in memory.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zerofx import compat
from zerofx.codegen.rewrite.storage import Precision
from zerofx.codegen.trace.shadow import shadow_of
from zerofx.ir.parameters import ParameterInfo
from zerofx.runtime.memory.flat import without_storage
from zerofx.runtime.optimizer.precision import StateStorage
from zerofx.runtime.optimizer.traces import TracedOptimizer
from zerofx.runtime.parameters.guarded import GuardedState, state_value
from zerofx.runtime.parameters.registry import REGISTRY
from zerofx.runtime.storage.bucket import Bucket, Key, Left, Location, Part, Place, Reader
from zerofx.runtime.storage.memory import Memory
from zerofx.runtime.storage.tier import FileTier

States = Sequence[dict[str, Any]]
"""The entries of ``optimizer.state`` for a bucket's parameters, in the bucket's order."""

Parts = tuple[Part, ...]

Kept = Mapping[str, tuple[torch.dtype, int]]
"""What is kept of one parameter per element, by name: dtype and length."""


def parts_of(kept: Sequence[Kept]) -> Parts:
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


def per_element(state: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
    """The states that are there per element: not the count of steps."""
    return [item for item in state.items() if isinstance(item[1], Tensor) and item[1].dim()]


class StateBucket(Bucket):
    """The states of one group of updates.

    ``stubs`` stand for its values in ``optimizer.state`` between updates, by place and name, if
    they are in files; there are none while it holds nothing.
    """

    what = "optimizer states"

    def __init__(
        self,
        place: Place,
        name: str,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[nn.Parameter],
        parts: Parts,
    ) -> None:
        super().__init__(place, name, parts)
        self.optimizer = weakref.ref(optimizer)
        self.parameters = [weakref.ref(parameter) for parameter in parameters]
        self.stubs: dict[Key, GuardedState] = {}

    def is_of(self, optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> bool:
        """Return whether it is for these very objects."""
        mine = [id(reference()) for reference in self.parameters]
        return self.optimizer() is optimizer and mine == list(map(id, parameters))

    def states(self) -> States:
        """Return the optimizer's entries for its parameters as they are now."""
        optimizer = self.optimizer()
        if optimizer is None:
            return [{} for _ in self.parameters]
        return [optimizer.state.get(reference(), {}) for reference in self.parameters]

    def is_whole_of(self, states: States) -> bool:
        """Return whether these are all its own, and all that it holds."""
        there = {
            (place, name): id(value)
            for place, state in enumerate(states)
            for name, value in per_element(state)
        }
        return bool(there) and there == {key: id(stub) for key, stub in self.stubs.items()}

    @property
    def is_gone(self) -> bool:
        return self.optimizer() is None

    def has_any(self) -> bool:
        return any(
            getattr(value, "bucket", None) is self
            for state in self.states()
            for _, value in per_element(state)
        )

    def prepare(self) -> None:
        """Have all states at hand that come from elsewhere: a state dict, or other buckets."""
        states = self.states()
        if not self.is_whole_of(states):
            bring_back(states)
            self.forget()

    def parts_elsewhere(self, memory: Memory) -> Parts:
        states = self.states()
        self.parts = parts_there(states)
        return tuple(
            part
            for part in self.parts
            if not all(memory.holds(states[place][part.name]) for place, _ in part.numels)
        )

    def arrive(self, views: Mapping[Key, Tensor]) -> None:
        """Have the optimizer hold what is in memory, with what comes from elsewhere copied there.

        States of another kind than were expected stay where they are.
        """
        states = self.states()
        if not self.stubs and parts_there(states) != self.parts:
            for state in states:
                state.update((name, value.cpu()) for name, value in per_element(state))
            return
        for (place, name), view in views.items():
            value = states[place][name]
            if value is not self.stubs.get((place, name)):
                view = view.view(value.shape).copy_(value)
            states[place][name] = view

    def leave(self, views: Mapping[Key, Tensor]) -> Left:
        """Take the states back from the optimizer, with those that its update has made.

        What a stub stands for lies in memory: ``arrive``, or this, was interrupted.
        """
        states = self.states()
        parts = parts_there(states)
        if not parts:
            return Left.NOTHING
        if parts != self.parts:
            return Left.RELAYOUT
        is_new = not self.stubs
        for (place, name), view in views.items():
            value = states[place][name]
            if value is not self.stubs.get((place, name)) and value.data_ptr() != view.data_ptr():
                view.copy_(value.reshape(-1))
        self._leave_stubs(states)
        return Left.NEW if is_new else Left.KNOWN

    def _leave_stubs(self, states: States) -> None:
        """Put what stands for the values in their place."""
        if not self.stubs:
            for part in self.parts:
                for place, numel in part.numels:
                    stub: Any = without_storage((numel,), (1,), part.dtype, "cpu")
                    stub.__class__ = GuardedState
                    stub.bucket, stub.key = self, (place, part.name)
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


def with_values(state: Mapping[str, Any], reader: Reader) -> dict[str, Any]:
    """Return one parameter's state with values in place of stubs; on the CPU if from files.

    Raises: FileTierError if a value is gone; StepError if it is in a checkpoint that is gone.
    """
    return {name: state_value(value, reader) for name, value in state.items()}


def bring_back(states: States) -> None:
    """Have the optimizer hold values where it holds stubs, in memory beside the cache's bound."""
    reader = Reader()
    for state in states:
        state.update(with_values(state, reader))


class StatePlaces:
    """The states of one optimizer's parameters."""

    def __init__(self, optimizer: TracedOptimizer) -> None:
        self._traced = optimizer

    def _of(self, parameters: Iterable[int]) -> list[tuple[Any, ParameterInfo]]:
        """The user's parameters of these indices, and their layouts."""
        found = (self._traced.parameters[index] for index in parameters)
        return [(parameter.user(), parameter.info) for parameter in found]

    def _to_come(self, parameters: Sequence[tuple[Any, ParameterInfo]]) -> list[Kept]:
        """Return the states of each parameter's shard per element, after its next update."""
        infos = {id(user): info for user, info in parameters}
        numels = {key: info.shard_numel for key, info in infos.items()}
        optimizer, precision = self._traced.live_optimizer(), self._traced.settings.precision
        found = states_to_come(optimizer, infos, numels, precision)
        return [found.get(key, {}) for key in infos]

    def bytes_to_come(self) -> int:
        """Bytes that the states of updates on the host will take there and do not yet.

        Before the first step; those that there are may be whole still.
        """
        entries = self._traced.live_optimizer().state
        parameters = self._of(self._traced.settings.on_host)
        total = 0
        for (user, info), kept in zip(parameters, self._to_come(parameters), strict=True):
            state = entries.get(user)
            if not state:
                total += sum(dtype.itemsize * numel for dtype, numel in kept.values())
                continue
            for _, value in per_element(state):
                if not REGISTRY.host.holds(value):
                    is_whole = value.shape == info.shape
                    numel = info.shard_numel if is_whole else value.numel()
                    total += numel * value.itemsize
        return total

    def bucket_in(self, tier: FileTier, indices: Sequence[int]) -> StateBucket:
        """Return the bucket of these parameters' states in files: the one there is, or a new one.

        One that holds nothing yet is not worth its room if it is of another layout.
        """
        optimizer, parameters = self._traced.live_optimizer(), self._of(indices)
        users, names = [user for user, _ in parameters], [info.name for _, info in parameters]
        parts = parts_of(self._to_come(parameters))
        states = (one for one in tier.buckets if isinstance(one, StateBucket))
        mine = [one for one in states if one.is_of(optimizer, users)]
        for bucket in mine:
            if bucket.stubs or (bucket.parts == parts and not any(one.stubs for one in mine)):
                return bucket
        span = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        name = tier.name(f"{self._traced.name} of {span}")
        return StateBucket(tier, name, optimizer, users, parts)

    def nbytes(self) -> int:
        """Bytes of the states of updates on the host that are in host memory now."""
        optimizer = self._traced.optimizer()
        if optimizer is None:
            return 0
        users = (user for user, _ in self._of(self._traced.settings.on_host))
        there = (item for user in users for item in per_element(optimizer.state.get(user, {})))
        return sum(value.nbytes for _, value in there if REGISTRY.host.holds(value))

    def place(self, indices: Sequence[int]) -> None:
        """Have these parameters' states, side by side, in the memory where they are updated."""
        parameters, on_host = self._of(indices), self._traced.parameters[indices[0]].on_host
        location = Location.HOST if on_host else Location.DEVICE
        memory = REGISTRY.memory(location, parameters[0][1].device)
        users = [user for user, _ in parameters]
        bucket = StateBucket(memory, "", self._traced.live_optimizer(), users, ())
        bucket.acquire()
        for state in bucket.states() if on_host else ():
            for name, value in state.items():
                if isinstance(value, Tensor) and value.device.type != "cpu":
                    state[name] = value.cpu()  # a number


_SMALL, _LARGE = (4, 4), (64, 64)
"""A step is tried on these: optimizers with 8-bit states have them from 4,096 elements on."""


def states_to_come(
    optimizer: torch.optim.Optimizer,
    infos: Mapping[int, ParameterInfo],
    numels: Mapping[int, int],
    precision: Precision,
) -> dict[int, Kept]:
    """Return what the optimizer keeps of so many elements, by the ``id`` of the parameter.

    ``infos`` are the parameters that count, by ``id`` too.  States that there are decide; else the
    optimizer's own step runs once on a copy with one small tensor for each group, dtype and shape.
    Parameters are left out for which that step fails.
    """
    storage = StateStorage(precision, type(optimizer).__name__)
    made: dict[tuple[Any, ...], Mapping[str, Any] | None] = {}
    found: dict[int, Kept] = {}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            info = infos.get(id(parameter))
            if info is None:
                continue
            kept: Mapping[str, Any] = optimizer.state.get(parameter, {})
            tensors = [v for v in kept.values() if isinstance(v, Tensor) and v.numel() > 1]
            if tensors:
                like = max(tensors, key=Tensor.numel)
            else:
                compute = precision.compute_dtype(info.dtype)
                shape = _LARGE if info.numel >= math.prod(_LARGE) else _SMALL
                trial = number, shape, compute
                if trial not in made:
                    made[trial] = states_after_a_step(optimizer, *trial)
                states = made[trial]
                if states is None:
                    continue
                kept, like = states, torch.empty(shape, device="meta")
            found[id(parameter)] = storage.kept(kept, like, numels[id(parameter)], info)
    return found


def bytes_of_states(
    optimizer: torch.optim.Optimizer,
    infos: Mapping[int, ParameterInfo],
    precision: Precision,
) -> dict[int, float]:
    """Return the bytes that the optimizer keeps per element, as ``states_to_come`` finds them."""
    numels = {key: info.numel for key, info in infos.items()}
    return {
        key: sum(dtype.itemsize * numel for dtype, numel in kept.values()) / max(numels[key], 1)
        for key, kept in states_to_come(optimizer, infos, numels, precision).items()
    }


def states_after_a_step(
    optimizer: torch.optim.Optimizer,
    group: int,
    shape: Sequence[int],
    dtype: torch.dtype,
    hyperparameters: Mapping[str, Any] | None = None,
) -> Mapping[str, Any] | None:
    """Return the states that a copy's step makes of a small parameter; None if it fails."""
    with (
        compat.tensors.real_tensors(),
        torch.random.fork_rng(devices=[]),
        torch.inference_mode(False),
        torch.enable_grad(),
    ):
        parameter = torch.nn.Parameter(torch.ones(shape, dtype=dtype))
        parameter.grad = torch.ones_like(parameter)
        try:
            shadow = shadow_of(optimizer, {(group, 0): parameter})
            shadow.param_groups[0].update(hyperparameters or {})
            for name in {"capturable", "foreach"} & shadow.param_groups[0].keys():
                shadow.param_groups[0][name] = False  # which torch refuses on a CPU, or so
            type(shadow).step(shadow)
        except Exception:
            return None
        return dict(shadow.state[parameter])
