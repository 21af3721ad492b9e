"""What a checkpoint holds: names and this rank's parts, as FSDP2's users save them.

``{"model": {name: tensor}, "optimizer": {"state": {name: {...}}, "param_groups": [...]},
"extra": {...}, "rng": {rank: {...}}}``, with the names that ``get_state_dict`` of
``torch.distributed.checkpoint.state_dict`` gives.  One of only what is trainable has ``"frozen":
[name, ...]`` besides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from zerofx.checkpoint.pieces import Changes, FlatPiece
from zerofx.checkpoint.rng import rng_state
from zerofx.checkpoint.values import encode
from zerofx.codegen.rewrite.storage import widened, widened_dtypes
from zerofx.deferred.ledger import LEDGER
from zerofx.ir.parameters import shard_numel, storage_order
from zerofx.runtime.memory.flat import ordinary_tensors
from zerofx.runtime.optimizer.lazy_states import LazyState
from zerofx.runtime.parameters.guarded import GuardedState
from zerofx.runtime.parameters.parameter import ParameterState
from zerofx.runtime.parameters.registry import REGISTRY
from zerofx.runtime.storage.bucket import Reader

MODEL, OPTIMIZER, EXTRA, RNG = "model", "optimizer", "extra", "rng"
FROZEN = "frozen"
"""The names of the parameters that were left out, where only what is trainable was saved."""


def plain_name(name: str) -> str:
    """A parameter's name without what ``torch.compile(model)`` puts into it."""
    return name.replace("_orig_mod.", "")


def model_entries(model: nn.Module) -> dict[str, Any]:
    """What ``model.state_dict()`` has, by name: parameters and buffers themselves, no values."""
    entries = model.state_dict(keep_vars=True)
    return {plain_name(name): value for name, value in entries.items()}


def frozen_names(model: nn.Module) -> list[str]:
    """The parameters that require no gradient, under all of their names."""
    return [name for name, value in model_entries(model).items() if _is_frozen(value)]


def _is_frozen(value: Any) -> bool:
    return isinstance(value, nn.Parameter) and not value.requires_grad


