"""Fitting a checkpoint to a model and its optimizers: what goes where, and what does not fit."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from zerofx.checkpoint.contents import LAYOUT, parameter_names
from zerofx.checkpoint.entries import (
    entries_to_give,
    give,
    model_entries,
    plain_name,
    unlike_hooked,
)
from zerofx.checkpoint.metadata import Keys, Saved, why_another_kind
from zerofx.checkpoint.pieces import Range
from zerofx.checkpoint.targets import Target, into_shard, into_state, into_tensor
from zerofx.codegen.rewrite.storage import ADDED, UPDATES, widened, widened_dtypes
from zerofx.codegen.trace.arguments import BY_PLACE, is_torchs
from zerofx.deferred.tape import Source
from zerofx.errors import CheckpointError
from zerofx.ir.mesh import Mesh
from zerofx.ir.parameters import storage_order
from zerofx.runtime.memory.flat import ordinary_tensors
from zerofx.runtime.optimizer.owners import owner_of
from zerofx.runtime.optimizer.states import states_after_a_step
from zerofx.runtime.parameters.errors import SAVED_ERRORS, SavedError
from zerofx.runtime.parameters.guarded import GuardedState, state_value
from zerofx.runtime.parameters.parameter import State
from zerofx.runtime.parameters.registry import REGISTRY
from zerofx.runtime.storage.bucket import Reader


@dataclass
class Differences:
    """All differences of a checkpoint and the model and optimizers that it is loaded into."""

    missing: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.missing or self.unknown or self.different)

    def __str__(self) -> str:
        parts = {
            "not in the checkpoint": self.missing,
            "only in the checkpoint": self.unknown,
            "different": self.different,
        }
        return "; ".join(
            f"{what} ({len(names)}): {', '.join(names)}" for what, names in parts.items() if names
        )


def target_of(entry: str, name: str, value: torch.Tensor) -> Target:
    """Plan to read a tensor of the model: its shard if it is sharded, else all of it."""
    if value.is_meta:
        raise ValueError(
            f"{name!r} is on the meta device and has no memory to load into. Materialize the "
            "model first."
        )
    bound = REGISTRY.lookup(value)
    if bound is not None and bound.state is State.SHARDED:
        return into_shard(entry, bound)
    return into_tensor(entry, value)


class Matching:
    """Everything that one rank reads, and what does not fit.

    ``targets`` are the tensors; other entries are read by ``value`` at once.  When the tensors are
    there, ``finish`` is done in this order; it fills ``extra`` too.

    Raises: CheckpointError if the checkpoint has no optimizer, or one without names.
    """

    def __init__(
        self,
        saved: Saved,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        value: Callable[[str], Any],
    ) -> None:
        self.saved, self.model, self.value = saved, model, value
        self.names = parameter_names(model, optimizers)
        self.targets: list[Target] = []
        self.finish: list[Callable[[], object]] = []
        self.differences = Differences()
        self.extra: dict[Any, Any] = {}
        self._reshaped: set[str] = set()  # tensors of the model that have another shape
        self._match_model()
        if optimizers:
            self._match_optimizers(optimizers)
        self._match_errors()
        for path, entry in saved.extra.items():
            self.read_whole(entry, partial(_put, self.extra, path))

    def forget(self) -> None:
        """Forget work that has been done: states that are read later would keep all of it."""
        self.targets.clear()
        self.finish.clear()

    def read_whole(self, entry: str, keep: Callable[[Any], object]) -> None:
        """Plan to read an entry of any kind into new memory, and to ``keep`` it at the end."""
        tensor = self.saved.tensor(entry)
        if tensor is None:
            self.finish.append(partial(keep, self.value(entry)))
            return
        with ordinary_tensors():
            memory = torch.empty(tuple(tensor.size), dtype=tensor.properties.dtype, device="cpu")
        self.targets.append(into_tensor(entry, memory))
        self.finish.append(partial(keep, memory))

    def differs(
        self, entry: str, name: str, shape: tuple[int, ...], dtype: torch.dtype | None
    ) -> bool:
        """Return whether the saved tensor has another shape or dtype (None: any), and note it."""
        tensor = self.saved.tensor(entry)
        if tensor is None:
            why = "no tensor in the checkpoint"
        elif tuple(tensor.size) != shape:
            why = f"shape {tuple(tensor.size)} in the checkpoint, {shape} here"
            self._reshaped.add(name)
        elif dtype is not None and tensor.properties.dtype != dtype:
            why = f"{tensor.properties.dtype} in the checkpoint, {dtype} here"
        else:
            return False
        self.differences.different.append(f"{name} ({why})")
        return True

    def _match_errors(self) -> None:
        """Plan to have what ranks have lost of gradients added when it is reduced again."""
        parameters = {plain_name(name): p for name, p in self.model.named_parameters()}
        found: dict[str, list[SavedError]] = {name: [] for name in parameters}
        for entries in self.saved.errors.values():
            for number, described in enumerate(self.value(entries[LAYOUT])):
                name = described["name"]
                if name in parameters:
                    self._match_error(
                        entries[str(number)], described, parameters[name], found[name]
                    )
        self.finish.append(partial(_replace_errors, parameters, found))

    def _match_error(
        self,
        entry: str,
        described: Mapping[str, Any],
        parameter: nn.Parameter,
        found: list[SavedError],
    ) -> None:
        start, stop = described["start"], described["stop"]
        bound = REGISTRY.lookup(parameter)
        order = bound.info.storage_order if bound is not None else None
        if order is None:
            order = storage_order(tuple(parameter.shape), parameter.stride())
        if list(order) != described["order"]:
            name = f"what gradients of {described['name']} have lost"
            self.differences.different.append(f"{name} (its dimensions lie in another order here)")
            return
        mesh = Mesh(
            tuple((axis, size) for axis, size in described["axes"]),
            described["rank"],
            described["outer_stage"],
        )

        def take(source: Source) -> None:
            found.append(SavedError(described["axis"], mesh, start, stop, source))

        self.targets.append(Target(entry, Range.whole((stop - start,)), take, is_lazy=True))

    def _match_model(self) -> None:
        """Plan where each tensor of the model comes from.

        Parameters that the checkpoint leaves out, because they were frozen, stay as they are.
        """
        saved, differences = self.saved, self.differences
        left_out = self.value(saved.frozen) if saved.frozen is not None else ()
        own = self.value(saved.by_own_name) if saved.by_own_name is not None else ()
        here, unhooked = model_entries(self.model, own)
        to_give = entries_to_give(self.model, own)
        differences.different += unlike_hooked(unhooked, own, saved.model)
        given: dict[str, Any] = {}
        for name, value in here.items():
            entry = saved.model.get(name)
            if entry is None and name not in left_out:
                differences.missing.append(name)
            elif entry is None:
                if value.requires_grad:
                    differences.different.append(
                        f"{name} (left out as it was frozen, trainable here)"
                    )
            elif name in to_give:
                self.read_whole(entry, partial(given.__setitem__, name))
            elif not self.differs(entry, name, tuple(value.shape), value.dtype):
                self.targets.append(target_of(entry, name, value))
        self.finish.append(partial(give, self.model, given, own))
        differences.unknown += [name for name in (*saved.model, *left_out) if name not in here]

    def _match_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Plan where the states and hyperparameters of all optimizers come from."""
        if not self.saved.has_optimizer:
            raise CheckpointError(
                "the checkpoint has no optimizer. Load only the model: zerofx.load(path, model, "
                "None)."
            )
        group_of = self._saved_groups()
        divided = self._divided(optimizers, group_of)
        numbers = self._numbers()
        mine: set[str] = set()
        not_for_it: set[str] = set()  # parameters with states of another kind of optimizer
        for optimizer in optimizers:
            for place, group in enumerate(optimizer.param_groups):
                here = [self.names[id(parameter)] for parameter in group["params"]]
                mine.update(here)
                missing = [name for name in here if name not in group_of]
                self.differences.missing += [f"optimizer state of {name}" for name in missing]
                sources = sorted({group_of[name] for name in here if name in group_of})
                if len(sources) == 1:
                    source = sources[0]
                    not_for_it |= self._match_group(optimizer, place, source, divided[source])
                elif sources:
                    self.differences.different.append(
                        f"param_groups[{place}] of {type(optimizer).__name__} (its parameters are "
                        f"of groups {sources} in the checkpoint)"
                    )
            self.finish.append(partial(_complete, optimizer))
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    name = self.names[id(parameter)]
                    if name in self._reshaped:
                        self.differences.different.append(
                            f"optimizer state of {name} (its parameter has another shape here)"
                        )
                    elif name in group_of and name not in not_for_it:
                        state = _StateMatching(self, optimizer, group, parameter)
                        state.match(self.saved.states.get(name, {}), numbers)
                        self.finish.append(state.complete)
        self.differences.unknown += [
            f"optimizer state of {name}" for name in group_of if name not in mine
        ]

    def _saved_groups(self) -> dict[str, int]:
        """Return the number of each parameter's group in the checkpoint, by name."""
        found: dict[str, int] = {}
        for number, group in self.saved.groups.items():
            entry = group.get("params")
            is_value = entry is not None and self.saved.tensor(entry) is None
            members = self.value(entry) if entry is not None and is_value else None
            if not isinstance(members, list):
                raise CheckpointError(
                    f"param_groups[{number}] of the checkpoint does not say which parameters are "
                    "in it: it was not saved by zerofx.save or with get_state_dict of "
                    "torch.distributed.checkpoint.state_dict"
                )
            found |= {str(name): number for name in members}
        return found

    def _divided(
        self, optimizers: Sequence[Optimizer], group_of: Mapping[str, int]
    ) -> dict[int, set[str]]:
        """Return the hyperparameters in which groups here differ that were one, by its number."""
        first: dict[int, Mapping[str, Any]] = {}
        found: dict[int, set[str]] = {number: set() for number in self.saved.groups}
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            names = {self.names[id(parameter)] for parameter in group["params"]}
            for number in {group_of[name] for name in names & group_of.keys()}:
                one = first.setdefault(number, group)
                keys = self.saved.groups[number].keys() & (one.keys() | group.keys()) - BY_PLACE
                found[number] |= {key for key in keys if not _equal(one.get(key), group.get(key))}
        return found

    def _numbers(self) -> set[Keys]:
        """Return the keys of states that hold one number for a parameter of any shape."""
        shapes = {plain_name(name): p.shape for name, p in self.model.named_parameters()}
        found: set[Keys] = {("step",)}
        for name, entries in self.saved.states.items():
            for path, entry in entries.items():
                tensor = self.saved.tensor(entry)
                if tensor is not None and not tensor.size and shapes.get(name):
                    found.add(path)
        return found

    def _match_group(
        self, optimizer: Optimizer, place: int, source: int, differing: set[str]
    ) -> set[str]:
        """Match a group's hyperparameters; return the parameters whose states do not fit them.

        In some that are ``differing`` groups of the same ``source`` have values of their own: then
        each keeps all its own.
        """
        group = optimizer.param_groups[place]
        entries = {key: e for key, e in self.saved.groups[source].items() if key not in BY_PLACE}
        values = {
            key: self.value(entry)
            for key, entry in entries.items()
            if self.saved.tensor(entry) is None
        }
        stateless = {self.names[id(p)]: p for p in group["params"] if not optimizer.state.get(p)}

        @functools.cache
        def kept(num_dims: int, dtype: torch.dtype) -> Mapping[str, Any] | None:
            given = {} if differing else values
            return states_after_a_step(optimizer, place, (2,) * num_dims, dtype, given)

        why = why_another_kind(optimizer, group, entries, values)
        if why:
            self.differences.different.append(
                f"param_groups[{place}] of {type(optimizer).__name__} (saved by another kind of "
                f"optimizer, {why})"
            )
            return set(stateless)
        if differing:
            self.differences.different.append(
                f"param_groups[{place}] of {type(optimizer).__name__} (part of group {source} in "
                f"the checkpoint, whose parts differ here in {', '.join(sorted(differing))})"
            )
        for key, entry in entries.items() if not differing else ():
            self.read_whole(entry, partial(_set, group, key))
        # Those of optimizers that are not torch's may depend on sizes.
        others: set[str] = set()
        for name, parameter in stateless.items() if is_torchs(type(optimizer)) else ():
            there = {str(path[0]) for path in self.saved.states.get(name, {})} - ADDED
            here = kept(parameter.dim(), parameter.dtype) if there else None
            if here is not None and here.keys() != there:
                its, own = (", ".join(sorted(names)) or "none" for names in (there, here))
                self.differences.different.append(
                    f"states of {name} ({its} in the checkpoint, {own} here)"
                )
                others.add(name)
        return others


