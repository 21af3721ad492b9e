"""The gradients that cross calls: what this rank keeps of each, and its stub as ``p.grad``."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from torch import nn

from zerofx.errors import StepError
from zerofx.runtime.memory.flat import (
    ordinary_tensors,
    take_shard,
    whole_from_shard,
    without_storage,
)
from zerofx.runtime.parameters.guarded import ShardedGradient, UnreducedGradient
from zerofx.runtime.parameters.parameter import ParameterState


class GradientRegistry:
    """The gradients of all bound parameters, between calls.

    At stages 2 and 3 this rank keeps a shard, and ``parameter.grad`` is a stub without storage.
    Below, ``parameter.grad`` is a whole tensor that is marked as the mean over the ranks.
    """

    def __init__(self, lock: threading.RLock) -> None:
        self._lock: Any = lock
        self._stubs: dict[int, ParameterState] = {}
        self._averaged: list[ParameterState] = []  # their p.grad is a whole mean over the ranks
        self._is_plain = False

    def lookup(self, stub: torch.Tensor) -> ParameterState | None:
        """Return the parameter whose gradient this stub stands for; None if it is no stub."""
        found = self._stubs.get(id(stub))
        return found if found is not None and found.stub is stub else None

    def forget(self, bound: ParameterState) -> None:
        self._stubs.pop(id(bound.stub), None)

    def make_plain(self) -> None:
        """Make stubs ordinary tensors for the duration of a compiled call."""
        self._is_plain = True
        for bound, parameter in self._with_stub():
            allow_accumulation(bound)
            self._drop_unless_used(bound, parameter)
            if bound.stub is not None:
                bound.stub.__class__ = torch.Tensor
        for bound in self._averaged:
            allow_accumulation(bound)
        self._averaged = [bound for bound in self._averaged if _has_average(bound)]

    def guard_again(self) -> None:
        """Guard stubs, and let go of the gradients that nothing refers to any more."""
        self._is_plain = False
        for bound, parameter in self._with_stub():
            self._drop_unless_used(bound, parameter)
            if bound.gradient is not None:
                _watch_accumulation(bound)
            if bound.stub is not None:
                _guard_stub(bound)
        self._averaged = [b for b in dict.fromkeys(self._averaged) if _has_average(b)]
        for bound in self._averaged:
            _watch_accumulation(bound)

    def store(
        self,
        bound: ParameterState,
        gradient: torch.Tensor,
        *,
        unreduced: bool = False,
        is_sum: bool = False,
    ) -> torch.Tensor:
        """Keep a gradient's shard, and return what to store as ``parameter.grad``.

        With ``unreduced`` it is whole, with the parameter's strides, and this rank's own.  If it
        ``is_sum``, it is still to be averaged over the outer axis of a mesh.

        Shapes: ``[info.shard_numel]`` -> ``info.shape``, a tensor without storage.  To make it
        takes the memory for a moment, so it is the same object as long as nobody else holds it.
        """
        with self._lock, ordinary_tensors():
            if bound.stub is None:
                info = bound.info
                bound.stub = without_storage(info.shape, info.stride, info.dtype, info.device)
                self._stubs[id(bound.stub)] = bound
            bound.gradient = gradient.detach()
            bound.is_unreduced, bound.is_sum = unreduced, is_sum
            if not self._is_plain:
                _guard_stub(bound)
            return bound.stub

    def clear(self, bound: ParameterState) -> None:
        """Let go of a gradient that the call under way replaces and does not read.

        Dynamo leaves ``p.grad = None`` to the end of the function, and both would be in memory.
        """
        if bound.parameter is not None:
            bound.parameter.grad = None
        self._let_go(bound)

    def refuse_stub(self, value: Any) -> None:
        """Raise StepError for a gradient that a program takes for a tensor of the user's."""
        owner = self.lookup(value) if isinstance(value, torch.Tensor) else None
        if owner is not None:
            raise StepError(
                f"the step is given p.grad of parameter {owner.name!r} as an earlier call has left "
                f"it, and {owner.what_is_kept} between steps. Keep a copy instead: p.grad.clone() "
                "in the step that computes it."
            )

    def shard(self, bound: ParameterState, gradient: torch.Tensor) -> torch.Tensor:
        """This rank's flat range of ``gradient``: what was stored, or a part of a whole tensor.

        Raises: RuntimeError for a stub whose gradient has been released, another's stub, or a
        gradient that was left unreduced.
        """
        if gradient is bound.stub and bound.gradient is not None:
            if bound.is_unreduced or bound.is_sum:
                _refuse_unreduced(bound)
            return bound.gradient
        self.check_averaged(bound, gradient)
        with ordinary_tensors():
            return take_shard(gradient, bound.info, bound.info.rank)

    def sum_inside(
        self, bound: ParameterState, gradient: torch.Tensor, is_changed: bool
    ) -> torch.Tensor:
        """Return a shard to be averaged over the outer axis to ``gradient``: stored, or made of it.

        An average is one if it is multiplied by the number of ranks that the axis lacks.

        Raises: RuntimeError as ``unreduced``.
        """
        info = bound.info
        if gradient is not bound.stub or bound.gradient is None:
            self.check_averaged(bound, gradient)
            if is_changed:
                _refuse_changed(bound, "stage 1 on the outer axis of a mesh")
            with ordinary_tensors():
                cut = take_shard(gradient, info.kept, info.kept.rank)
                return cut.mul_(info.kept.world_size)
        if bound.is_unreduced:
            _refuse_unreduced(bound)
        if not bound.is_sum:
            with ordinary_tensors():
                total = bound.gradient.new_zeros(info.kept.shard_numel)
                own = total.narrow(0, info.position_in_kept, info.shard_numel)
                own.copy_(bound.gradient).mul_(info.world_size)
            bound.gradient, bound.is_sum = total, True
        return bound.gradient

    def unreduced(
        self, bound: ParameterState, gradient: torch.Tensor, is_changed: bool
    ) -> torch.Tensor:
        """Return a whole tensor whose mean over the ranks is ``gradient``: stored, or made of it.

        An average is one, and so is its shard times the number of shards among zeros.

        Raises: RuntimeError as ``check_averaged``; and for a plain tensor ``is_changed``, which
        would then hold what is no average, for all to read.
        """
        if gradient is not bound.stub or bound.gradient is None:
            self.check_averaged(bound, gradient)
            if is_changed:
                _refuse_changed(bound, "accumulate='local'")
            return gradient
        if not bound.is_unreduced:
            info = bound.info.kept if bound.is_sum else bound.info
            with ordinary_tensors():
                shares = bound.gradient if bound.is_sum else bound.gradient * info.world_size
                whole = whole_from_shard(shares, info, info.rank)
            bound.gradient, bound.is_unreduced, bound.is_sum = whole, True, False
        return bound.gradient

    def mark_averaged(
        self, gradient: torch.Tensor, bound: ParameterState | None = None
    ) -> torch.Tensor:
        """Note that a whole gradient, about to be some ``p.grad``, is the mean over the ranks.

        It is no longer once an eager ``backward()`` has added to it: of ``bound``, that is seen.
        """
        gradient._zerofx_averaged = True
        if bound is not None and bound.communicator.world_size > 1:
            self._averaged.append(bound)
        return gradient

    def check_averaged(self, bound: ParameterState, gradient: torch.Tensor) -> None:
        """Raise RuntimeError for what is not the whole mean over the ranks.

        That is a whole gradient that one rank computed for itself, or a stub.
        """
        owner = self.lookup(gradient)
        if owner is not None:
            if owner is bound and bound.gradient is not None:
                _refuse_unreduced(bound)
            raise RuntimeError(
                f"the gradient of parameter {bound.name!r} stands for one of {owner.name!r} "
                "that has been released or belongs to that parameter: it was taken off p.grad and "
                "put back. Leave p.grad to backward() and zero_grad()."
            )
        if bound.communicator.world_size == 1 or hasattr(gradient, "_zerofx_averaged"):
            return
        raise RuntimeError(
            f"the gradient of parameter {bound.name!r} was not computed by a zero-compiled "
            "function: it is this rank's own, and the update needs the mean over all ranks. Call "
            "backward() in a function compiled with torch.compile(..., backend='zero'), or set "
            "p.grad = None before the step. Where you replace an average (p.grad = p.grad / n), "
            "change it in place instead (`p.grad.copy_(new)`), which keeps it the average."
        )

    def _drop_unless_used(self, bound: ParameterState, parameter: nn.Parameter) -> None:
        if bound.gradient is not None and parameter.grad is not bound.stub:
            self._let_go(bound)

    def _let_go(self, bound: ParameterState) -> None:
        """Let go of a gradient.  If the user holds its stub, the next gradient has another."""
        bound.gradient = None
        is_there = bound.stub is not None
        if is_there and sys.getrefcount(bound.stub) > sys.getrefcount(_HELD_ONCE.stub):
            _guard_stub(bound)
            self.forget(bound)
            bound.stub = None

    def _with_stub(self) -> list[tuple[ParameterState, nn.Parameter]]:
        pairs = [(bound, bound.reference()) for bound in list(self._stubs.values())]
        return [(bound, parameter) for bound, parameter in pairs if parameter is not None]


