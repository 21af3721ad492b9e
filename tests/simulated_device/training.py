"""Forms of steps trained on the simulated device, in a process that has it."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch.nn.attention import SDPBackend, sdpa_kernel

import tests.simulated_device as simulated
from tests.kit.step_forms.form import FORMS
from tests.kit.step_forms.training import (
    assert_same,
    change_lr,
    eager,
    rank_and_world_size,
    state_of,
    zero,
)

STEPS = 6


def give_group_a_device() -> None:
    """Have this rank's group, which is gloo's, serve the simulated device too."""
    simulated.use()
    if not dist.is_initialized() or "sim" in dist.get_backend_config():
        return
    rank, world_size = dist.get_rank(), dist.get_world_size()
    store = dist.PrefixStore("with a device", dist.distributed_c10d._get_default_store())
    dist.destroy_process_group()
    dist.init_process_group(
        "cpu:gloo,sim:simulated", store=store, rank=rank, world_size=world_size
    )


def trained_on(
    device: str, name: str, stage: int | None, steps: int = STEPS, options: dict | None = None
) -> tuple[list[list[torch.Tensor]], dict[str, torch.Tensor]]:
    """Train a form on a device, uncompiled without a stage: its results and its final state."""
    torch._dynamo.reset()
    this = FORMS[name]
    rank, world_size = rank_and_world_size()
    wrap = eager if stage is None else zero(stage, **{"validate": False, **(options or {})})
    with sdpa_kernel(SDPBackend.MATH), torch._dynamo.config.patch(allow_rnn=True):
        torch.manual_seed(rank)
        with torch.device(device):
            training = this.build(wrap)
        results = []
        for number in range(steps):
            if not training.scheduled:
                change_lr(training, number)
            ranks = 1 if this.same_batch else world_size
            batch = this.batch(number, this.rows[number % len(this.rows)] * ranks)
            if not this.same_batch:
                batch = [tensor.chunk(world_size)[rank] for tensor in batch]
            torch.manual_seed(number)
            leaves = pytree.tree_leaves(training.step(*(one.to(device) for one in batch)))
            results.append([torch.as_tensor(leaf).detach().cpu().clone() for leaf in leaves])
        return results, {name: value.cpu() for name, value in state_of(training).items()}


@functools.cache
def expected(name: str, stage: int, steps: int = STEPS) -> tuple:
    """What the CPU computes: uncompiled where that is the same, as one rank and without norms."""
    alone = rank_and_world_size()[1] == 1
    is_plain = alone and (stage == 0 or not FORMS[name].sums_over_shards)
    if is_plain and not FORMS[name].functional_rounding:
        return trained_on("cpu", name, None, steps)
    return trained_on("cpu", name, stage, steps)


def check(name: str, stage: int, policy: str, seed: int = 0, options: dict | None = None) -> Any:
    """Train on the device under a schedule; AssertionError unless all is what the CPU computes."""
    give_group_a_device()
    results, state = expected(name, stage)
    with simulated.schedule(policy, seed):
        ours, our_state = trained_on("sim", name, stage, options=options)
    for number, (mine, theirs) in enumerate(zip(ours, results, strict=True)):
        for position, (one, other) in enumerate(zip(mine, theirs, strict=True)):
            assert_same(one, other, f"result {position} of step {number}")
    assert our_state.keys() == state.keys()
    for key in state:
        assert_same(our_state[key], state[key], key)