def _put(into: dict[Any, Any], path: Keys, value: Any) -> None:
    for key in path[:-1]:
        into = into.setdefault(key, {})
    into[path[-1]] = value


def _set(group: dict[str, Any], key: str, value: Any) -> None:
    there = group.get(key)
    if isinstance(there, torch.Tensor) and isinstance(value, torch.Tensor | float | int):
        with ordinary_tensors():  # a compiled step has this very tensor
            there.copy_(torch.as_tensor(value).reshape(there.shape))
    else:
        group[key] = value


def _equal(one: Any, other: Any) -> bool:
    """Return whether two hyperparameters are equal, which may be tensors."""
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return torch.equal(torch.as_tensor(one), torch.as_tensor(other))
    return one is other or bool(one == other)


def _complete(optimizer: Optimizer) -> None:
    """Let it add what older checkpoints lack, as at the end of its load_state_dict."""
    optimizer.__setstate__({"state": optimizer.state, "param_groups": optimizer.param_groups})


class _StateMatching:
    """Fits one parameter's state: entries that fit replace those that are there.

    The old state is dropped when the new one begins to be read, so that there is one at a time.
    """

    def __init__(
        self,
        matching: Matching,
        optimizer: Optimizer,
        group: Mapping[str, Any],
        parameter: nn.Parameter,
    ) -> None:
        self.matching, self.name = matching, matching.names[id(parameter)]
        self.optimizer, self.group, self.parameter = optimizer, group, parameter
        bound = REGISTRY.lookup(parameter)
        self.is_seen = bound is not None  # by a compiled step
        owner = owner_of(optimizer, bound) if bound is not None else None
        self.is_elsewhere = bound is not None and owner not in (None, bound.communicator.mesh.shard)
        self.bound = bound if bound is not None and bound.stage > 0 and owner is None else None
        self.state: Mapping[str, Any] = optimizer.state.get(parameter) or {}
        self.here = widened_dtypes(self.state)
        attachment = REGISTRY.attached.get(optimizer)
        self.takes_dtypes = attachment is not None and attachment.keeps_loaded_dtypes
        self.new: dict[str, Any] = {}
        self.staying: list[str] = []

    def match(self, entries: Mapping[Keys, str], numbers: set[Keys]) -> None:
        if self.is_elsewhere:
            return
        if self.here and entries:
            self._compare_names({str(path[0]) for path in entries})
        for path, entry in entries.items():
            if not self.here or str(path[0]) in {*self.here, UPDATES}:
                self._match_one(path, entry, path in numbers)

    def _compare_names(self, saved: set[str]) -> None:
        # If loaded dtypes are kept, master weights are made of the parameter, and a count is 0.
        expected = set(self.here) - (ADDED if self.takes_dtypes else set())
        missing, unknown = sorted(expected - saved), sorted(saved - {*self.here, UPDATES})
        differences = self.matching.differences
        differences.missing += [f"state {key} of {self.name}" for key in missing]
        differences.unknown += [f"state {key} of {self.name}" for key in unknown]
        self.staying += missing

    def _match_one(self, path: Keys, entry: str, is_number: bool) -> None:
        tensor, key = self.matching.saved.tensor(entry), str(path[0])
        put = partial(_put, self.new, path)
        if tensor is None:
            self.matching.read_whole(entry, put)
            return
        shape, dtype = tuple(tensor.size), tensor.properties.dtype
        old = self.state.get(key)
        expected, sharded = shape, None
        if self.bound is not None and len(path) == 1:
            is_shard = not is_number and (shape != () or self.bound.info.shape == ())
            sharded = self.bound if is_shard else None
            expected = self.bound.info.shape if is_shard else ()
        elif isinstance(old, torch.Tensor) and len(path) == 1:
            expected = tuple(old.shape)
        wanted = self.here.get(key) if len(path) == 1 and not self.takes_dtypes else None
        if self.matching.differs(entry, f"state {key} of {self.name}", expected, wanted):
            if old is not None:
                self.staying.append(key)
            return

        def keep(value: torch.Tensor) -> None:
            put(value)
            self.optimizer.state[self.parameter] = self.new
            if not self.staying:
                self.state = {}

        like = torch.empty(shape, dtype=dtype, device="meta")
        is_late = isinstance(old, GuardedState)  # in files: there is no room for all
        if shape == tuple(self.parameter.shape):
            stride = self.parameter.stride()
            like = torch.empty_like(torch.empty_strided(shape, stride, dtype=dtype, device="meta"))
            # No step has said yet which part of it this rank keeps.
            is_late |= not is_number and not self.is_seen and like.dim() > 0 and like.numel() > 0
        device = self._device(key, shape)
        target = into_state(entry, like, device, keep, bound=sharded, is_late=is_late)
        self.matching.targets.append(target)

    def _device(self, key: str, shape: tuple[int, ...]) -> torch.device:
        """Return the device where the optimizer has such a state, or would have it."""
        there = self.state.get(key)
        if isinstance(there, torch.Tensor):
            return there.device
        counts_there = self.group.get("capturable") or self.group.get("fused")
        if key == "step" and not shape and not counts_there:
            return torch.device("cpu")
        return self.parameter.device

    def complete(self) -> None:
        """Give the optimizer the new state, with the entries that stay as they are."""
        read = partial(state_value, reader=Reader())
        for key in self.staying:
            self.new[key] = widened(self.state, key, read)
        if self.new:
            self.optimizer.state[self.parameter] = self.new
        else:
            self.optimizer.state.pop(self.parameter, None)


def _replace_errors(
    parameters: Mapping[str, nn.Parameter], found: Mapping[str, list[SavedError]]
) -> None:
    """Have what a checkpoint has of errors, and nothing of those that there were."""
    for name, parameter in parameters.items():
        bound = REGISTRY.lookup(parameter)
        if bound is not None:
            bound.errors.clear()
        SAVED_ERRORS.replace(parameter, found[name])
