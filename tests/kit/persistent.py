"""The bytes that a rank holds between steps."""

from collections.abc import Iterable

import torch

from zerofx.runtime.parameters.guarded import GuardedState
from zerofx.runtime.parameters.parameter import State
from zerofx.runtime.parameters.registry import REGISTRY


def persistent_bytes(optimizers: Iterable[torch.optim.Optimizer] = ()) -> dict[str, int]:
    """Bytes this rank holds between steps, padding included, by kind.

    States that are in files do not count, nor what host memory caches of them.
    """
    parameters = gradients = 0
    memories = set()
    for bound in REGISTRY:
        parameter = bound.parameter
        if parameter is None:
            continue
        shard = bound.shard if bound.state is State.SHARDED else None
        parameters += parameter.nbytes if shard is None else shard.nbytes
        if bound.memory is not None:
            memories.add(bound.memory)
        if bound.gradient is not None and parameter.grad is bound.stub:
            gradients += bound.gradient.nbytes
        elif parameter.grad is not None and parameter.grad is not bound.stub:
            gradients += parameter.grad.nbytes
    parameters += sum(map(padding_bytes, memories))
    states = sum(
        value.nbytes
        for optimizer in optimizers
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and not isinstance(value, GuardedState)
    )
    return {
        "parameters": parameters,
        "gradients": gradients,
        "optimizer_states": states,
    }


def padding_bytes(memory) -> int:
    """Bytes of a bucket's memory that belong to no parameter; 0 before they have moved in."""
    used = sum(info.numel for info in memory.infos) * memory.flat.itemsize
    return max(memory.flat.nbytes - used, 0)
