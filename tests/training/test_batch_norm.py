"""Batch norms over all ranks' batches, and running statistics of rank 0."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

import tests.conftest  # noqa: F401  # the ranks need the backend's name too
import zerofx
from tests.kit.covering import nightly
from tests.kit.ranks import ranks_fixture  # noqa: F401
from zerofx.errors import StepError
from zerofx.wrappers import WrappersMet

CLASSES, STEPS = 5, 4


class Net(nn.Module):
    """Batch norms in front, in between, without weights or statistics, and of a flat input."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.body = nn.Sequential(
            nn.BatchNorm2d(3),
            nn.Conv2d(3, 6, 3, bias=False),
            nn.BatchNorm2d(6, affine=False, momentum=0.3),
            nn.ReLU(),
            nn.Conv2d(6, 6, 3),
            nn.BatchNorm2d(6, track_running_stats=False, eps=1e-3),
            nn.Flatten(),
        )
        self.head = nn.Sequential(nn.Linear(96, CLASSES), nn.BatchNorm1d(CLASSES))

    def forward(self, images):
        if self.checkpointed:
            body = torch.utils.checkpoint.checkpoint(self.body, images, use_reentrant=False)
        else:
            body = self.body(images)
        return self.head(body)


def batch(number: int, rank: int, even: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Ranks' images are spread differently; there are 4 each, or more with the rank."""
    generator = torch.Generator().manual_seed(10 * number + rank)
    rows = 4 if even else 4 + 2 * rank
    images = torch.randn(rows, 3, 8, 8, generator=generator) * (1 + rank) + rank
    return images, torch.randint(CLASSES, (rows,), generator=generator)


def built(**given: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net(**given)
    # Of a small rate: what a batch norm divides makes rounding grow from step to step.
    return model, torch.optim.SGD(model.parameters(), lr=0.05)


def step_in(parts: int, autocast: bool = False):
    def step(model, optimizer, images, labels):
        total = torch.zeros(())
        for x, y in zip(images.chunk(parts), labels.chunk(parts), strict=True):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                out = model(x)
            loss = F.cross_entropy(out.float(), y) / parts
            loss.backward()
            total = total + loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def train_on_rank(options, parts: int, given: dict[str, Any], autocast: bool):
    torch._dynamo.reset()
    model, optimizer = built(**given)
    chosen = {"lowering": "eager", "batch_norm": "global", **options}
    step = torch.compile(step_in(parts, autocast), backend="zero", options=chosen)
    even = chosen.get("loss") != "global"
    rank = dist.get_rank()
    losses = [step(model, optimizer, *batch(number, rank, even)) for number in range(STEPS)]
    return torch.stack(losses), {key: value.clone() for key, value in model.state_dict().items()}


def train_in_one_process(ranks: int, even: bool, parts: int, autocast: bool):
    """On all ranks' batches; its micro-batches are those of all ranks."""
    model, optimizer = built()
    step, losses = step_in(parts, autocast), []
    for number in range(STEPS):
        of_ranks = [batch(number, rank, even) for rank in range(ranks)]
        images, labels = (
            torch.cat([one.chunk(parts)[part] for part in range(parts) for one in each])
            for each in zip(*of_ranks, strict=True)
        )
        losses.append(step(model, optimizer, images, labels))
    return torch.stack(losses), model.state_dict()


CASES = {
    "stage 3": ({}, 1, {}),
    "loss of all": ({"loss": "global"}, 1, {}),
    "stage 0": ({"stage": 0}, 1, {}),
    "stage 1, micro-batches": ({"stage": 1}, 2, {}),
    "stage 2, uneven": ({"stage": 2, "uneven": True}, 1, {}),
    "loss of all, micro-batches": ({"loss": "global"}, 2, {}),
    "checkpointed": ({}, 1, {"checkpointed": True}),
    "compiled": ({"lowering": "inductor"}, 1, {}),
    "compiled, loss of all, checkpointed": (
        {"lowering": "inductor", "loss": "global"},
        1,
        {"checkpointed": True},
    ),
    "validated": ({"validate": True}, 1, {}),
    "little memory": ({"memory_budget": 60_000}, 2, {}),
    "updates on the host": ({"offload": "optimizer,params"}, 1, {}),
}


@pytest.mark.slow(reason="two ranks compile and train")
@pytest.mark.parametrize(
    ("case", "num_ranks"),
    [
        ("stage 3", 2),
        *(nightly(case, num_ranks) for case in CASES for num_ranks in (2, 3)),
    ],
)
def test_all_ranks_train_as_one_process_on_all_batches(case, num_ranks, ranks):  # noqa: F811
    options, parts, given = CASES[case]
    even = options.get("loss") != "global"
    expected, state = train_in_one_process(num_ranks, even, parts, False)
    found = ranks(num_ranks).run(train_on_rank, options, parts, given, False, timeout_s=300)
    losses = torch.stack([losses for losses, _ in found])
    of_all = losses.mean(0) if even else losses[0]
    torch.testing.assert_close(of_all, expected, rtol=1e-5, atol=1e-6)
    for _, own in found:
        for name, value in state.items():
            torch.testing.assert_close(own[name], value, rtol=1e-4, atol=1e-5)
    assert len({own["head.1.running_var"].sum().item() for _, own in found}) == 1


@pytest.mark.nightly
def test_autocast_is_that_of_one_process_to_its_precision(ranks):  # noqa: F811
    expected, state = train_in_one_process(2, True, 1, True)
    found = ranks(2).run(train_on_rank, {}, 1, {}, True, timeout_s=300)
    losses = torch.stack([losses for losses, _ in found]).mean(0)
    torch.testing.assert_close(losses, expected, rtol=2e-2, atol=2e-2)
    mean = "head.1.running_mean"
    torch.testing.assert_close(found[0][1][mean], state[mean], rtol=0, atol=2e-2)


def run_dry(loss: str):
    torch._dynamo.reset()
    model, optimizer = built()
    options = {"lowering": "eager", "batch_norm": "global", "loss": loss, "uneven": True}
    step = torch.compile(step_in(1), backend="zero", options=options)
    for number in range(STEPS):
        if number >= 2 and dist.get_rank() == 1:
            zerofx.no_data(step)
        else:
            step(model, optimizer, *batch(number, dist.get_rank(), even=True))
    while dist.get_rank() and zerofx.no_data(step):
        pass
    if not dist.get_rank():
        assert zerofx.no_data(step) == 0
    return {key: value.clone() for key, value in model.state_dict().items()}


@pytest.mark.nightly
def test_a_rank_without_data_is_in_no_statistic(ranks):  # noqa: F811
    model, optimizer = built()
    for number in range(STEPS):
        those = range(2) if number < 2 else range(1)
        pairs = zip(*(batch(number, rank, even=True) for rank in those), strict=True)
        step_in(1)(model, optimizer, *map(torch.cat, pairs))
    for state in ranks(2).run(run_dry, "global", timeout_s=300):
        for name, value in model.state_dict().items():
            if "num_batches_tracked" not in name:  # of the calls with a batch
                torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-5)


def with_rank_0s():
    torch._dynamo.reset()
    model, optimizer = built()
    options = {"lowering": "eager", "batch_norm": "rank0"}
    step = torch.compile(step_in(1), backend="zero", options=options)

    @torch.no_grad()
    def evaluate(images):
        return model(images)

    evaluate = torch.compile(evaluate, backend="zero", options=options)
    seen = []
    for number in range(2):
        step(model, optimizer, *batch(number, dist.get_rank(), even=True))
        own = model.head[1].running_mean.clone()
        if number:  # somebody puts another in its place, which is as good
            model.head[1].running_mean = own.clone()
        model.eval()
        seen.append((own, evaluate(batch(9, 0, even=True)[0]), model.head[1].running_mean.clone()))
        model.train()
    return seen


@pytest.mark.slow(reason="ranks compile and train")
def test_buffers_are_rank_0s_at_every_call(ranks):  # noqa: F811
    first, second = ranks(2).run(with_rank_0s, timeout_s=300)
    for (own, out, then), (others, same_out, same_then) in zip(first, second, strict=True):
        assert not torch.equal(own, others)
        assert torch.equal(then, own) and torch.equal(same_then, own)
        assert torch.equal(out, same_out)


def refusal(model: nn.Module) -> str:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        model(x).sum().backward()
        optimizer.step()

    options = {"lowering": "eager", "batch_norm": "global"}
    with pytest.raises(StepError) as raised:
        torch.compile(step, backend="zero", options=options)(torch.randn(4, 3))
    return str(raised.value)


class Written(nn.Linear):
    def forward(self, x):
        x = super().forward(x)
        return torch.batch_norm(x, None, None, None, None, True, 0.1, 1e-5, False)


def test_a_batch_norm_of_another_function_is_refused_with_the_line():
    words = refusal(Written(3, 3))
    assert "F.batch_norm" in words and "test_batch_norm.py" in words


def test_gradients_of_gradients_are_refused():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        weight = model[0].weight
        (slope,) = torch.autograd.grad(model(x).square().sum(), weight, create_graph=True)
        slope.square().sum().backward()
        optimizer.step()

    options = {"lowering": "eager", "batch_norm": "global"}
    with pytest.raises(StepError, match="create_graph=True"):
        torch.compile(step, backend="zero", options=options)(torch.randn(4, 3))


def test_an_evaluation_asks_no_other_rank(tmp_path):
    model = nn.BatchNorm1d(3, track_running_stats=False).eval()

    @torch.no_grad()
    def evaluate(x):
        return model(x)

    options = {"lowering": "eager", "batch_norm": "global", "dump": str(tmp_path), "stage": 0}
    torch.compile(evaluate, backend="zero", options=options)(torch.randn(4, 3))
    (program,) = tmp_path.glob("rank0/*/00_captured.py")
    assert "over_ranks" not in program.read_text()


def test_a_batch_norm_that_talks_to_ranks_itself_is_refused(monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
    module = nn.SyncBatchNorm(3)
    with pytest.raises(StepError, match="convert_sync_batchnorm out.*batch_norm=global"):
        WrappersMet()(module)
    assert WrappersMet()(module.eval()) is module