_HELD_ONCE = SimpleNamespace(stub=object())


def _watch_accumulation(bound: ParameterState) -> None:
    """See an eager ``backward()``, which adds to ``parameter.grad`` in C++, past every guard.

    It is an error where that is a stub, and takes the mark of an average off what it adds to.
    """
    parameter = bound.parameter
    if parameter is None or not parameter.requires_grad or bound.accumulation_hook is not None:
        return

    def before_adding(_gradient: torch.Tensor) -> None:
        gradient = bound.parameter.grad if bound.parameter is not None else None
        if gradient is not None and gradient is bound.stub:
            raise RuntimeError(
                f"an eager backward() would add to the gradient of parameter {bound.name!r}, "
                f"and {bound.what_is_kept} between steps. "
                "Compile the function that calls backward() with "
                "torch.compile(..., backend='zero'), or call optimizer.zero_grad() first."
            )
        if gradient is not None and hasattr(gradient, "_zerofx_averaged"):
            del gradient._zerofx_averaged

    bound.accumulation_hook = parameter.register_hook(before_adding)


def allow_accumulation(bound: ParameterState) -> None:
    """Watch an eager ``backward()`` no longer."""
    parameter = bound.parameter
    if bound.accumulation_hook is None or parameter is None:
        return
    bound.accumulation_hook.remove()
    bound.accumulation_hook = None
    if not parameter._backward_hooks:
        parameter._backward_hooks = None  # Dynamo takes a hooked tensor for another one


def _guard_stub(bound: ParameterState) -> None:
    assert bound.stub is not None
    bound.stub.__class__ = UnreducedGradient if bound.is_unreduced else ShardedGradient


def _refuse_unreduced(bound: ParameterState) -> NoReturn:
    raise RuntimeError(
        f"the gradient of parameter {bound.name!r} was left by a function with "
        f"accumulate='local': {bound.what_is_kept} and this function, without that option, takes "
        "it for the average. Give options={'accumulate': 'local'} to every function that backward, "
        "clipping and the update are in, or call optimizer.zero_grad() in between."
    )


def _refuse_changed(bound: ParameterState, option: str) -> NoReturn:
    raise RuntimeError(
        f"the gradient of parameter {bound.name!r} was left by a function without {option}, as a "
        "whole average, and this function has that option. Give it to every function that "
        "backward, clipping and the update are in, or call optimizer.zero_grad() in between."
    )


def _has_average(bound: ParameterState) -> bool:
    parameter = bound.parameter
    return parameter is not None and hasattr(parameter.grad, "_zerofx_averaged")
