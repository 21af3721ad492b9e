"""Whole values of what is sharded: ``full_params``, ``unshard``, and state dicts.

Everything here that reads values is collective, and ranks meet through the store before they
communicate: a rank that is missing is an error after ``REGISTRY.join_timeout_s``, not a hang.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from zerofx import compat
from zerofx.codegen.rewrite.storage import MASTER, widen
from zerofx.runtime.comm.agreement import rendezvous
from zerofx.runtime.memory.flat import gather, ordinary_tensors, take_shard
from zerofx.runtime.optimizer.lazy_states import LateState
from zerofx.runtime.parameters.parameter import BoundParameter
from zerofx.runtime.parameters.registry import REGISTRY
from zerofx.runtime.storage.file_states import Reader

Lookup = Callable[[torch.Tensor], BoundParameter | None]


def join(bounds: Iterable[BoundParameter], name: str) -> None:
    """Return once every rank that holds shards of ``bounds`` is in ``name`` too.

    Nothing that a step has left in flight is so afterwards.

    Raises: RuntimeError on the ranks that came, if one does not.
    """
    REGISTRY.carried.drain()
    groups = {id(bound.communicator.group): bound.communicator for bound in bounds}
    for communicator in groups.values():
        confirm_writes([b for b in REGISTRY.written if b.communicator is communicator])
        _meet(communicator, name, REGISTRY.join_timeout_s)


def confirm_writes(bounds: Iterable[BoundParameter]) -> None:
    """Return once all ranks have written their shards of ``bounds``, if this one has.

    Loading a state dict is each rank's own affair until values are read: then, values that only
    some ranks have written would be mixed with others' old ones.

    Raises: RuntimeError if another rank does not come.
    """
    written = [bound for bound in bounds if bound in REGISTRY.written]
    for communicator in dict.fromkeys(bound.communicator for bound in written):
        mine = [bound for bound in written if bound.communicator is communicator]
        how = sorted(set().union(*(REGISTRY.written[bound] for bound in mine)))
        name = f"{' and '.join(how)} before a step or state_dict()"
        _meet(communicator, name, REGISTRY.load_timeout_s)
        for bound in mine:
            del REGISTRY.written[bound]


def _meet(communicator: Any, name: str, timeout_s: float) -> None:
    if communicator.world_size > 1:
        store = compat.agreement_store(communicator.group)
        rendezvous(store, name, communicator.rank, communicator.world_size, timeout_s)


def _bound_in(model: nn.Module) -> list[BoundParameter]:
    found = (REGISTRY.lookup(parameter) for parameter in model.parameters())
    return [bound for bound in found if bound is not None]


@contextlib.contextmanager
def full_params(model: nn.Module) -> Iterator[None]:
    """Give ``model`` its whole parameters inside the ``with`` block.  Collective.

    They are ordinary parameters there.  Each rank keeps its own range of whatever was written,
    also if the block ends with an exception.  Nests.  Nothing happens below stage 3.

    Raises: RuntimeError if a rank does not join.
    """
    bounds = [bound for bound in _bound_in(model) if bound.is_sharded]
    join((bound for bound in bounds if not bound.is_open), "full_params()")
    with contextlib.ExitStack() as opened:
        for bound in bounds:
            REGISTRY.open(bound)
            opened.callback(REGISTRY.close, bound)
        yield


def value_for_state_dict(bound: BoundParameter, destination: Any) -> torch.Tensor:
    """Return the whole value on the CPU, for ``Module.state_dict`` to put in ``destination``.

    A parameter with two names is gathered once: as in plain torch, both entries share memory.
    """
    REGISTRY.settle([bound])
    if not _has_met_for(destination):
        join([bound], "state_dict()")
        REGISTRY.last_destination = _meeting(destination)
    value = bound.snapshot_in(destination, REGISTRY.epoch)
    if value is None:
        value = bound.gather().cpu()
        bound.take_snapshot(value, REGISTRY.epoch)
        return value
    return value.detach()


def _has_met_for(destination: Any) -> bool:
    """Whether the ranks have met for this ``state_dict`` call already, at another parameter."""
    if REGISTRY.last_destination is None or destination is None:
        return False
    last, epoch = REGISTRY.last_destination
    return last() is destination and epoch == REGISTRY.epoch


def _meeting(destination: Any) -> tuple[weakref.ref[Any], int] | None:
    try:
        return weakref.ref(destination), REGISTRY.epoch
    except TypeError:  # a plain dict from the user: the ranks meet at every parameter
        return None


def attach_optimizer(
    optimizer: Optimizer,
    owners: Lookup | Mapping[int, BoundParameter] = REGISTRY.lookup,
    keeps_loaded_dtypes: bool = False,
) -> None:
    """Take charge of an optimizer's states: flat shards inside, whole values in state dicts.

    Call it whenever parameters have been bound, and before creating states.  From then on, at
    stages 1 to 3, every tensor of ``optimizer.state[parameter]`` that is not 0-dimensional is
    this rank's ``[info.shard_numel]``; whole ones from before are cut here.  Uses torch's public
    hooks on this one instance, and marks what has been cut, so calling it again is harmless.

    With ``keeps_loaded_dtypes`` a state that is loaded stays in the dtype that it comes in, where
    torch would cast it to its parameter's.

    Raises: ValueError if a state is neither a number nor of its parameter's shape.
    """
    lookup = owners if callable(owners) else _lookup_in(owners)
    attachment = REGISTRY.attached.get(optimizer)
    if attachment is None:
        attachment = REGISTRY.attached[optimizer] = OptimizerAttachment(optimizer)
    attachment.lookup = lookup
    attachment.keeps_loaded_dtypes |= keeps_loaded_dtypes
    attachment.shard_states(optimizer)


def _lookup_in(owners: Mapping[int, BoundParameter]) -> Lookup:
    def lookup(parameter: torch.Tensor) -> BoundParameter | None:
        bound = owners.get(id(parameter))
        return bound if bound is not None and bound.parameter is parameter else None

    return lookup


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Whether the user has registered hooks around this optimizer's ``step``, or around all."""
    if compat.has_global_optimizer_hooks():
        return True
    ours = REGISTRY.attached.get(optimizer)
    before = optimizer._optimizer_step_pre_hooks.values()
    before = [hook for hook in before if ours is None or hook != ours.on_step]
    return bool(before or optimizer._optimizer_step_post_hooks)


