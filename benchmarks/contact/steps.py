"""The models that sections train, and how: with zerofx or eagerly, by the same step."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import Sizes, loss_of
from torch import nn
from torch.nn.utils import clip_grad_norm_

from contact.place import Place
from zerofx.backend import zero

ROWS = 4
"""Of one rank's batch."""


def sizes_of(place: Place) -> Sizes:
    small = place.pick((4096, 512, 4), (64, 64, 1))
    return Sizes("gpt", *small)


def gpt(place: Place) -> nn.Module:
    """A GPT with the same values on every rank."""
    return place.built(sizes_of(place))


def batches(place: Place, number: int, *, all_ranks: bool = False) -> list[torch.Tensor]:
    """Batches of tokens: this rank's rows of each, or those of all ranks."""
    ranks, rank = 1, 0
    if dist.is_initialized():
        ranks, rank = dist.get_world_size(), dist.get_rank()
    generator = torch.Generator().manual_seed(0)
    shape = (ROWS * ranks, place.pick(256, 16) + 1)
    every = [
        torch.randint(0, sizes_of(place).vocabulary, shape, generator=generator)
        for _ in range(number)
    ]
    own = every if all_ranks else [batch.chunk(ranks)[rank] for batch in every]
    return [batch.to(place.device) for batch in own]


class Tower(nn.Module):
    """Layers without attention: a GPU computes all of it in the same order every time."""

    def __init__(self, width: int, layers: int):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + F.gelu(layer(norm(x)))
        return x


def tower(place: Place) -> nn.Module:
    torch.manual_seed(0)
    return Tower(*place.pick((1024, 6), (64, 3))).to(place.device)


def vectors(place: Place, number: int) -> list[torch.Tensor]:
    """Batches for a tower, each rank's own."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    generator = torch.Generator().manual_seed(rank)
    shape = place.pick((512, 1024), (32, 64))
    return [torch.randn(shape, generator=generator).to(place.device) for _ in range(number)]


def squares_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x) - x.roll(1, dims=-1)).square().mean()


def step_of(*, clip: float | None = None, autocast: str | None = None, loss_of=loss_of):
    """An ordinary step; with ``autocast`` to bfloat16 on that type of device."""

    def step(model, optimizer, batch):
        context = contextlib.nullcontext()
        if autocast is not None:
            context = torch.autocast(autocast, torch.bfloat16)
        with context:
            loss = loss_of(model, batch)
        loss.backward()
        if clip is not None:
            clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def with_zerofx(step, options: Mapping[str, Any]):
    return torch.compile(step, backend="zero", options=dict(options))


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    given: Sequence[torch.Tensor],
    options: Mapping[str, Any] | None = None,
    **how: Any,
) -> list[torch.Tensor]:
    """Train on batches, with zerofx if there are options for it, else eagerly; return losses."""
    step = step_of(**how)
    if options is not None:
        step = with_zerofx(step, options)
    return [step(model, optimizer, batch).detach() for batch in given]


def program():
    """The program that zerofx has compiled last."""
    return max(zero.functions, key=lambda function: function.number).programs[-1]


def values_of(model: nn.Module) -> torch.Tensor:
    """All parameters as one flat float64 tensor on the host; collective."""
    state = model.state_dict()
    return torch.cat([state[name].double().cpu().flatten() for name in sorted(state)])


def moved(model: nn.Module, expected: nn.Module, start: nn.Module) -> float:
    """How far parameters are from where they should be, in units of how far these have moved."""
    own, there, before = map(values_of, (model, expected, start))
    return ((own - there).norm() / (there - before).norm()).item()


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Copies of all that has been trained, on the host; collective."""
    found = {name: value.cpu().clone() for name, value in model.state_dict().items()}
    for index, states in optimizer.state_dict()["state"].items():
        for name, value in states.items():
            found[f"{index}.{name}"] = torch.as_tensor(value).cpu().clone()
    return found


def differing(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> list[str]:
    """The names of what is not equal bit for bit."""
    if one.keys() != other.keys():
        return sorted(one.keys() ^ other.keys())
    return [name for name, value in one.items() if not torch.equal(value, other[name])]
