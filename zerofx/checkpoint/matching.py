"""Fitting a checkpoint to a model and its optimizers: what goes where, and all that does not."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from zerofx.checkpoint.contents import parameter_names, plain_name
from zerofx.checkpoint.errors import CheckpointError
from zerofx.checkpoint.kinds import other_states, why_another_kind
from zerofx.checkpoint.saved import Path, Saved
from zerofx.checkpoint.targets import (
    Target,
    into_shard,
    into_tensor,
    late_shard,
    late_state,
    new_shard,
    new_tensor,
)
from zerofx.codegen.rewrite.storage import ADDED, UPDATES, widened, widened_dtypes
from zerofx.ir.parameters import storage_order
from zerofx.runtime.memory.flat import ordinary_tensors
from zerofx.runtime.parameters.guarded import GuardedState
from zerofx.runtime.parameters.registry import REGISTRY
from zerofx.runtime.storage.bucket import Reader

EXTRA_STATE = "_extra_state"
"""What the name of a module's own state ends in (``nn.Module.get_extra_state``)."""


@dataclass
class Differences:
    """How a checkpoint and what it is loaded into differ, in words and in full."""

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


@dataclass
class Plan:
    """All that one rank reads: tensors, values, and what is done when they are there.

    ``values`` are the entries that are no tensors; ``finish`` is given them, decoded, by entry.
    """

    targets: list[Target] = field(default_factory=list)
    values: list[str] = field(default_factory=list)
    finish: list[Callable[[Mapping[str, Any]], object]] = field(default_factory=list)
    differences: Differences = field(default_factory=Differences)

    def clear(self) -> None:
        """Forget what has been done, and the states that it was done to: they refer to the plan."""
        self.targets.clear()
        self.finish.clear()


def match_model(plan: Plan, saved: Saved, model: nn.Module, left_out: Collection[str] = ()) -> None:
    """Say where each tensor of the model comes from.

    Those ``left_out`` of the checkpoint, for they were frozen, stay as they are if they are here.
    """
    differences = plan.differences
    entries = {plain_name(n): (n, value) for n, value in model.state_dict(keep_vars=True).items()}
    for name, (own_name, value) in entries.items():
        entry = saved.model.get(name)
        if entry is None and name not in left_out:
            differences.missing.append(name)
        elif entry is None:
            if value.requires_grad:
                differences.different.append(f"{name} (left out as it was frozen, trainable here)")
        elif name.endswith(EXTRA_STATE) or not isinstance(value, torch.Tensor):
            _read_whole(plan, saved, entry, _giving_to(model, own_name))
        elif not _differs(plan, saved, entry, name, tuple(value.shape), value.dtype):
            plan.targets.append(target_of(entry, name, value))
    there = (*saved.model, *left_out)
    differences.unknown += [name for name in there if name not in entries]


def _giving_to(model: nn.Module, name: str) -> Callable[[Any], object]:
    return lambda value: model.load_state_dict({name: value}, strict=False)


def target_of(entry: str, name: str, value: torch.Tensor) -> Target:
    if value.is_meta:
        raise ValueError(
            f"{name!r} is on the meta device and has no memory to load into. Materialize the "
            "model first."
        )
    bound = REGISTRY.lookup(value)
    if bound is not None and bound.is_sharded and not bound.is_open:
        return into_shard(entry, bound)
    return into_tensor(entry, value)


def _differs(
    plan: Plan,
    saved: Saved,
    entry: str,
    name: str,
    shape: tuple[int, ...],
    dtype: torch.dtype | None,
) -> bool:
    """Note how the tensor saved there is another than this one; None is any dtype."""
    tensor = saved.tensor(entry)
    if tensor is None:
        plan.differences.different.append(f"{name} (no tensor in the checkpoint)")
    elif tuple(tensor.size) != shape:
        plan.differences.different.append(
            f"{name} (shape {tuple(tensor.size)} in the checkpoint, {shape} here)"
        )
    elif dtype is not None and tensor.properties.dtype != dtype:
        plan.differences.different.append(
            f"{name} ({tensor.properties.dtype} in the checkpoint, {dtype} here)"
        )
    else:
        return False
    return True


def _read_whole(plan: Plan, saved: Saved, entry: str, keep: Callable[[Any], object]) -> None:
    """Read an entry of any kind into memory of its own, and ``keep`` it at the end."""
    tensor = saved.tensor(entry)
    if tensor is None:
        plan.values.append(entry)
        plan.finish.append(lambda values: keep(values[entry]))
        return
    with ordinary_tensors():
        memory = torch.empty(tuple(tensor.size), dtype=tensor.properties.dtype, device="cpu")
    plan.targets.append(into_tensor(entry, memory))
    plan.finish.append(lambda _values: keep(memory))


def match_extra(plan: Plan, saved: Saved, extra: dict[Any, Any]) -> None:
    """Have the user's own values put into ``extra``."""
    for path, entry in saved.extra.items():
        _read_whole(plan, saved, entry, _putting(extra, path))


