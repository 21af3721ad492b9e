"""Whole values of what is sharded: ``full_params`` and ``unshard``.

Both are collective, and ranks meet through the store before they communicate: a rank that is
missing is an error after ``REGISTRY.barrier.join_timeout_s``, not a hang.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from zerofx.runtime.memory.flat import gather, ordinary_tensors
from zerofx.runtime.optimizer.state_dict import unshard_states
from zerofx.runtime.parameters.parameter import ParameterState, State
from zerofx.runtime.parameters.registry import REGISTRY
from zerofx.wrappers import unwrapped


def _bound_in(model: nn.Module) -> list[ParameterState]:
    found = (REGISTRY.lookup(parameter) for parameter in model.parameters())
    return [bound for bound in found if bound is not None]


@contextlib.contextmanager
def full_params(model: nn.Module) -> Iterator[None]:
    """Give ``model`` its whole parameters inside the ``with`` block.  Collective.

    They are ordinary parameters there.  Each rank keeps its own range of whatever was written,
    also if the block ends with an exception.  Nests.  Nothing happens below stage 3.

    Raises: RuntimeError if a rank does not join.
    """
    REGISTRY.refuse_in_call("full_params()")
    # Those that are whole already are another such block's.
    bounds = [bound for bound in _bound_in(model) if bound.state is State.SHARDED]
    REGISTRY.barrier.wait(bounds, "full_params()")
    with contextlib.ExitStack() as opened:
        REGISTRY.open(bounds, opened)
        yield


def unshard(model: nn.Module, *optimizers: Optimizer | None) -> None:
    """Turn ``model`` and its optimizers back into plain objects.  Collective.

    Parameters, their gradients and the optimizers' states are whole on every rank afterwards,
    without hooks or guards.  A compiled step called later binds the model anew.

    Raises: ValueError if an optimizer that holds shards of these parameters is not given;
    TypeError for an unknown wrapper of one; RuntimeError if a rank does not join.
    """
    REGISTRY.refuse_in_call("unshard()")
    given = [unwrapped(optimizer) for optimizer in optimizers if optimizer is not None]
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
    in_parts = [bound for bound in bounds if bound.stage > 0 or bound.is_unreduced]
    REGISTRY.barrier.wait(in_parts, "unshard()")
    with contextlib.ExitStack() as opened:  # as before if one cannot be read
        REGISTRY.open([bound for bound in bounds if bound.state is State.SHARDED], opened)
        for optimizer in given:
            unshard_states(optimizer, bounds)
        opened.pop_all()
    for bound in bounds:
        parameter = bound.parameter
        assert parameter is not None
        if bound.gradient is not None and parameter.grad is bound.stub:
            with ordinary_tensors():
                if bound.is_unreduced:
                    whole = _average(bound.gradient, bound.communicator)
                elif bound.is_sum:
                    outer = bound.communicator.along(bound.communicator.mesh.outer)
                    average = _average(bound.gradient, outer)
                    whole = gather(average, bound.info.kept, bound.communicator.keepers)
                else:
                    whole = gather(bound.gradient, bound.info, bound.communicator.shards)
            parameter.grad = REGISTRY.gradients.mark_averaged(whole.to(parameter.dtype))
        elif parameter.grad is bound.stub:
            parameter.grad = None
        REGISTRY.retire(bound)


def _average(gradient: torch.Tensor, communicator: Any) -> torch.Tensor:
    """The mean over the ranks, in memory of its own.  Collective."""
    average = communicator.wait(communicator.all_reduce_start(gradient, "mean"))
    return average.reshape(gradient.shape).clone(memory_format=torch.preserve_format)
