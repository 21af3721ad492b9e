"""Optimizers whose states are shards, and their state dicts, which are whole.

Everything here that reads whole values is collective.
"""

from __future__ import annotations

import io
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch.optim import Optimizer

from zerofx import compat
from zerofx.codegen.rewrite.storage import MASTER, widen
from zerofx.codegen.trace.nested import map_leaves
from zerofx.errors import StepError
from zerofx.runtime.memory.copies import GIVEN_COPIES
from zerofx.runtime.memory.flat import gather, ordinary_tensors, take_shard
from zerofx.runtime.optimizer.lazy_states import LazyState
from zerofx.runtime.optimizer.owners import owner_of
from zerofx.runtime.optimizer.states import with_values
from zerofx.runtime.parameters.parameter import ParameterState
from zerofx.runtime.parameters.registry import REGISTRY
from zerofx.runtime.storage.bucket import Reader


def attach_optimizer(optimizer: Optimizer, keeps_loaded_dtypes: bool = False) -> None:
    """Take charge of an optimizer's states: flat shards inside, whole values in state dicts.

    Call it whenever parameters have been bound, and before creating states.  From then on, at
    stages 1 to 3, every tensor of ``optimizer.state[parameter]`` that is not 0-dimensional is
    this rank's ``[info.shard_numel]``; whole ones from before are cut here.  If the optimizer's own
    step updates the parameter, its owner keeps them whole, and no other rank any.  Uses torch's
    public hooks on this one instance, and marks what has been cut, so calling it again is harmless.

    With ``keeps_loaded_dtypes`` a state that is loaded stays in the dtype that it comes in, where
    torch would cast it to its parameter's.

    Raises: ValueError if a state is neither a number nor of its parameter's shape.
    """
    attachment = REGISTRY.attached.get(optimizer)
    if attachment is None:
        attachment = REGISTRY.attached[optimizer] = OptimizerAttachment(optimizer)
    attachment.keeps_loaded_dtypes |= keeps_loaded_dtypes
    attachment.shard_states(optimizer)


def refuse_step_hooks(optimizer: Optimizer) -> None:
    """Refuse hooks of the user's on this optimizer's ``step``, or on every optimizer's."""
    if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        name = type(optimizer).__name__
        raise StepError(
            f"{name} is a torch.optim.Optimizer that has not called Optimizer.__init__, so its "
            "states cannot be cut into shards: call super().__init__(parameters, defaults) in "
            f"{name}.__init__. If it holds another optimizer, derive it from object instead."
        )
    ours = REGISTRY.attached.get(optimizer)
    before = optimizer._optimizer_step_pre_hooks.values()
    if (
        compat.tensors.has_global_optimizer_hooks()
        or optimizer._optimizer_step_post_hooks
        or any(ours is None or hook != ours.on_step for hook in before)
    ):
        raise StepError(
            f"{type(optimizer).__name__} has step hooks (its own or global), which would not run "
            "inside the compiled step. Remove them, and do their work in the step or after the "
            "call."
        )


