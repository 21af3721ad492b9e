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
    """An optimizer: ``build`` makes it, and ``refused`` says why it is refused, if it is."""

    build: Callable[[nn.Module], torch.optim.Optimizer]
    refused: str | None


OPTIMIZERS: dict[str, Published] = {}
"""By ``package: class``."""


def _add(
    package: str,
    name: str,
    module: str | None = None,
    refused: str | None = None,
    also: str = "",
    groups: Callable[[nn.Module], Any] = nn.Module.parameters,
    **options: Any,
) -> None:
    def build(model: nn.Module) -> torch.optim.Optimizer:
        found = getattr(importlib.import_module(module or package.replace("-", "_")), name)
        return found(groups(model), **options)

    OPTIMIZERS[f"{package}: {name}{also}"] = Published(build, refused)


def _of_low_rank(model: nn.Module) -> list[dict[str, Any]]:
    """As GaLore's README groups parameters."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    galore = {"rank": 8, "update_proj_gap": 3, "scale": 0.25, "proj_type": "std"}
    others = [p for p in model.parameters() if p.dim() != 2]
    return [{"params": others}, {"params": matrices, **galore}]


SHARED = "does not update each parameter by itself"

_add("adabelief-pytorch", "AdaBelief", lr=1e-3, eps=1e-16, rectify=False, print_change_log=False)
_add("adamp", "AdamP", lr=1e-3, weight_decay=1e-2)
_add("adan-pytorch", "Adan", lr=1e-3, weight_decay=0.02)
_add("bitsandbytes", "AdamW8bit", "bitsandbytes.optim", lr=1e-3)
_add("came-pytorch", "CAME", lr=1e-3)
_add("dadaptation", "DAdaptAdam", refused=SHARED, lr=1.0)
_add("galore-torch", "GaLoreAdamW", lr=1e-3)
_add("galore-torch", "GaLoreAdamW", also=" with rank", groups=_of_low_rank, lr=1e-3)
_add("grokadamw", "GrokAdamW", refused=SHARED, lr=1e-3)
_add("heavyball", "AdamW", lr=1e-3)
_add("kron-torch", "Kron", refused=SHARED, lr=1e-3)
_add("lion-pytorch", "Lion", lr=1e-4, weight_decay=1e-2)
_add("madgrad", "MADGRAD", lr=1e-2)
_add("prodigy-plus-schedule-free", "ProdigyPlusScheduleFree", "prodigyplus", SHARED)
_add("prodigyopt", "Prodigy", refused=SHARED, lr=1.0, weight_decay=1e-2)
_add("pytorch-optimizer", "ADOPT", lr=1e-3)
_add("pytorch-optimizer", "AdEMAMix", lr=1e-3)
_add("pytorch-optimizer", "Lamb", lr=1e-3)
_add("pytorch-optimizer", "Lion", lr=1e-4)
_add("pytorch-optimizer", "SOAP", lr=1e-3)
_add("pytorch-optimizer", "StableAdamW", lr=1e-3)
_add("pytorch-optimizer", "Tiger", lr=1e-3)
_add("ranger21", "Ranger21", refused=SHARED, lr=1e-3, num_epochs=1, num_batches_per_epoch=50)
_add("ranger-adabelief", "RangerAdaBelief", lr=1e-3)
_add("schedulefree", "AdamWScheduleFree", lr=1e-3, warmup_steps=2)
_add("schedulefree", "RAdamScheduleFree", lr=1e-3)
_add("schedulefree", "SGDScheduleFree", lr=1e-1)
_add("sophia-opt", "SophiaG", lr=1e-3)
_add("timm", "Lamb", "timm.optim", SHARED, lr=1e-3)
_add("timm", "Lamb", "timm.optim", also=" without clipping", lr=1e-3, max_grad_norm=None)
_add("torch-optimi", "StableAdamW", "optimi", "cannot be traced into it", lr=1e-3, triton=False)
_add("torch-optimizer", "AdaBound", lr=1e-3)
_add("torch-optimizer", "AdaMod", lr=1e-3)
_add("torch-optimizer", "DiffGrad", lr=1e-3)
_add("torch-optimizer", "NovoGrad", lr=1e-3)
_add("torch-optimizer", "QHAdam", lr=1e-3)
_add("torch-optimizer", "RAdam", lr=1e-3)
_add("torch-optimizer", "Yogi", lr=1e-3)
_add("torchao", "AdamW8bit", "torchao.optim", lr=1e-3)


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
