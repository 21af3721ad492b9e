"""A small model trained with and without offload, and all of it that must be the same.

A function and what it is given travel to ranks by pickle: they are at the top level.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import os
from collections import Counter
from functools import partial
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad_norm_

import tests.conftest  # noqa: F401  # the ranks need the backend's name too
import zerofx
from tests.kit.models import features
from zerofx import backend
from zerofx.codegen.trace.trace import Update
from zerofx.runtime.optimizer.update import OptimizerRunner
from zerofx.runtime.parameters.registry import REGISTRY

OFFLOAD = {"offload": "optimizer"}

CLIPPED = 0.05  # under the norm of every step's gradients

SLOW = "latency_s=2.5e-4 bytes_per_s=1e9 flops_per_s=1e7 memory_bytes_per_s=1e7"
"""Compute so slow that the copies of a small step hide behind it."""


@contextlib.contextmanager
def moving_small_values():
    """Let values of any size be worth moving, as they are in large models."""
    with (
        mock.patch("zerofx.passes.offload.offload_activations.SMALLEST_BYTES", 1),
        mock.patch.dict(os.environ, {"ZEROFX_HARDWARE": SLOW}),
    ):
        yield


class Tower(nn.Module):
    """Layers, one of them used twice, and one frozen.  Odd sizes leave padding on two ranks."""

    def __init__(self, width: int = 11):
        super().__init__()
        self.body, self.twice = nn.Linear(6, width), nn.Linear(width, width)
        self.frozen, self.head = nn.Linear(width, width), nn.Linear(width, 3)
        for parameter in self.frozen.parameters():
            parameter.requires_grad_(False)

    def forward(self, x):
        x = self.twice(torch.tanh(self.body(x)))
        return self.head(self.frozen(torch.tanh(self.twice(x))))


def running(call):
    """Return a stand-in for ``Update.ready``, with which updates run as ``call(run)``."""
    original = Update.ready

    def ready(update, *arguments):
        return partial(call, original(update, *arguments))

    return ready


def built(dtype=torch.float32, make=torch.optim.AdamW):
    torch.manual_seed(0)
    model = Tower().to(dtype)
    groups = [
        {"params": [*model.body.parameters(), *model.twice.parameters()]},
        {"params": [*model.frozen.parameters(), *model.head.parameters()], "lr": 3e-3},
    ]
    return model, make(groups, lr=1e-2)


def plain(model, optimizer, x, y):
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def clipped(model, optimizer, x, y):
    loss = F.mse_loss(model(x), y)
    loss.backward()
    clip_grad_norm_(model.parameters(), CLIPPED)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def accumulated(model, optimizer, x, y):
    losses = []
    for part in zip(x.chunk(2), y.chunk(2), strict=True):
        losses.append(F.mse_loss(model(part[0]), part[1]))
        losses[-1].backward()
    optimizer.step()
    optimizer.zero_grad()
    return torch.stack(losses).sum()


def gradients_stay(model, optimizer, x, y):
    """The gradient outlives the step, and is added to in the next."""
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


def read_after(model, optimizer, x, y):
    loss = plain(model, optimizer, x, y)
    return loss + model.twice.weight.detach().sum()


def stepped_twice(model, optimizer, x, y):
    """The optimizer's second step begins while the first one's updates are under way."""
    plain(model, optimizer, x, y)
    return plain(model, optimizer, x, y)


def scaled(model, optimizer, x, y):
    scaler = SCALERS[0]
    loss = F.mse_loss(model(x), y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), CLIPPED)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return loss


SCALERS: list = []

FORMS = (plain, clipped, accumulated, gradients_stay, read_after, scaled)


def zero(step=plain, stage=3, **options):
    return torch.compile(
        step, backend="zero", options={"stage": stage, "lowering": "eager", **options}
    )


def run(compiled, pair, numbers):
    dtype = next(pair[0].parameters()).dtype
    losses = []
    for number in numbers:
        batch = [part.to(dtype) for part in features(number, 8)]
        if torch.distributed.is_initialized():
            rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
            batch = [part.chunk(ranks)[rank] for part in batch]
        losses.append(compiled(*pair, *batch).double().item())
    return losses


def trained(step, options, dtype=torch.float32, steps=4):
    torch._dynamo.reset()
    # Its scale overflows once: the third step is skipped.
    SCALERS[:] = [torch.amp.GradScaler("cpu", init_scale=2.0**126, growth_interval=2)]
    pair = built(dtype)
    losses = run(zero(step, **options), pair, range(steps))
    held = sum(map(REGISTRY.host.holds, tensors_of(pair[1])))
    return losses, pair[0].state_dict(), pair[1].state_dict(), (held, len(tensors_of(pair[1])))


def tensors_of(optimizer) -> list[torch.Tensor]:
    """The optimizer's states that are there per element."""
    values = [value for state in optimizer.state.values() for value in state.values()]
    return [value for value in values if isinstance(value, torch.Tensor) and value.dim()]


