"""With ``loss="global"`` a step returns the loss over all ranks, and a rank's other results."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from torch import nn

import tests.conftest  # noqa: F401  # the ranks need the backend's name too
import zerofx
from tests.kit.losses import RIGHT, Model, batch_of, flat, masked, train_alone
from tests.kit.ranks import ranks_fixture  # noqa: F401
from tests.training.test_loss_over_ranks import Small, of_small


def results(form: str):
    torch.manual_seed(7)
    model = Small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def step(batch):
        optimizer.zero_grad()
        out = model(batch["tokens"])
        loss = RIGHT[form](out, batch)
        (loss / 4).backward()
        optimizer.step()
        mean = torch.stack([loss.detach(), loss.detach()]).mean()
        return loss, loss.detach() * 2, out.detach().mean(), {"loss": mean}

    options = {"lowering": "eager", "stage": 0, "loss": "global"}
    step = torch.compile(step, backend="zero", options=options)
    of_loss, doubled, own, others = step(batch_of(dist.get_rank()))
    collectives = "counts: 3, returned: 3, collectives: 2" in str(zerofx.explain(step))
    return of_loss.item(), doubled.item(), own.item(), others["loss"].item(), collectives


@pytest.mark.slow(reason="two ranks and one process train")
def test_the_loss_and_its_scaled_aliases_are_returned_over_all_ranks(ranks):  # noqa: F811
    (expected, *_), _ = of_small(train_alone, "cross_entropy", 2)
    found = ranks(2).run(results, "cross_entropy")
    for loss, doubled, _, other, collectives in found:
        assert (loss, other) == pytest.approx((expected, expected), rel=2e-6)
        assert doubled == pytest.approx(2 * expected, rel=2e-6)
        assert collectives, "one for the counts, one for the losses"
    assert found[0][2] != found[1][2], "any other result is the rank's own"


def terms(options: dict | None = None):
    """Return terms of the loss, what is computed of it, and a running mean of it."""
    torch.manual_seed(7)
    model = Model()
    model.register_buffer("running", torch.zeros(()))
    model.doubt = nn.Parameter(torch.tensor(0.3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def step(batch):
        optimizer.zero_grad()
        out = model(batch["tokens"])
        term = F.cross_entropy(*flat(out, batch))
        weighed = term * (-model.doubt).exp() + model.doubt  # of what the update changes
        loss = weighed + 0.1 * masked(out, batch)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            model.running.mul_(0.5).add_(term, alpha=0.5)
        counted = term.detach() * batch["mask"].sum()
        return loss, term.detach(), weighed.detach(), loss.detach().exp(), counted

    if options is not None:
        step = torch.compile(step, backend="zero", options={"lowering": "eager", **options})
    found = [value.item() for value in step(batch_of(dist.get_rank() if options else 0))]
    return *found, model.running.item()


def own_terms():
    return terms({"stage": 0, "loss": "global"}), terms({"stage": 0, "loss": "rank"})


@pytest.mark.nightly
def test_terms_of_a_loss_and_what_is_computed_of_it_are_the_ranks_own(ranks):  # noqa: F811
    found = ranks(2).run(own_terms)
    (first, *_), (other, *_) = (of_global for of_global, _ in found)
    assert first == other, "the loss is one over all ranks"
    for of_global, of_rank in found:
        assert of_global[1:] == pytest.approx(of_rank[1:], rel=2e-6)


def own_count():
    torch.manual_seed(7)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def step(batch):
        optimizer.zero_grad()
        total = F.cross_entropy(*flat(model(batch["tokens"]), batch), reduction="sum")
        mine = zerofx.local_count((batch["labels"] != -100).sum())
        loss = total / mine
        loss.backward()
        optimizer.step()
        return loss, mine, mine.clamp(min=1)

    options = {"lowering": "eager", "stage": 0, "loss": "global"}
    step = torch.compile(step, backend="zero", options=options)
    loss, mine, bounded = step(batch_of(dist.get_rank()))
    return loss.item(), mine.item(), bounded.item()


@pytest.mark.nightly
def test_a_count_that_is_returned_stays_the_ranks_own(ranks):  # noqa: F811
    (expected, *_), _ = train_alone("cross_entropy", 2, calls=1)
    for rank, (loss, *counted) in enumerate(ranks(2).run(own_count)):
        assert loss == pytest.approx(expected, rel=2e-6)
        assert counted == [(batch_of(rank)["labels"] != -100).sum().item()] * 2
