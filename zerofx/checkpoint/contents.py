"""The contents of a checkpoint: names, values, and this rank's parts of tensors.

They are laid out as FSDP2's users save them: ``{"model": {name: tensor}, "optimizer": {"state":
{name: {...}}, "param_groups": [...]}, "extra": {...}, "rng": {rank: {...}}}``, with the names that
``get_state_dict`` of ``torch.distributed.checkpoint.state_dict`` gives.  A checkpoint of trainable
parameters alone has ``"frozen": [name, ...]`` too; one of gradients that travel in few bits, with
feedback, ``"errors": {rank: {number: tensor, "layout": [...]}}``; one of modules whose hooks on
their state dicts were left out, ``"parameters_by_own_name": [name, ...]``.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from zerofx.accelerator import kind, module_of
from zerofx.checkpoint.entries import model_entries, plain_name
from zerofx.checkpoint.pieces import Piece, Range, encode
from zerofx.codegen.rewrite.storage import widened, widened_dtypes
from zerofx.deferred.ledger import LEDGER
from zerofx.errors import CheckpointError
from zerofx.ir.parameters import shard_numel, storage_order
from zerofx.runtime.memory.flat import ordinary_tensors
from zerofx.runtime.optimizer.lazy_states import LazyState
from zerofx.runtime.optimizer.owners import owner_of
from zerofx.runtime.parameters.errors import NOWHERE, SAVED_ERRORS, SavedError, extent_of
from zerofx.runtime.parameters.guarded import GuardedState, state_value
from zerofx.runtime.parameters.parameter import ParameterState, State
from zerofx.runtime.parameters.registry import REGISTRY
from zerofx.runtime.parameters.snapshots import Snapshot
from zerofx.runtime.storage.bucket import Reader
from zerofx.wrappers import unwrapped

MODEL, OPTIMIZER, EXTRA, RNG = "model", "optimizer", "extra", "rng"
ERRORS = "errors"
"""The entry with what wires of gradients have lost and ranks have yet to bring, by rank."""

LAYOUT = "layout"
"""In a rank's part of it, what its tensors are."""
FROZEN = "frozen"
"""The entry with the names of frozen parameters, if these were left out."""

BY_OWN_NAME = "parameters_by_own_name"
"""The entry with the names of parameters whose modules' hooks were left out (``entries``)."""