def assert_same(one, other):
    torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


PRECISIONS = {
    "masters": {"master_weights": True},
    "rounded": {"stochastic_rounding": True},
    "bfloat16 moments": {"moment_dtype": "bfloat16"},
    "masters, int8 moments": {"master_weights": True, "moment_dtype": "int8"},
}


def train_with(options_of_ranks):
    torch._dynamo.reset()
    return run(zero(**options_of_ranks[torch.distributed.get_rank()]), built(), range(1))


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(6, 4000), nn.Linear(4000, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x)))


def with_kernels(stage, **options):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Wide()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    joined: Counter = Counter()
    original = OptimizerRunner._joined

    def counted(self, members, *rest):
        found = original(self, members, *rest)
        joined[len(members), found is not None] += 1
        return found

    with mock.patch.object(OptimizerRunner, "_joined", counted):
        losses = run(
            zero(clipped, stage, lowering="inductor", **options), (model, optimizer), range(3)
        )
    return losses, model.state_dict(), optimizer.state_dict(), joined


def program_of(compiled):
    """The last program of what was compiled last from the same code."""
    code = compiled._torchdynamo_orig_callable.__code__
    functions = [function for function in backend.zero.functions if function.code is code]
    return max(functions, key=lambda function: function.number).programs[-1]


def save_and_resume(stage, first, then):
    """Train, save, load into other objects with other options, and train on."""
    torch._dynamo.reset()
    gc.collect()  # functions that are gone leave their files
    one, other = built(), built()
    run(zero(stage=stage, **first), one, range(3))
    saved = [copy.deepcopy(part.state_dict()) for part in one]
    compiled = zero(stage=stage, **then)
    torch._dynamo.reset()
    for part, state in zip(other, saved, strict=True):
        part.load_state_dict(state)
    losses = run(compiled, other, range(3, 6))
    return losses, other[0].state_dict(), other[1].state_dict(), saved


def write_between(stage, options):
    """Write to parameters and states between steps, in every way that is allowed."""
    torch._dynamo.reset()
    gc.collect()
    pair, compiled = built(), zero(stage=stage, **options)
    losses = run(compiled, pair, range(2))
    with zerofx.full_params(pair[0]), torch.no_grad():
        pair[0].head.weight.fill_(0.25)
    losses += run(compiled, pair, range(2, 3))
    state = {name: value + 0.125 for name, value in pair[0].state_dict().items()}
    pair[0].load_state_dict(state)
    losses += run(compiled, pair, range(3, 5))
    saved = pair[1].state_dict()
    for entry in saved["state"].values():
        entry["exp_avg"].mul_(0.5)
    pair[1].load_state_dict(saved)
    losses += run(compiled, pair, range(5, 7))
    zerofx.unshard(*pair)
    losses += run(compiled, pair, range(7, 9))
    return losses, pair[0].state_dict(), pair[1].state_dict()
