"""Gives tests of refusals a good step, an error's words, and a check of what it left alone."""

from __future__ import annotations

import torch
from torch import nn

import tests.conftest  # noqa: F401  # the ranks need the backend's name too
from tests.kit import models
from tests.kit.models import squared_loss
from zerofx.runtime.parameters.guarded import ShardedParameter

BATCH = models.features(0, 4)


def zero(step, stage: int = 3, **options):
    return torch.compile(
        step, backend="zero", options={"stage": stage, "lowering": "eager", **options}
    )


def good_step(model, optimizer, x, y):
    loss = squared_loss(model, x, y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def words(error: BaseException) -> str:
    """Return what the user reads: the message and its notes."""
    return "\n".join([str(error), *getattr(error, "__notes__", ())])


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


def values(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters() if not p.is_meta]


def assert_untouched(model, optimizer, before: list[torch.Tensor]) -> None:
    assert not any(isinstance(p, ShardedParameter) for p in model.parameters())
    assert all(torch.equal(one, other) for one, other in zip(values(model), before, strict=True))
    assert not optimizer.state
    assert all(p.grad is None for p in model.parameters())