def parameter_names(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[int, str]:
    """Return the first name of every parameter, by its ``id``.

    Raises: ValueError for a parameter of an optimizer that is not the model's, or one of two
    optimizers.
    """
    names = {id(parameter): plain_name(name) for name, parameter in model.named_parameters()}
    owners: dict[int, Optimizer] = {}
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
                owner = owners.setdefault(id(parameter), optimizer)
                if owner is not optimizer:
                    raise ValueError(
                        f"{names[id(parameter)]!r} is in two of the optimizers, "
                        f"{type(owner).__name__} and {type(optimizer).__name__}, and a checkpoint "
                        "has one state of each parameter. Save one of them with the model, and the "
                        "other with the model in a second checkpoint."
                    )
    return names


def bound_parameters(*owners: nn.Module | Optimizer) -> list[ParameterState]:
    """Return the parameters of models and optimizers that compiled steps have taken charge of."""
    parameters: list[torch.Tensor] = []
    for owner in owners:
        if isinstance(owner, nn.Module):
            parameters += owner.parameters()
        else:
            parameters += [p for group in owner.param_groups for p in group["params"]]
    found = (REGISTRY.lookup(parameter) for parameter in parameters)
    return list(dict.fromkeys(bound for bound in found if bound is not None))


def check_model(model: object) -> None:
    """Raise TypeError if ``model`` is no module."""
    if not isinstance(model, nn.Module):
        what = "None" if model is None else f"of type {type(model).__name__}"
        raise TypeError(
            f"model is {what}; expected a torch.nn.Module: path, model and optimizer, in this order"
        )


def as_list(optimizer: Optimizer | Sequence[Optimizer] | None) -> list[Optimizer]:
    """Return no, one or several optimizers as a list; of a wrapper, the optimizer in it.

    Raises: TypeError for anything else.
    """
    if optimizer is None:
        return []
    found = list(optimizer) if isinstance(optimizer, Iterable) else [optimizer]
    for one in found:
        if not isinstance(one, Optimizer):
            raise TypeError(
                f"optimizer is a {type(one).__name__}; expected a torch.optim.Optimizer, several "
                "of them, or None: the one in it, if it wraps one. Give anything else as "
                "extra={'name': its state_dict()}."
            )
    return [unwrapped(one) for one in found]


class Contents:
    """Collects what one rank of ``world_size`` saves: tensors, ``Piece``s, and values as bytes.

    Each rank saves an equal part of a tensor that all ranks have alike.  Of tensors that may differ
    (buffers, parameters that no compiled step has seen) the lowest rank's is saved.

    With a ``snapshot`` all tensors are as they are now, whenever they are written: it copies those
    that only compiled updates change, before they do; others are copied at once.
    """

    def __init__(self, rank: int, world_size: int, snapshot: Snapshot | None = None) -> None:
        self.rank, self.world_size, self.snapshot = rank, world_size, snapshot
        self._reader = Reader()
        self._to_copy: list[tuple[Piece, Callable[[torch.Tensor], object]]] = []

    def collect(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        extra: Mapping[str, Any] | None,
        trainable_only: bool = False,
        and_frozen: Collection[str] = (),
    ) -> dict[str, Any]:
        """Return the state dict to write.

        If ``trainable_only``, of frozen parameters there are those that ``and_frozen`` names.

        Raises: ValueError for what cannot be saved.
        """
        names = parameter_names(model, optimizers)
        found: dict[str, Any] = {MODEL: {}}
        frozen, (entries, by_own_name) = [], model_entries(model)
        if unknown := [name for name in and_frozen if name not in entries]:
            raise ValueError(f"and_frozen has {unknown[0]!r}, which the model has not.")
        for name, value in entries.items():
            is_frozen = isinstance(value, nn.Parameter) and not value.requires_grad
            if trainable_only and is_frozen and name not in and_frozen:
                frozen.append(name)
            else:
                found[MODEL][name] = self.of_model(name, value)
        if trainable_only:
            found[FROZEN] = encode(frozen, "the list of frozen parameters")
        if by_own_name:
            found[BY_OWN_NAME] = encode(sorted(by_own_name), "the list of parameters' own names")
        if optimizers:
            states: dict[str, Any] = {}
            groups: list[dict[str, Any]] = []
            for optimizer in optimizers:
                states |= self._states_of(optimizer, names)
                groups += self._groups_of(optimizer, names)
            found[OPTIMIZER] = {"state": states, "param_groups": groups}
        errors = self._errors(model)
        if errors:
            found[ERRORS] = {str(self.rank): errors}
        found[RNG] = {str(self.rank): encode(rng_state(model), "the state of random numbers")}
        if extra is not None:
            found[EXTRA] = {name: self._extra(name, value) for name, value in extra.items()}
        self._copy()
        return found

    def _copy(self) -> None:
        """Copy to host memory what a step may change without the snapshot.

        Raises: CheckpointError if there is no room.
        """
        needed = sum((p.part.stop - p.part.start) * p.dtype.itemsize for p, _ in self._to_copy)
        available = REGISTRY.host.available_bytes()
        if available is not None and needed > available:
            raise CheckpointError(
                "an asynchronous save begins with copies of what is in files, and of whole "
                f"parameters and states: this rank needs {needed} bytes of host memory for them, "
                f"and {available} are available. Save with asynchronous=False: it has one tensor "
                "in memory at a time."
            )
        for piece, keep in self._to_copy:
            keep(piece.read().detach().to("cpu", copy=True))
        self._to_copy.clear()

    def _errors(self, model: nn.Module) -> dict[str, Any]:
        """Return what this rank's wires of gradients have lost, as tensors by number.

        What a checkpoint had of it that no step has added yet is shared out among ranks.
        """
        layout: list[dict[str, Any]] = []
        found: dict[str, Any] = {}

        def add(name: str, order: Sequence[int], error: SavedError, values: torch.Tensor) -> None:
            found[str(len(layout))] = self._whole(values)
            mesh = error.mesh
            of_ranks = {"axes": list(map(list, mesh.axes)), "outer_stage": mesh.outer_stage}
            of_ranks["rank"] = mesh.rank
            layout.append(
                {
                    "name": name,
                    "order": list(order),
                    "axis": error.axis,
                    "start": error.start,
                    "stop": error.stop,
                    **of_ranks,
                }
            )

        for name, parameter in model.named_parameters():
            bound = REGISTRY.lookup(parameter)
            if bound is not None:
                info, mesh = bound.info, bound.communicator.mesh
                for axis, error in bound.errors.items():
                    extent = extent_of(info, error.numel())
                    if extent.start < extent.stop:
                        values = error[extent.at : extent.at + extent.stop - extent.start]
                        saved = SavedError(axis, mesh, extent.start, extent.stop, NOWHERE)
                        add(plain_name(name), info.storage_order, saved, values)
            for saved in SAVED_ERRORS.left(parameter)[self.rank :: self.world_size]:
                order = storage_order(tuple(parameter.shape), parameter.stride())
                add(plain_name(name), order, saved, saved.read(saved.start, saved.stop))
        if layout:
            found[LAYOUT] = encode(layout, "the layout of errors")
        return found

    def of_model(self, name: str, value: Any) -> torch.Tensor | Piece | bytes:
        """Return what is saved of one entry of a model's state dict."""
        if not isinstance(value, torch.Tensor):
            return encode(value, f"the state {name!r} of the model")
        if value.is_meta:
            raise ValueError(
                f"{name!r} is on the meta device and has no values to save. Materialize the "
                "model first."
            )
        bound = REGISTRY.lookup(value)
        if LEDGER.memory_of(value) is not None:
            return self._by_lowest_rank(value, lambda: LEDGER.value_of(value))
        if bound is None:
            return self._whole(value)
        if bound.state is State.SHARDED:
            return self._shard_of_parameter(bound)
        return self._part(value.detach())

    def _whole(self, tensor: torch.Tensor) -> torch.Tensor:
        if LEDGER.memory_of(tensor) is not None:  # made in a block that is open
            return LEDGER.value_of(tensor)
        tensor = tensor.detach()
        return tensor if self.snapshot is None else tensor.to("cpu", copy=True)

    def _piece(self, part: Range, dtype: torch.dtype, read: Callable[[], torch.Tensor]) -> Piece:
        if part.start == part.stop:
            return Piece(part, dtype, lambda: torch.empty(0, dtype=dtype, device="cpu"))
        piece = Piece(part, dtype, read)
        if self.snapshot is None:
            return piece
        values: list[torch.Tensor] = []
        self._to_copy.append((piece, values.append))
        return Piece(part, dtype, lambda: values[0])

    def _range(
        self, tensor: torch.Tensor, start: int, stop: int, read: Callable[[], torch.Tensor]
    ) -> torch.Tensor | Piece:
        """Return a range of a tensor, which is ``read`` when it is written; all if it is not dense.

        The range is of the elements in their order in memory.
        """
        try:
            order = storage_order(tuple(tensor.shape), tensor.stride())
        except ValueError:
            return self._whole(read())
        part = Range(tuple(tensor.shape), order, start, stop)
        return self._piece(
            part, tensor.dtype, lambda: read().permute(order).reshape(-1)[start:stop]
        )

    def _by_lowest_rank(
        self, tensor: torch.Tensor, read: Callable[[], torch.Tensor]
    ) -> torch.Tensor | Piece:
        return self._range(tensor, 0, tensor.numel() if self.rank == 0 else 0, read)

    def _part(self, whole: torch.Tensor) -> torch.Tensor | Piece:
        """Return this rank's part of a tensor that all ranks have."""
        per_rank = shard_numel(whole.numel(), self.world_size)
        start = min(self.rank * per_rank, whole.numel())
        return self._range(whole, start, min(start + per_rank, whole.numel()), lambda: whole)

    def _shard_of_parameter(self, bound: ParameterState) -> Piece:
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
    ) -> Piece:
        """Return this rank's shard of a parameter, or of its state ``key``.

        Ranks that hold the same shard save an equal part of it each.  ``sources`` are the tensors
        that it is read from, if only compiled updates change these.
        """
        info, parameter = bound.info if key else bound.info.kept, bound.parameter
        first, last = info.owned_by(info.rank)
        replica, num_replicas = bound.communicator.mesh.replica_among(info.world_size)
        per_replica = shard_numel(last - first, num_replicas)
        start = min(first + replica * per_replica, last)
        stop = min(start + per_replica, last)
        held = Range(info.shape, info.storage_order, start, stop)

        def own() -> torch.Tensor:
            return read()[start - first : stop - first]

        if self.snapshot is None or sources is None or parameter is None:
            return self._piece(held, dtype, own)
        name = f"the state {key!r} of {bound.name!r}" if key else repr(bound.name)
        return Piece(held, dtype, self.snapshot.add(parameter, sources, own, name))

    def _states_of(self, optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
        attachment = REGISTRY.attached.get(optimizer)
        found: dict[str, Any] = {}
        for key in optimizer.state:
            if not isinstance(key, torch.Tensor):
                raise ValueError(
                    f"{type(optimizer).__name__} keeps state {key!r}, which belongs to no "
                    "parameter, and a checkpoint has states by their parameters' names. Leave the "
                    "optimizer out, and give what it holds: "
                    "extra={'optimizer': optimizer.state_dict()}."
                )
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                state = optimizer.state.get(parameter)
                if not state:
                    continue
                name = names[id(parameter)]
                bound = REGISTRY.lookup(parameter)
                if bound is not None and attachment is not None and bound in attachment.sharded:
                    is_owned = owner_of(optimizer, bound) is not None
                    of_state = self._owned_state if is_owned else self._sharded_state
                    found[name] = dict(of_state(state, bound))
                else:
                    alike = bound is not None
                    found[name] = {
                        key: self._whole_state(value, parameter, alike, f"{key} of {name}")
                        for key, value in state.items()
                    }
        return found

    def _owned_state(
        self, state: Mapping[str, Any], bound: ParameterState
    ) -> Iterator[tuple[str, Any]]:
        """Yield what this rank has of a parameter's state, and no other has."""
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                yield key, self._whole(value)
            else:
                yield key, encode(value, f"the state {key!r} of {bound.name!r}")

    def _sharded_state(
        self, state: Mapping[str, Any], bound: ParameterState
    ) -> Iterator[tuple[str, Any]]:
        for key, dtype in widened_dtypes(state).items():
            value = state[key]
            if not isinstance(value, torch.Tensor):
                yield key, encode(value, f"the state {key!r} of {bound.name!r}")
            elif value.dim() == 0:
                yield key, self._whole(value)
            else:
                there = dict(state)  # an update may put others in their place
                tensors = [v for v in there.values() if isinstance(v, torch.Tensor) and v.dim()]
                is_elsewhere = any(isinstance(one, GuardedState) for one in tensors)
                sources = None if is_elsewhere else tensors
                read = partial(self._state_with_values, there, key)
                yield key, self._shard(bound, dtype, read, sources, key)

    def _state_with_values(self, state: Mapping[str, Any], key: str) -> torch.Tensor:
        with ordinary_tensors():
            return widened(state, key, partial(state_value, reader=self._reader))

    def _whole_state(self, value: Any, parameter: nn.Parameter, alike: bool, name: str) -> Any:
        if isinstance(value, LazyState):
            return self._by_lowest_rank(value, value.read)
        if isinstance(value, torch.Tensor):
            is_large = value.dim() > 0 and value.shape == parameter.shape
            return self._part(value.detach()) if alike and is_large else self._whole(value)
        if isinstance(value, Mapping) and value and all(type(key) is str for key in value):
            return {
                key: self._whole_state(inner, parameter, False, f"{name}.{key}")
                for key, inner in value.items()
            }
        return encode(value, f"the state {name!r}")

    def _groups_of(
        self, optimizer: Optimizer, names: Mapping[int, str]
    ) -> Iterator[dict[str, Any]]:
        for number, group in enumerate(optimizer.param_groups):
            found: dict[str, Any] = {}
            for key, value in group.items():
                if key == "params":
                    value = [names[id(parameter)] for parameter in value]
                if isinstance(value, torch.Tensor):
                    found[key] = self._whole(value)
                else:
                    found[key] = encode(value, f"{key!r} of param_groups[{number}]")
            yield found

    def _extra(self, name: object, value: Any) -> torch.Tensor | bytes:
        if not isinstance(name, str):
            raise ValueError(f"extra goes by names, and {name!r} is a {type(name).__name__}")
        is_plain = type(value) is torch.Tensor and value.layout is torch.strided
        if is_plain and not value.is_meta and not value.is_quantized:
            return self._whole(value)
        return encode(value, f"extra[{name!r}]")


def rng_state(model: nn.Module) -> dict[str, Any]:
    """Return the states of the global generators of torch, Python and numpy, as plain data.

    Of accelerators that of the model's device, or of the current one if the model is on none: if
    the kind's module says that it is in use (MPS's says nothing).  numpy's if it is imported.
    """
    state: dict[str, Any] = {"cpu": torch.get_rng_state(), "python": random.getstate()}
    device = _accelerator_of(model)
    if device is not None and getattr(module_of(device), "is_initialized", bool)():
        state[device.type] = module_of(device).get_rng_state(device)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, *others = numpy.random.get_state()
        state["numpy"] = (name, keys.tolist(), *others)
    return state


def set_rng_state(state: dict[str, Any], model: nn.Module) -> None:
    """Let the generators go on from states that ``rng_state`` has returned."""
    torch.set_rng_state(state["cpu"])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    device = _accelerator_of(model)
    if device is not None and device.type in state:
        module_of(device).set_rng_state(state[device.type], device)
    numpy = sys.modules.get("numpy")
    if "numpy" in state and numpy is not None:
        name, keys, *others = state["numpy"]
        numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), *others))


def _accelerator_of(model: nn.Module) -> torch.device | None:
    """Return the accelerator that a model computes on; the current one if it is on the CPU."""
    name = kind()
    if name is None:
        return None
    computing = [bound.info.device for bound in bound_parameters(model)]
    devices = [*computing, *(parameter.device for parameter in model.parameters())]
    return next((one for one in devices if one.type == name), torch.device(name))
