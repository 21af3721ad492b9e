"""The systems that the benchmarks compare: each turns a model into a training step.

All train with AdamW at one learning rate and average gradients over the ranks.  A peer gets
torch's fused AdamW and what its documentation recommends for speed; zerofx gets its defaults,
where the name says nothing else.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec

import torch
import torch.distributed as dist
from models import loss_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import zerofx  # noqa: F401  # memory counts from after the imports

Step = Callable[[torch.Tensor], torch.Tensor]
Build = Callable[[nn.Module], Step]
LR = 1e-4


def with_zerofx(**options: object) -> Build:
    def build(model: nn.Module) -> Step:
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR)

        def step(model, optimizer, tokens):
            loss = loss_of(model, tokens)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        compiled = torch.compile(step, backend="zero", options=options)
        return lambda tokens: compiled(model, optimizer, tokens)

    return build


def conventional(model: nn.Module, update: Callable[[], object], forget: Callable) -> Step:
    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model, tokens)
        loss.backward()
        update()
        forget()
        return loss.detach()

    return step


def with_one_process(model: nn.Module) -> Step:
    """``torch.compile`` alone, for a world of one."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    return conventional(torch.compile(model), optimizer.step, optimizer.zero_grad)


def with_ddp(*, compiled: bool) -> Build:
    def build(model: nn.Module) -> Step:
        wrapped: nn.Module = DistributedDataParallel(model)
        if compiled:
            wrapped = torch.compile(wrapped)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
        return conventional(wrapped, optimizer.step, optimizer.zero_grad)

    return build


def with_ddp_and_compiled_update(model: nn.Module) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    wrapped = torch.compile(DistributedDataParallel(model))
    return conventional(wrapped, torch.compile(optimizer.step), optimizer.zero_grad)


def with_zero_redundancy(model: nn.Module) -> Step:
    wrapped = torch.compile(DistributedDataParallel(model))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=LR, fused=True)
    return conventional(wrapped, optimizer.step, optimizer.zero_grad)


def with_fsdp2(*, compiled: bool, offloaded: bool = False) -> Build:
    def build(model: nn.Module) -> Step:
        pins = torch.cuda.is_available()
        policy = CPUOffloadPolicy(pin_memory=pins) if offloaded else OffloadPolicy()
        for block in model.blocks:
            if compiled:
                block.compile()
            fully_shard(block, offload_policy=policy)
        fully_shard(model, offload_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
        return conventional(model, optimizer.step, optimizer.zero_grad)

    return build


# SimpleFSDP's has not been run: it was not installed where this was written.


def with_simple_fsdp(model: nn.Module) -> Step:
    from torchtitan.experiments.simple_fsdp.simple_fsdp import data_parallel

    mesh = init_device_mesh(next(model.parameters()).device.type, (dist.get_world_size(),))
    wrapped = torch.compile(data_parallel(model, mesh, mode="fully_shard"))
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=LR, fused=True)
    return conventional(wrapped, optimizer.step, optimizer.zero_grad)


def with_deepspeed(*, offloaded: bool = False) -> Build:
    def build(model: nn.Module) -> Step:
        import deepspeed
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        os.environ.setdefault("LOCAL_RANK", str(dist.get_rank()))  # all ranks are on this machine
        zero: dict[str, object] = {"stage": 3}
        if offloaded:
            zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
            optimizer: object = DeepSpeedCPUAdam(model.parameters(), lr=LR)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
        config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

        def step(tokens: torch.Tensor) -> torch.Tensor:
            loss = loss_of(engine, tokens)
            engine.backward(loss)
            engine.step()
            return loss.detach()

        return step

    return build


ZEROFX: dict[str, Build] = {
    **{f"zerofx {stage}": with_zerofx(stage=stage) for stage in (3, 2, 1, 0)},
    **{
        f"zerofx {stage} {lowering}": with_zerofx(stage=stage, lowering=lowering)
        for stage in (3, 2, 1, 0)
        for lowering in ("eager", "inductor")
    },
    "zerofx 3 at once": with_zerofx(stage=3, start="at_once"),
    "zerofx 3 global": with_zerofx(stage=3, loss="global"),
    "zerofx 3 gathered once": with_zerofx(stage=3, memory_budget=2**40),
    "zerofx 3 offload": with_zerofx(stage=3, offload="optimizer"),
    "zerofx 2 offload": with_zerofx(stage=2, offload="optimizer"),
}
PEERS: dict[str, Build] = {
    "FSDP2 + compile": with_fsdp2(compiled=True),
    "FSDP2": with_fsdp2(compiled=False),
    "DDP + compile": with_ddp(compiled=True),
    "DDP": with_ddp(compiled=False),
    "DDP + compile + ZeroRedundancyOptimizer": with_zero_redundancy,
    "FSDP2 + compile + CPUOffloadPolicy": with_fsdp2(compiled=True, offloaded=True),
}
if find_spec("deepspeed"):
    PEERS["DeepSpeed ZeRO-3"] = with_deepspeed()
    PEERS["DeepSpeed ZeRO-3 + offload"] = with_deepspeed(offloaded=True)
if find_spec("torchtitan"):
    PEERS["SimpleFSDP"] = with_simple_fsdp

COMPILED_UPDATE = "DDP + compile + compiled AdamW"
SYSTEMS = {**ZEROFX, **PEERS, COMPILED_UPDATE: with_ddp_and_compiled_update}
ONE_PROCESS = "torch.compile"
ALONE = {ONE_PROCESS: with_one_process}
"""Systems for a world of one only."""
DEFAULT = ["zerofx 3", *(name for name in PEERS if "ffload" not in name)]


def reference_of(names: list[str]) -> str:
    """The system that ratios are to: the first that is not zerofx."""
    return next((name for name in names if name not in ZEROFX), names[0])


def losses_differ(losses: dict[str, float]) -> bool:
    """Whether a system ended more than 1e-4 from the first, relative to it; NaN differs."""
    first = next(iter(losses.values()))
    return not all(abs(loss - first) <= 1e-4 * abs(first) for loss in losses.values())