class OptimizerAttachment:
    """The hooks on one optimizer, and which parameters' states in it are shards."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.lookup: Lookup = REGISTRY.lookup
        self.sharded: weakref.WeakSet[BoundParameter] = weakref.WeakSet()
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

    def bounds(self, optimizer: Optimizer) -> list[BoundParameter]:
        """The parameters whose states are sharded or are to be, in the optimizer's order."""
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        found = (self.lookup(parameter) for parameter in parameters)
        return [b for b in found if b is not None and b.stage > 0 and not b.retired]

    def shard_states(self, optimizer: Optimizer) -> None:
        """Cut whatever is whole; nothing changes if one state cannot be cut."""
        new = [bound for bound in self.bounds(optimizer) if bound not in self.sharded]
        numbers = _names_of_numbers(optimizer.state)
        cuts: list[tuple[dict[str, Any], dict[str, Any]]] = []
        for bound in new:
            state = optimizer.state.get(bound.parameter, {})
            with ordinary_tensors():
                cuts.append(
                    (state, {key: _cut(key, v, bound, numbers) for key, v in state.items()})
                )
        for state, shards in cuts:
            state.update(shards)
        self.sharded.update(new)

    def whole_state(
        self, bound: BoundParameter, state: Mapping[str, Any], reader: Reader
    ) -> dict[str, Any]:
        """Return the whole tensors of one parameter's state, on its device.  Collective.

        In the dtypes in which the optimizer would have them, whatever they are kept in.
        ``reader`` reads those that are in files.
        """
        with ordinary_tensors():
            whole = state = widen(reader.state(state))
        for key in sorted(state, key=str):  # the same order on all ranks
            value = state[key]
            if isinstance(value, torch.Tensor) and value.dim() > 0:
                _check_is_shard(key, value, bound)
                with ordinary_tensors():  # one that is kept on the host travels from the device
                    shard = value.to(bound.info.device)
                    whole[key] = gather(shard, bound.info, bound.communicator)
        return whole

    def on_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        """Refuse an eager ``optimizer.step()``; compiled steps do not run hooks."""
        bounds = self.bounds(optimizer)
        if not bounds:
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
        join(bounds, "optimizer.state_dict()")
        by_parameter = {id(bound.parameter): bound for bound in bounds}
        seen: set[int] = set()
        reader = Reader()
        number = 0
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                bound = by_parameter.get(id(parameter))
                if bound is not None and id(bound) not in seen and number in state_dict["state"]:
                    whole = self.whole_state(bound, state_dict["state"][number], reader)
                    state_dict["state"][number] = {k: _snapshot(v) for k, v in whole.items()}
                    seen.add(id(bound))
                number += 1
        # In the order of the parameters, as if they had been updated in it.
        state_dict["state"] = dict(sorted(state_dict["state"].items(), key=lambda entry: entry[0]))

    def on_load(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        REGISTRY.settle(self.bounds(optimizer), [optimizer])
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
            REGISTRY.note_write(bound, "optimizer.load_state_dict()")

    def _undo_casts(self, optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
        """Give states that are numbers per element the dtypes that they have been saved in."""
        saved = (number for group in state_dict["param_groups"] for number in group["params"])
        owners = (p for group in optimizer.param_groups for p in group["params"])
        for number, parameter in zip(saved, owners, strict=True):
            state = optimizer.state.get(parameter, {})
            for name, given in state_dict["state"].get(number, {}).items():
                loaded = state.get(name)
                if _is_float(given) and _is_float(loaded) and given.dtype != loaded.dtype:
                    state[name] = given.detach().to(loaded.device, copy=True)

    def detach(self) -> None:
        for handle in self.handles:
            handle.remove()


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


def _cut(key: str, value: Any, bound: BoundParameter, numbers: set[str]) -> Any:
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
    rank = bound.communicator.rank
    return (
        value.shard(info, rank) if isinstance(value, LateState) else take_shard(value, info, rank)
    )


def _check_is_shard(key: str, value: torch.Tensor, bound: BoundParameter) -> None:
    if tuple(value.shape) == (bound.info.shard_numel,):
        return
    raise RuntimeError(
        f"the optimizer state {key!r} of parameter {bound.name!r} should be this rank's shard of "
        f"{bound.info.shard_numel} elements and has shape {tuple(value.shape)}: something other "
        "than the compiled step has replaced it. Use optimizer.load_state_dict to set states."
    )


def _snapshot(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value


def unshard(model: nn.Module, *optimizers: Optimizer | None) -> None:
    """Turn ``model`` and its optimizers back into plain objects.  Collective.

    Parameters, their gradients and the optimizers' states are whole on every rank afterwards,
    without hooks or guards.  A compiled step called later binds the model anew.

    Raises: ValueError if an optimizer that holds shards of these parameters is not given;
    RuntimeError if a rank does not join.
    """
    given = [optimizer for optimizer in optimizers if optimizer is not None]
    bounds = _bound_in(model)
    REGISTRY.settle(bounds, given)
    for optimizer, attachment in REGISTRY.attached.items():
        held = [b for b in bounds if b in attachment.sharded and optimizer.state.get(b.parameter)]
        if held and not any(optimizer is other for other in given):
            raise ValueError(
                f"an optimizer ({type(optimizer).__name__}) holds shards of the state of parameter "
                f"{held[0].name!r} and would be left with them. Give it too: "
                "zerofx.unshard(model, optimizer)."
            )
    join((bound for bound in bounds if bound.stage > 0 or bound.is_unreduced), "unshard()")
    with contextlib.ExitStack() as opened:  # as before if one cannot be read
        for bound in bounds:
            if bound.is_sharded:
                REGISTRY.open(bound)
                opened.callback(REGISTRY.close, bound)
        for optimizer in given:
            _unshard_states(optimizer, bounds)
        opened.pop_all()
    for bound in bounds:
        parameter = bound.parameter
        assert parameter is not None
        if bound.gradient is not None and parameter.grad is bound.stub:
            with ordinary_tensors():
                if bound.is_unreduced:
                    whole = _average(bound.gradient, bound.communicator)
                else:
                    whole = gather(bound.gradient, bound.info, bound.communicator)
            parameter.grad = REGISTRY.mark_averaged(whole.to(parameter.dtype))
        elif parameter.grad is bound.stub:
            parameter.grad = None
        REGISTRY.retire(bound)


def _average(gradient: torch.Tensor, communicator: Any) -> torch.Tensor:
    """The mean over the ranks, in memory of its own.  Collective."""
    average = communicator.wait(communicator.all_reduce_start(gradient, "mean"))
    communicator.settle()
    return average.reshape(gradient.shape).clone(memory_format=torch.preserve_format)


def _as_plain(state: Mapping[str, Any], bound: BoundParameter) -> dict[str, Any]:
    """The state of a parameter that is trained in its own dtype, as after ``load_state_dict``."""
    return {
        name: value.to(bound.info.dtype) if _is_float(value) and value.dim() else value
        for name, value in state.items()
        if name != MASTER
    }


def _unshard_states(optimizer: Optimizer, bounds: list[BoundParameter]) -> None:
    attachment = REGISTRY.attached.get(optimizer)
    if attachment is None:
        return
    wanted = set(bounds)
    reader = Reader()
    for bound in attachment.bounds(optimizer):
        if bound in wanted and bound in attachment.sharded:
            state = optimizer.state.get(bound.parameter)
            if state:
                whole = attachment.whole_state(bound, state, reader)
                state.clear()
                state.update(_as_plain(whole, bound) if attachment.keeps_loaded_dtypes else whole)
            attachment.sharded.discard(bound)
    if not attachment.sharded:
        attachment.detach()
        del REGISTRY.attached[optimizer]
