"""Ranks train alike with the loss in chunks and whole, also where they have unlike batches."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from torch import nn

import tests.conftest  # noqa: F401  # the ranks need the backend's name too
import zerofx
from tests.kit.covering import each_pair
from tests.kit.ranks import ranks_fixture  # noqa: F401

CLASSES, WIDTH, LENGTH = 1300, 6, 8


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def hidden(self, tokens):
        return torch.tanh(self.embedding(tokens))


def loss_of(model: Model, form: str, tokens):
    hidden, targets = model.hidden(tokens), tokens.flatten()
    loss = F.cross_entropy(model.head(hidden).flatten(0, 1), targets)
    if form == "two losses of one head":
        second = model.head(torch.tanh(model.body(hidden)))
        return loss + 0.3 * F.cross_entropy(second.flatten(0, 1), targets)
    if form == "a penalty on the head":
        return loss + 0.1 * model.head.weight.square().sum() + model.body(hidden).square().mean()
    return loss


def train(form: str, rows: tuple[int, ...], options: dict):
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)

    def step(tokens):
        optimizer.zero_grad()
        loss = loss_of(model, form, tokens)
        loss.backward()
        optimizer.step()
        return loss

    options = {"lowering": "eager", "loss": "global", **options}
    step = torch.compile(step, backend="zero", options=options)
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(CLASSES, (rows[dist.get_rank()], LENGTH), generator=generator)
    losses = [step(tokens).item() for _ in range(2)]
    with zerofx.full_params(model):
        return losses, [p.detach().clone() for p in model.parameters()], zerofx.explain(step)


FORMS = ("one loss", "two losses of one head", "a penalty on the head")


@pytest.mark.slow(reason="ranks trace and train")
@pytest.mark.parametrize(("form", "stage"), each_pair(FORMS, (1, 3), default=[("one loss", 1)]))
def test_ranks_with_few_tokens_and_many_train_as_with_the_loss_whole(ranks, form, stage):  # noqa: F811
    rows = 40, 3  # three chunks and one
    whole, some = (
        ranks(2).run(train, form, rows, {"stage": stage, "chunk_loss": n}) for n in (0, 1)
    )
    assert "losses: 0" not in some[0][2] and "chunk_loss" in some[0][2]
    for (losses, parameters, _), (expected, others, _) in zip(some, whole, strict=True):
        torch.testing.assert_close(losses, expected, rtol=1e-6, atol=0)
        for one, other in zip(parameters, others, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
