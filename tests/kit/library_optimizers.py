"""Optimizers of packages on PyPI, with options as their own READMEs have them.

They need what ``pip install 'zerofx[libraries]'`` brings.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.kit.library_models import (
    declare_operators,
    losses_compiled,
    losses_in_one_process,
)

STEPS = 6


@dataclass(frozen=True)
class Published:
    """An optimizer: ``build`` makes it, and ``refused`` says why its sharded update is, if it is.

    ``runs_whole``: at stage 0 it is not refused.  ``tolerance``: how far losses may be from plain
    torch's, relatively.
    """

    build: Callable[[nn.Module], torch.optim.Optimizer]
    refused: str | None
    runs_whole: bool
    tolerance: float


OPTIMIZERS: dict[str, Published] = {}
"""By ``package: class``."""


def _add(
    package: str,
    name: str,
    module: str | None = None,
    refused: str | None = None,
    runs_whole: bool = False,
    tolerance: float = 1e-6,
    **options: Any,
) -> None:
    def build(model: nn.Module) -> torch.optim.Optimizer:
        found = getattr(importlib.import_module(module or package.replace("-", "_")), name)
        return found(model.parameters(), **options)

    runs_whole = runs_whole or refused is None
    OPTIMIZERS[f"{package}: {name}"] = Published(build, refused, runs_whole, tolerance)


BRANCHES = "chooses what to do by the value of a tensor"
SHARED = "does not update each parameter by itself"
NOT_ELEMENTWISE = "cannot run on shards: .* is not elementwise"

_add("adabelief-pytorch", "AdaBelief", lr=1e-3, eps=1e-16, rectify=False, print_change_log=False)
_add("adamp", "AdamP", refused=BRANCHES, lr=1e-3, weight_decay=1e-2)
_add("adan-pytorch", "Adan", lr=1e-3, weight_decay=0.02)
_add("bitsandbytes", "AdamW8bit", "bitsandbytes.optim", "addresses of tensors", lr=1e-3)
_add("came-pytorch", "CAME", refused=NOT_ELEMENTWISE, runs_whole=True, lr=1e-3)
_add("dadaptation", "DAdaptAdam", refused=BRANCHES, lr=1.0)
_add("galore-torch", "GaLoreAdamW", lr=1e-3)
_add("grokadamw", "GrokAdamW", refused=SHARED, lr=1e-3)
_add("heavyball", "AdamW", refused="changes its attribute `mapping`", lr=1e-3)
_add("kron-torch", "Kron", refused=SHARED, lr=1e-3)
_add("lion-pytorch", "Lion", lr=1e-4, weight_decay=1e-2)
_add("madgrad", "MADGRAD", refused="keeps state that belongs to no parameter", lr=1e-2)
_add("prodigy-plus-schedule-free", "ProdigyPlusScheduleFree", "prodigyplus", SHARED)
_add("prodigyopt", "Prodigy", refused=BRANCHES, lr=1.0, weight_decay=1e-2)
_add("pytorch-optimizer", "ADOPT", lr=1e-3)
_add("pytorch-optimizer", "AdEMAMix", lr=1e-3)
_add("pytorch-optimizer", "Lamb", refused=BRANCHES, lr=1e-3)
_add("pytorch-optimizer", "Lion", lr=1e-4)
# Gradients that differ by 1e-8 move its losses by 2.5e-3 in plain torch: it turns to eigenvectors,
# and here many belong to one eigenvalue.
_add(
    "pytorch-optimizer",
    "SOAP",
    refused="tensors in a list",
    runs_whole=True,
    tolerance=5e-3,
    lr=1e-3,
)
_add("pytorch-optimizer", "StableAdamW", refused=NOT_ELEMENTWISE, runs_whole=True, lr=1e-3)
_add("pytorch-optimizer", "Tiger", lr=1e-3)
_add("ranger21", "Ranger21", refused=BRANCHES, lr=1e-3, num_epochs=1, num_batches_per_epoch=50)
_add("ranger-adabelief", "RangerAdaBelief", refused="changes its attribute `radam_buffer`", lr=1e-3)
_add("schedulefree", "AdamWScheduleFree", lr=1e-3, warmup_steps=2)
_add("schedulefree", "RAdamScheduleFree", lr=1e-3)
_add("schedulefree", "SGDScheduleFree", lr=1e-1)
_add("sophia-opt", "SophiaG", lr=1e-3)
_add("timm", "Lamb", "timm.optim", SHARED, lr=1e-3)
_add("torch-optimi", "StableAdamW", "optimi", "cannot be traced into it", lr=1e-3, triton=False)
_add("torch-optimizer", "AdaBound", lr=1e-3)
_add("torch-optimizer", "AdaMod", lr=1e-3)
_add("torch-optimizer", "DiffGrad", lr=1e-3)
_add("torch-optimizer", "NovoGrad", refused=BRANCHES, lr=1e-3)
_add("torch-optimizer", "QHAdam", lr=1e-3)
_add("torch-optimizer", "RAdam", refused="makes a plain Python number", lr=1e-3)
_add("torch-optimizer", "Yogi", lr=1e-3)
_add("torchao", "AdamW8bit", "torchao.optim", "tensors? of (a )?class", lr=1e-3)


class Model(nn.Module):
    """Parameters of one and two dimensions, two of which have 4,096 elements or more."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Embedding(40, 64), nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128)
        )
        self.head = nn.Linear(128, 40)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.layers(tokens)), targets)


def _built(name: str) -> tuple[Model, torch.optim.Optimizer]:
    declare_operators()
    torch.manual_seed(0)
    model = Model()
    optimizer = OPTIMIZERS[name].build(model)
    if hasattr(optimizer, "train"):
        optimizer.train()  # those without a schedule keep two sets of parameters
    return model, optimizer


def _batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    tokens, targets = torch.randint(40, (2, 16), generator=generator)
    return tokens, targets


def losses_of(name: str, ranks: int) -> list[list[float]]:
    """Return each rank's losses in plain torch."""
    return losses_in_one_process(*_built(name), _batch, ranks, STEPS)


def losses_on_a_rank(name: str, stage: int) -> list[float]:
    """Return this rank's losses, compiled."""
    options = {"stage": stage, "lowering": "eager"}
    return losses_compiled(*_built(name), _batch, STEPS, options)