def _putting(into: dict[Any, Any], path: Path) -> Callable[[Any], None]:
    def put(value: Any) -> None:
        place = into
        for key in path[:-1]:
            place = place.setdefault(key, {})
        place[path[-1]] = value

    return put


def match_optimizers(
    plan: Plan,
    saved: Saved,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    read_value: Callable[[str], Any],
) -> None:
    """Say where the states and hyperparameters of all optimizers come from.

    Raises: CheckpointError if there are none.
    """
    if not saved.has_optimizer:
        raise CheckpointError(
            "the checkpoint has no optimizer. Load only the model: zerofx.load(path, model, None)."
        )
    names = parameter_names(model, optimizers)
    members = _saved_members(saved, read_value)
    group_of = {name: number for number, group in members.items() for name in group}
    numbers = _numbers(saved, model)
    mine: set[str] = set()
    not_for_it: set[str] = set()  # states of another kind of optimizer
    for optimizer in optimizers:
        for place, group in enumerate(optimizer.param_groups):
            here = [names[id(parameter)] for parameter in group["params"]]
            mine.update(here)
            plan.differences.missing += [
                f"optimizer state of {name}" for name in here if name not in group_of
            ]
            sources = sorted({group_of[name] for name in here if name in group_of})
            if len(sources) == 1:
                entries = saved.groups[sources[0]].entries
                values = {
                    key: read_value(entry)
                    for key, entry in entries.items()
                    if key != "params" and saved.tensor(entry) is None
                }
                why = why_another_kind(optimizer, group, entries, values)
                if why:
                    plan.differences.different.append(
                        f"param_groups[{place}] of {type(optimizer).__name__} (saved by another "
                        f"kind of optimizer, {why})"
                    )
                    stateless = [p for p in group["params"] if not optimizer.state.get(p)]
                    not_for_it |= {names[id(parameter)] for parameter in stateless}
                    continue
                _match_group(plan, saved, group, entries)
                its = {
                    names[id(parameter)]: (parameter, {str(path[0]) for path in states})
                    for parameter in group["params"]
                    if (states := saved.states.get(names[id(parameter)]))
                    and not optimizer.state.get(parameter)
                }
                others = other_states(optimizer, place, its, values)
                plan.differences.different += [f"states of {n} ({w})" for n, w in others.items()]
                not_for_it.update(others)
            elif sources:
                plan.differences.different.append(
                    f"param_groups[{place}] of {type(optimizer).__name__} (its parameters are of "
                    f"groups {sources} in the checkpoint)"
                )
        plan.finish.append(_completing(optimizer))
        known = set(group_of) - not_for_it
        _match_states(plan, saved, optimizer, names, numbers, known)
    plan.differences.unknown += [
        f"optimizer state of {name}" for name in group_of if name not in mine
    ]


def _completing(optimizer: Optimizer) -> Callable[[Any], None]:
    def complete(_values: Any) -> None:
        """Let it see to what older checkpoints lack, as at the end of its load_state_dict."""
        optimizer.__setstate__({"state": optimizer.state, "param_groups": optimizer.param_groups})

    return complete


def _saved_members(saved: Saved, read_value: Callable[[str], Any]) -> dict[int, list[str]]:
    found = {}
    for number, group in saved.groups.items():
        entry = group.entries.get("params")
        members = read_value(entry) if entry is not None and saved.tensor(entry) is None else None
        if not isinstance(members, list):
            raise CheckpointError(
                f"param_groups[{number}] of the checkpoint does not say which parameters are in "
                "it: it was not saved by zerofx.save or with get_state_dict of "
                "torch.distributed.checkpoint.state_dict"
            )
        found[number] = [str(name) for name in members]
    return found


def _numbers(saved: Saved, model: nn.Module) -> set[Path]:
    """The states that are one number for a parameter, even for one of one number itself."""
    shapes = {plain_name(name): tuple(p.shape) for name, p in model.named_parameters()}
    found: set[Path] = {("step",)}
    for name, entries in saved.states.items():
        for path, entry in entries.items():
            tensor = saved.tensor(entry)
            if tensor is not None and not tensor.size and shapes.get(name):
                found.add(path)
    return found


def _match_group(
    plan: Plan, saved: Saved, group: dict[str, Any], entries: Mapping[str, str]
) -> None:
    for key, entry in entries.items():
        if key != "params":
            _read_whole(plan, saved, entry, _setting(group, key))


def _setting(group: dict[str, Any], key: str) -> Callable[[Any], None]:
    def keep(value: Any) -> None:
        there = group.get(key)
        if isinstance(there, torch.Tensor) and isinstance(value, torch.Tensor | float | int):
            with ordinary_tensors():  # a compiled step has this very tensor
                there.copy_(torch.as_tensor(value).reshape(there.shape))
        else:
            group[key] = value

    return keep


def _match_states(
    plan: Plan,
    saved: Saved,
    optimizer: Optimizer,
    names: Mapping[int, str],
    numbers: set[Path],
    known: Collection[str],
) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = names[id(parameter)]
            if name in known:
                matching = _StateMatching(plan, saved, name, parameter, group, optimizer)
                matching.match(saved.states.get(name, {}), numbers)
                plan.finish.append(matching.complete)


