"""A form of a training step: how it is built, and what is to be expected of it.

A form is a function of ``zero``, which is ``torch.compile(..., backend="zero")`` or, for the
reference, nothing at all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn

from tests.kit import models
from tests.kit.models import Mlp, squared_loss

STEPS = 10  # of a training


@dataclass
class Training:
    """One form built: ``step(*batch)`` is what the user's loop does with a batch."""

    step: Callable[..., Any]
    models: Sequence[nn.Module]
    optimizers: Sequence[torch.optim.Optimizer]
    scheduled: bool = False
    """Whether the form changes its learning rates itself."""
    extra: Callable[[], Any] = tuple
    """What else must be equal at the end."""


@dataclass(frozen=True)
class Form:
    build: Callable[..., Training]
    batch: Callable[[int, int], tuple[torch.Tensor, ...]] = models.features
    rows: tuple[int, ...] = (4,)
    """How many rows of a batch are one rank's, step by step and over again."""
    graphs: int = 1
    """How many programs its functions compile to, whatever happens to hyperparameters."""
    sums_over_shards: bool = False
    """Whether it reads a norm of gradients, which stages 1 to 3 sum in another order."""
    functional_rounding: bool = False
    """Whether torch itself rounds otherwise once AOTAutograd has made its operators functional.

    Those that write in place go through strided memory, for which some processors have other code.
    Then the reference's forward and backward are those of torch's own ``aot_eager``.
    """
    rounding: float = 1e-6
    """How far results may be from the reference, relatively, when ranks share the batch."""
    same_batch: bool = False
    """Whether every rank gets the same rows, because statistics are not averaged over ranks."""
    only_alone: bool = False
    """Whether more ranks would compute something else: random draws, a sum over micro-batches."""
    only_exhaustive: bool = False


FORMS: dict[str, Form] = {}


def form(**facts):
    """Register a form under its function's name."""

    def register(build):
        FORMS[build.__name__] = Form(build, **facts)
        return build

    return register


def adamw(parameters, **hyperparameters):
    """AdamW that does not blow rounding up where a gradient is nearly zero."""
    return torch.optim.AdamW(parameters, **{"lr": 1e-3, "eps": 1e-3, **hyperparameters})


def step_with(loss_of=squared_loss, *, between=None):
    """forward, backward, something in between, update, zero_grad."""

    def step(model, optimizer, *batch):
        loss = loss_of(model, *batch)
        loss.backward()
        if between is not None:
            between(model)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def simple(zero, step, model=None, make_optimizer=adamw, **arguments) -> Training:
    """A form of one model, one optimizer and one function."""
    model = Mlp() if model is None else model
    optimizer = make_optimizer(model.parameters())
    compiled = zero(step, **arguments)
    return Training(functools.partial(compiled, model, optimizer), [model], [optimizer])