def parameter_names(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[int, str]:
    """The name of every parameter, by its ``id``; the first if it has several.

    Raises: ValueError for a parameter of an optimizer that is not the model's.
    """
    names = {id(parameter): plain_name(name) for name, parameter in model.named_parameters()}
    for optimizer in optimizers:
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if id(parameter) not in names:
                    raise ValueError(
                        f"group {number} of {type(optimizer).__name__} has a parameter of shape "
                        f"{tuple(parameter.shape)} that is not the model's, and a checkpoint goes "
                        "by the model's names. Give the model that has all of the optimizer's "
                        "parameters."
                    )
    return names


def bound_parameters(*owners: nn.Module | Optimizer) -> list[ParameterState]:
    """The parameters of models and optimizers that compiled functions have taken charge of."""
    parameters: list[torch.Tensor] = []
    for owner in owners:
        if isinstance(owner, nn.Module):
            parameters += owner.parameters()
        else:
            parameters += [p for group in owner.param_groups for p in group["params"]]
    found = (REGISTRY.lookup(parameter) for parameter in parameters)
    return list(dict.fromkeys(bound for bound in found if bound is not None))


def sharded_in(optimizer: Optimizer) -> dict[int, ParameterState]:
    """The parameters whose states in this optimizer are shards, by their ``id``."""
    attachment = REGISTRY.attached.get(optimizer)
    if attachment is None:
        return {}
    bounds = attachment.bounds(optimizer)
    return {id(bound.parameter): bound for bound in bounds if bound in attachment.sharded}


class Contents:
    """Collects what one rank saves.

    ``rank`` and ``world_size`` are those that write.  What is whole and alike on all ranks is
    shared out among them; of what may differ (buffers, parameters that no compiled step has seen),
    the lowest rank's is written.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self._reader = Reader()

    def collect(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        extra: Mapping[str, Any] | None,
        trainable_only: bool = False,
    ) -> dict[str, Any]:
        """The state dict to write; without frozen parameters if ``trainable_only``.

        Raises: ValueError for what cannot be saved.
        """
        names = parameter_names(model, optimizers)
        frozen = frozen_names(model) if trainable_only else []
        entries = ((name, value) for name, value in self.of_model(model) if name not in frozen)
        found: dict[str, Any] = {MODEL: dict(entries)}
        if trainable_only:
            found[FROZEN] = encode(frozen, "the list of frozen parameters")
        if optimizers:
            states: dict[str, Any] = {}
            groups: list[dict[str, Any]] = []
            for optimizer in optimizers:
                states |= self._states_of(optimizer, names)
                groups += _groups_of(optimizer, names)
            found[OPTIMIZER] = {"state": states, "param_groups": groups}
        found[RNG] = {str(self.rank): encode(rng_state(), "the state of random numbers")}
        if extra is not None:
            found[EXTRA] = dict(_encoded(extra))
        return found

    def of_model(self, model: nn.Module) -> Iterator[tuple[str, Any]]:
        for name, value in model_entries(model).items():
            if not isinstance(value, torch.Tensor):
                yield name, encode(value, f"the state {name!r} of the model")
                continue
            if value.is_meta:
                raise ValueError(
                    f"{name!r} is on the meta device and has no values to save. Materialize the "
                    "model first."
                )
            bound = REGISTRY.lookup(value)
            if LEDGER.memory_of(value) is not None:
                yield name, self._deferred(value)
            elif bound is None:
                yield name, value.detach()
            elif bound.is_sharded and not bound.is_open:
                yield name, self._shard_of_parameter(bound)
            else:
                yield name, self._part(value.detach())

    def _deferred(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor that is not made yet: the lowest rank makes it for the moment of writing."""
        try:
            order = storage_order(tuple(tensor.shape), tensor.stride())
        except ValueError:
            return LEDGER.value_of(tensor)
        return self._by_lowest_rank(tensor, order, lambda: LEDGER.value_of(tensor))

    def _by_lowest_rank(
        self, tensor: torch.Tensor, order: Sequence[int], read: Callable[[], torch.Tensor]
    ) -> FlatPiece:
        """All of a tensor that is not there, which ``read`` gives for the moment of writing."""
        return FlatPiece(
            tuple(tensor.shape),
            order,
            (0, tensor.numel() if self.rank == 0 else 0),
            tensor.dtype,
            lambda: read().permute(order).reshape(-1),
        )

    def _shard_of_parameter(self, bound: ParameterState) -> FlatPiece:
        if bound.file is not None:
            return self._shard(bound, bound.info.dtype, lambda: bound.values(self._reader), None)
        shard = bound.values().detach()  # where it is now
        return self._shard(bound, bound.info.dtype, lambda: shard, [shard])

    def _shard(
        self,
        bound: ParameterState,
        dtype: torch.dtype,
        read: Callable[[], torch.Tensor],
        sources: Sequence[torch.Tensor] | None,
        key: str = "",
    ) -> FlatPiece:
        """What this rank owns of a parameter, or of a state like it.

        With ``sources`` it is read from those, which only compiled updates change.
        """
        info, parameter = bound.info, bound.parameter
        changes = None
        if sources is not None and parameter is not None:
            name = f"the state {key!r} of {bound.name!r}" if key else repr(bound.name)
            changes = Changes(parameter, sources, name)
        start, stop = info.owned_by(bound.communicator.rank)
        return FlatPiece(
            info.shape,
            info.storage_order,
            (start, stop),
            dtype,
            lambda: read()[: stop - start],
            changes,
        )

    def _part(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's equal part of a tensor that all ranks have; all of it if it is not dense."""
        try:
            order = storage_order(tuple(whole.shape), whole.stride())
        except ValueError:
            return whole
        per_rank = shard_numel(whole.numel(), self.world_size)
        start = min(self.rank * per_rank, whole.numel())
        stop = min(start + per_rank, whole.numel())
        return FlatPiece(
            tuple(whole.shape),
            order,
            (start, stop),
            whole.dtype,
            lambda: whole.permute(order).reshape(-1)[start:stop],
        )

    def _states_of(self, optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
        sharded = sharded_in(optimizer)
        found: dict[str, Any] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                state = optimizer.state.get(parameter)
                if not state:
                    continue
                name = names[id(parameter)]
                bound = sharded.get(id(parameter))
                if bound is not None:
                    found[name] = dict(self._sharded_state(state, bound))
                else:
                    alike = REGISTRY.lookup(parameter) is not None
                    found[name] = {
                        key: self._whole_state(value, parameter, alike, f"{key} of {name}")
                        for key, value in state.items()
                    }
        return found

    def _sharded_state(
        self, state: Mapping[str, Any], bound: ParameterState
    ) -> Iterator[tuple[str, Any]]:
        for key, dtype in widened_dtypes(state).items():
            value = state[key]
            if not isinstance(value, torch.Tensor):
                yield key, encode(value, f"the state {key!r} of {bound.name!r}")
            elif value.dim() == 0:
                yield key, value.detach()
            else:
                there = dict(state)  # an update may put others in their place
                tensors = [v for v in there.values() if isinstance(v, torch.Tensor) and v.dim()]
                is_elsewhere = any(isinstance(one, GuardedState) for one in tensors)
                sources = None if is_elsewhere else tensors
                yield key, self._shard(bound, dtype, self._reading_state(there, key), sources, key)

    def _reading_state(self, state: Mapping[str, Any], key: str) -> Callable[[], torch.Tensor]:
        def value(there: Any) -> Any:
            return there.read_by(self._reader) if isinstance(there, GuardedState) else there

        def read() -> torch.Tensor:
            with ordinary_tensors():
                return widened(state, key, value)

        return read

    def _whole_state(self, value: Any, parameter: nn.Parameter, alike: bool, name: str) -> Any:
        if isinstance(value, LazyState):
            return self._by_lowest_rank(value, value.order, value.read)
        if isinstance(value, torch.Tensor):
            value = value.detach()
            is_large = value.dim() > 0 and value.shape == parameter.shape
            return self._part(value) if alike and is_large else value
        if isinstance(value, Mapping):
            return {
                str(key): self._whole_state(inner, parameter, False, f"{name}.{key}")
                for key, inner in value.items()
            }
        return encode(value, f"the state {name!r}")


def _groups_of(optimizer: Optimizer, names: Mapping[int, str]) -> Iterator[dict[str, Any]]:
    for number, group in enumerate(optimizer.param_groups):
        found: dict[str, Any] = {}
        for key, value in group.items():
            if key == "params":
                value = [names[id(parameter)] for parameter in value]
            is_tensor = isinstance(value, torch.Tensor)
            found[key] = (
                value.detach() if is_tensor else encode(value, f"{key!r} of param_groups[{number}]")
            )
        yield found


def _encoded(extra: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in extra.items():
        if not isinstance(name, str):
            raise ValueError(f"extra goes by names, and {name!r} is a {type(name).__name__}")
        is_plain = type(value) is torch.Tensor and value.layout is torch.strided
        is_plain = is_plain and not value.is_meta and not value.is_quantized
        yield name, value.detach() if is_plain else encode(value, f"extra[{name!r}]")