class OptimizerAttachment:
    """The hooks on one optimizer, and the parameters whose states in it are shards."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.lookup: Callable[[torch.Tensor], ParameterState | None] = REGISTRY.lookup
        self.sharded: weakref.WeakSet[ParameterState] = weakref.WeakSet()
        self.before_load: dict[str, Any] = {}
        self.loading: dict[str, Any] = {}
        self.keeps_loaded_dtypes = False
        self.handles = [
            optimizer.register_step_pre_hook(self.on_step),
            optimizer.register_state_dict_pre_hook(self.before_state_dict),
            optimizer.register_state_dict_post_hook(self.on_state_dict),
            optimizer.register_load_state_dict_pre_hook(self.on_load),
            optimizer.register_load_state_dict_post_hook(self.on_loaded),
        ]
        # What copy, pickle and torch.save ask an object for.
        optimizer.__getstate__ = partial(self.getstate, weakref.ref(optimizer))

    def bounds(self, optimizer: Optimizer) -> list[ParameterState]:
        """The parameters whose states are sharded or are to be, in the optimizer's order."""
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        found = (self.lookup(parameter) for parameter in parameters)
        return [b for b in found if b is not None and b.stage > 0]

    def getstate(self, living: weakref.ref[Optimizer]) -> Any:
        """Refuse a copy of an optimizer whose states are shards: it would take them for whole."""
        optimizer = cast(Optimizer, living())
        if self.bounds(optimizer):
            name = type(optimizer).__name__
            raise StepError(
                f"a copy of {name}, as copy, pickle and torch.save make it, would hold this rank's "
                "shards of the states as if they were whole. Copy or save optimizer.state_dict(), "
                "which all ranks call, or use zerofx.save; or first call zerofx.unshard(model, "
                "optimizer)."
            )
        kind: Any = type(optimizer)
        return kind.__getstate__(optimizer)

    def shard_states(self, optimizer: Optimizer) -> None:
        """Cut whatever is whole; nothing changes if one state cannot be cut."""
        new = [bound for bound in self.bounds(optimizer) if bound not in self.sharded]
        numbers = _names_of_numbers(optimizer.state)
        cuts: list[tuple[dict[str, Any], dict[str, Any]]] = []
        not_owned = []
        for bound in new:
            state = optimizer.state.get(bound.parameter, {})
            owner = owner_of(optimizer, bound)
            if owner is not None:
                if owner == bound.communicator.mesh.shard:
                    cuts.append((state, map_leaves(_read, dict(state))))
                else:
                    not_owned.append(bound.parameter)
                continue
            with ordinary_tensors():
                cuts.append(
                    (state, {key: _cut(key, v, bound, numbers) for key, v in state.items()})
                )
        for state, shards in cuts:
            state.update(shards)
        for parameter in not_owned:
            optimizer.state.pop(parameter, None)
        self.sharded.update(new)

    def whole_state(
        self, optimizer: Optimizer, bound: ParameterState, state: Mapping[str, Any], reader: Reader
    ) -> dict[str, Any]:
        """Return the whole tensors of one parameter's state, on its device.  Collective.

        In the dtypes in which the optimizer would have them, whatever they are kept in.
        ``reader`` reads those that are in files.
        """
        owner = owner_of(optimizer, bound)
        if owner is not None:
            return _from_owner(dict(state), owner, bound)
        with ordinary_tensors():
            whole = state = widen(with_values(state, reader))
        for key in sorted(state, key=str):  # the same order on all ranks
            value = state[key]
            if isinstance(value, torch.Tensor) and value.dim() > 0:
                _check_is_shard(key, value, bound)
                with ordinary_tensors():  # one that is kept on the host travels from the device
                    shard = value.to(bound.info.device)
                    whole[key] = gather(shard, bound.info, bound.communicator.shards)
        return whole

    def on_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        """Refuse an eager ``optimizer.step()`` but at stage 0; compiled steps do not run hooks."""
        bounds = self.bounds(optimizer)
        if not bounds:
            _count_on_device(optimizer)
            return
        raise RuntimeError(
            f"an eager optimizer.step() would update whole parameters, and ZeRO stage "
            f"{bounds[0].stage} keeps only this rank's shard of the optimizer state of "
            f"{bounds[0].name!r} and others. Call it in a function compiled with "
            "torch.compile(..., backend='zero'), or get plain objects back with "
            "zerofx.unshard(model, optimizer)."
        )

    def before_state_dict(self, optimizer: Optimizer) -> None:
        """Have all states there are, and of one step."""
        REGISTRY.settle(self.bounds(optimizer), [optimizer])

    def on_state_dict(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """Put whole CPU tensors in place of the shards; ``optimizer.state`` stays as it is."""
        bounds = [bound for bound in self.bounds(optimizer) if bound in self.sharded]
        REGISTRY.barrier.wait(bounds, "optimizer.state_dict()")
        by_parameter = {id(bound.parameter): bound for bound in bounds}
        states, reader = state_dict["state"], Reader()
        for number, parameter in _numbered(optimizer, state_dict).items():
            bound = by_parameter.get(id(parameter))
            if bound is None:
                continue
            if number in states or owner_of(optimizer, bound) is not None:
                whole = self.whole_state(optimizer, bound, states.get(number, {}), reader)
                if whole:
                    states[number] = {
                        key: map_leaves(partial(_snapshot, f"{key} of {bound.name}"), value)
                        for key, value in whole.items()
                    }
        # In the order of the parameters, as if they had been updated in it; then what is nobody's.
        nobody = {key: states.pop(key) for key in list(states) if not isinstance(key, int)}
        state_dict["state"] = dict(sorted(states.items(), key=lambda entry: entry[0])) | nobody

    def on_load(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        REGISTRY.settle(self.bounds(optimizer), [optimizer])
        GIVEN_COPIES.forget()
        self.loading = state_dict
        self.before_load = {"state": optimizer.state, "param_groups": optimizer.param_groups}

    def on_loaded(self, optimizer: Optimizer) -> None:
        """Cut the loaded states, or restore the old ones if they do not fit."""
        before, self.before_load = self.before_load, {}
        state_dict, self.loading = self.loading, {}
        was_sharded = set(self.sharded)
        self.sharded.clear()
        if self.keeps_loaded_dtypes:
            self._undo_casts(optimizer, state_dict)
        try:
            self.shard_states(optimizer)
        except ValueError:
            optimizer.__setstate__(before)
            self.sharded.update(was_sharded)
            raise
        for bound in self.sharded:
            REGISTRY.barrier.note_write(bound, "optimizer.load_state_dict()")

    def _undo_casts(self, optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
        """Give states that are numbers per element the dtypes that they have been saved in."""
        for number, parameter in _numbered(optimizer, state_dict).items():
            state = optimizer.state.get(parameter, {})
            for name, given in state_dict["state"].get(number, {}).items():
                loaded = state.get(name)
                if _is_float(given) and _is_float(loaded) and given.dtype != loaded.dtype:
                    state[name] = given.detach().to(loaded.device, copy=True)

    def detach(self) -> None:
        for handle in self.handles:
            handle.remove()


def _numbered(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> dict[int, torch.Tensor]:
    """The optimizer's parameters by their numbers in a state dict."""
    numbers = (number for group in state_dict["param_groups"] for number in group["params"])
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    return dict(zip(numbers, parameters, strict=True))


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _names_of_numbers(states: Mapping[Any, Any]) -> set[str]:
    """Return the states that are one number per parameter, such as ``step``.

    For a 0-dimensional parameter a moment looks the same; the other parameters tell.
    """
    return {"step"} | {
        key
        for parameter, state in states.items()
        if isinstance(parameter, torch.Tensor) and parameter.dim() > 0
        for key, value in state.items()
        if isinstance(value, torch.Tensor) and value.dim() == 0
    }


def _cut(key: str, value: Any, bound: ParameterState, numbers: set[str]) -> Any:
    """Return this rank's flat range of a whole state; numbers stay as they are."""
    info = bound.info
    if not isinstance(value, torch.Tensor):
        return value
    if value.dim() == 0 and (info.shape != () or key in numbers):
        return value
    if tuple(value.shape) != info.shape:
        raise ValueError(
            f"the optimizer state {key!r} of parameter {bound.name!r} has shape "
            f"{tuple(value.shape)}, which is neither the parameter's {info.shape} nor a single "
            f"number: ZeRO stage {bound.stage} can shard only elementwise states. Load a state "
            "dict of this model, or use an elementwise optimizer or stage 0."
        )
    rank = info.rank
    return (
        value.shard(info, rank) if isinstance(value, LazyState) else take_shard(value, info, rank)
    )


def _read(value: Any) -> Any:
    """Return a state as it is, read if it is in a checkpoint still."""
    return value.read() if isinstance(value, LazyState) else value


def _from_owner(state: dict[str, Any], owner: int, bound: ParameterState) -> dict[str, Any]:
    """Send one parameter's state from its owner to all ranks.  Collective."""
    communicator, device = bound.communicator.shards, bound.info.device
    if communicator.world_size == 1:
        return state
    mine = owner == bound.communicator.mesh.shard
    data, problem = io.BytesIO(), ""
    try:
        torch.save(state if mine else {}, data)
    except Exception as error:
        problem = f": {error}"
    with ordinary_tensors():
        size = torch.tensor([-1 if problem else data.tell()], device=device)
        source = bound.communicator.mesh.rank_of(owner)
        communicator.broadcast(size, source)
        if int(size) < 0:
            raise RuntimeError(
                f"the state of parameter {bound.name!r}, which one rank has, cannot be pickled to "
                f"be sent to the others{problem}. Keep tensors, numbers and objects of classes "
                "that can be imported there."
            )
        sent = torch.empty(int(size), dtype=torch.uint8, device=device)
        if mine:
            sent.copy_(torch.frombuffer(data.getbuffer(), dtype=torch.uint8))
        communicator.broadcast(sent, source)
        if mine:
            return state
        # Another rank's of this very training: what it holds may be of a library's class.
        data = io.BytesIO(sent.cpu().numpy().tobytes())
        return torch.load(data, map_location=device, weights_only=False)


def _check_is_shard(key: str, value: torch.Tensor, bound: ParameterState) -> None:
    if tuple(value.shape) == (bound.info.shard_numel,):
        return
    raise RuntimeError(
        f"the optimizer state {key!r} of parameter {bound.name!r} should be this rank's shard of "
        f"{bound.info.shard_numel} elements and has shape {tuple(value.shape)}: something other "
        "than the compiled step has replaced it. Use optimizer.load_state_dict to set states."
    )


def _snapshot(name: str, value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return GIVEN_COPIES.give(name, value.detach().to("cpu", copy=True))


def _as_plain(state: Mapping[str, Any], bound: ParameterState) -> dict[str, Any]:
    """The state of a parameter that is trained in its own dtype, as after ``load_state_dict``."""
    return {
        name: value.to(bound.info.dtype) if _is_float(value) and value.dim() else value
        for name, value in state.items()
        if name != MASTER
    }


def _count_on_device(optimizer: Optimizer) -> None:
    """Have counts where a fused or capturable step reads them; compiled ones keep them on the CPU.

    A capturable one keeps all its numbers on the device, as NAdam's ``mu_product``.
    """
    for group in optimizer.param_groups:
        takes_all = group.get("capturable")
        for parameter in group["params"] if group.get("fused") or takes_all else ():
            state = optimizer.state.get(parameter, {})
            for name, value in state.items():
                is_number = isinstance(value, torch.Tensor) and not value.dim()
                if is_number and (takes_all or name == "step"):
                    state[name] = value.to(parameter.device)


def unshard_states(optimizer: Optimizer, bounds: list[ParameterState]) -> None:
    """Make the states of these parameters whole, as plain torch has them.  Collective."""
    _count_on_device(optimizer)
    attachment = REGISTRY.attached.get(optimizer)
    if attachment is None:
        return
    wanted = set(bounds)
    reader = Reader()
    for bound in attachment.bounds(optimizer):
        if bound in wanted and bound in attachment.sharded:
            state = optimizer.state.get(bound.parameter, {})
            if state or owner_of(optimizer, bound) is not None:
                whole = attachment.whole_state(optimizer, bound, state, reader)
                whole = _as_plain(whole, bound) if attachment.keeps_loaded_dtypes else whole
                if whole:
                    optimizer.state[bound.parameter].clear()
                    optimizer.state[bound.parameter].update(whole)
            attachment.sharded.discard(bound)
    if not attachment.sharded:
        attachment.detach()
        del REGISTRY.attached[optimizer]