class _StateMatching:
    """Fits one parameter's state: what is there now is replaced, but for what does not fit.

    The old one is dropped when the new one begins to be read: there is one at a time.
    """

    def __init__(
        self,
        plan: Plan,
        saved: Saved,
        name: str,
        parameter: nn.Parameter,
        group: Mapping[str, Any],
        optimizer: Optimizer,
    ) -> None:
        self.plan, self.saved, self.name = plan, saved, name
        self.parameter, self.group, self.optimizer = parameter, group, optimizer
        bound = REGISTRY.lookup(parameter)
        self.bound = bound if bound is not None and bound.stage > 0 else None
        self.state: Mapping[str, Any] = optimizer.state.get(parameter) or {}
        self.here = widened_dtypes(self.state)
        attachment = REGISTRY.attached.get(optimizer)
        self.takes_dtypes = attachment is not None and attachment.keeps_loaded_dtypes
        self.new: dict[str, Any] = {}
        self.staying: list[str] = []

    def match(self, entries: Mapping[Path, str], numbers: set[Path]) -> None:
        if self.here and entries:
            self._compare_names({str(path[0]) for path in entries})
        for path, entry in entries.items():
            if not self.here or str(path[0]) in {*self.here, UPDATES}:
                self._match_one(path, entry, path in numbers)

    def _compare_names(self, saved: set[str]) -> None:
        # Where they are kept, one is made of the parameter if there is none, and none is a count.
        expected = set(self.here) - (ADDED if self.takes_dtypes else set())
        missing, unknown = sorted(expected - saved), sorted(saved - {*self.here, UPDATES})
        self.plan.differences.missing += [f"state {key} of {self.name}" for key in missing]
        self.plan.differences.unknown += [f"state {key} of {self.name}" for key in unknown]
        self.staying += missing

    def _match_one(self, path: Path, entry: str, is_number: bool) -> None:
        tensor, key = self.saved.tensor(entry), str(path[0])
        put = _putting(self.new, path)
        if tensor is None:
            _read_whole(self.plan, self.saved, entry, put)
            return
        shape, dtype = tuple(tensor.size), tensor.properties.dtype
        old = self.state.get(key)
        expected, is_shard = shape, False
        if self.bound is not None and len(path) == 1:
            is_shard = not is_number and (shape != () or self.bound.info.shape == ())
            expected = self.bound.info.shape if is_shard else ()
        elif isinstance(old, torch.Tensor) and len(path) == 1:
            expected = tuple(old.shape)
        wanted = self.here.get(key) if len(path) == 1 and not self.takes_dtypes else None
        if _differs(self.plan, self.saved, entry, f"state {key} of {self.name}", expected, wanted):
            if old is not None:
                self.staying.append(key)
            return

        def keep(value: torch.Tensor) -> None:
            put(value)
            self.optimizer.state[self.parameter] = self.new

        device = self._device(key, shape)
        bound = self.bound
        if bound is not None and is_shard and not isinstance(old, GuardedState):
            self.plan.targets.append(new_shard(entry, bound, dtype, device, keep))
        elif bound is not None and is_shard:  # this rank's are in files: there is no room for all
            self.plan.targets.append(late_shard(entry, bound, dtype, device, keep))
        elif not is_number and self._is_like_parameter(shape) and not self._is_seen:
            self.plan.targets.append(late_state(entry, self.parameter, dtype, device, keep))
        else:
            like = self.parameter if bound is None else None
            self.plan.targets.append(new_tensor(entry, shape, dtype, device, like, keep))

    @property
    def _is_seen(self) -> bool:
        """Whether a compiled step has seen the parameter."""
        return REGISTRY.lookup(self.parameter) is not None

    def _is_like_parameter(self, shape: tuple[int, ...]) -> bool:
        """Whether a state is one number for each of its elements, which have places in memory."""
        try:
            storage_order(tuple(self.parameter.shape), self.parameter.stride())
        except ValueError:
            return False
        return shape == tuple(self.parameter.shape) and math.prod(shape) > 0 and shape != ()

    def _device(self, key: str, shape: tuple[int, ...]) -> torch.device:
        """Where the optimizer has such a state, or would have it."""
        there = self.state.get(key)
        if isinstance(there, torch.Tensor):
            return there.device
        counts_there = self.group.get("capturable") or self.group.get("fused")
        if key == "step" and not shape and not counts_there:
            return torch.device("cpu")
        return self.parameter.device

    def complete(self, _values: Any) -> None:
        """Leave the optimizer with the new state; what stays is as it makes it."""
        reader = Reader()

        def value(there: Any) -> Any:
            return there.read_by(reader) if isinstance(there, GuardedState) else there

        for key in self.staying:
            self.new[key] = widened(self.state, key, value)
        if self.new:
            self.optimizer.state[self.parameter] = self.new
        else:
            self.optimizer.state.pop(self.parameter, None)
