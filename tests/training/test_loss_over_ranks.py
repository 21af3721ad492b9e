"""With ``loss="global"`` ranks train as one process does that has all their batches in one."""

from __future__ import annotations

import re
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from torch import nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.utils.checkpoint import checkpoint

import tests.conftest  # noqa: F401  # the ranks need the backend's name too
import zerofx
from tests.kit import losses
from tests.kit.covering import first, nightly, only
from tests.kit.losses import (
    CLASSES,
    GIVEN,
    REFUSED,
    RIGHT,
    ROWS,
    WIDTH,
    Batch,
    Model,
    batch_of,
    by_token,
    check,
    given_and_moved,
    given_both_ways,
    given_locally,
    joined,
    masked,
    train,
    train_alone,
    train_on_rank,
)
from tests.kit.ranks import ranks_fixture  # noqa: F401
from zerofx.errors import StepError

OF_EACH_REASON = list({words: form for form, (_, words) in REFUSED.items()}.values())


class Small(nn.Module):
    """As much of a model as a loss needs, which is traced in a moment."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def hidden(self, tokens):
        return F.gelu(self.embedding(tokens))

    def forward(self, tokens):
        return self.head(self.hidden(tokens))


def of_small(function: Callable, *arguments):
    """Return what the function returns that trains this model instead of its own."""
    with mock.patch.object(losses, "Model", Small):
        return function(*arguments)


@pytest.mark.nightly
@pytest.mark.parametrize("form", RIGHT)
def test_every_form_trains_as_one_process(ranks, form):  # noqa: F811
    resized = 1, False, False, 2, True
    for found in ranks(2).run(train_on_rank, form, {"stage": 3}, *resized):
        check(found, train_alone(form, 2, *resized))


@pytest.mark.nightly
@pytest.mark.parametrize("stage", (0, 1, 2, 3))
@pytest.mark.parametrize("world_size, micro_batches", [(1, 1), (1, 4), (2, 4), (3, 2), (4, 1)])
@pytest.mark.parametrize("form", ("masked_and_clamped", "z_loss"))
def test_whatever_the_ranks_and_micro_batches(  # noqa: F811
    ranks, form, world_size, micro_batches, stage
):
    arguments = micro_batches, True, form == "masked_and_clamped", 2, True
    expected = train_alone(form, world_size, *arguments)
    for found in ranks(world_size).run(train_on_rank, form, {"stage": stage}, *arguments):
        check(found, expected)


@pytest.mark.parametrize("micro_batches", (nightly(1), 2))
@pytest.mark.slow(reason="ranks compile and train")
def test_a_rank_may_have_nothing_that_counts(ranks, micro_batches):  # noqa: F811
    form, arguments = "masked_and_clamped", (micro_batches, True, True)
    expected = of_small(train_alone, form, 2, *arguments)
    for found in ranks(2).run(of_small, train_on_rank, form, {"stage": 2}, *arguments):
        check(found, expected)


@pytest.mark.slow(reason="two ranks compile and train")
def test_compiled_it_trains_so_too(ranks):  # noqa: F811
    options, batches = {"stage": 3, "lowering": "inductor"}, (1, False, False, 1)
    expected = of_small(train_alone, "z_loss", 2, *batches)
    for found in ranks(2).run(of_small, train_on_rank, "z_loss", options, *batches):
        check(found, expected)


@pytest.mark.nightly
def test_by_rank_it_would_be_another_training(ranks):  # noqa: F811
    (found, _), _ = ranks(2).run(train_on_rank, "cross_entropy", {"stage": 0, "loss": "rank"})
    expected, _ = train_alone("cross_entropy", 2)
    assert abs(found[1] - expected[1]) > 1e-3


@pytest.mark.parametrize("form", only(OF_EACH_REASON[::5], REFUSED))
def test_what_is_no_mean_is_refused_with_its_line(form):
    with pytest.raises(StepError, match=REFUSED[form][1]) as caught:
        of_small(train, form, [[batch_of(0)]], {"stage": 0, "loss": "global"})
    assert "losses.py:" in str(caught.value)
    assert "zerofx.per_rank" in str(caught.value)


def refusal(loss_of: Callable, *inputs, line: str = "test_loss_over_ranks.py:") -> str:
    torch.manual_seed(7)
    model = Small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def step(*inputs):
        optimizer.zero_grad()
        loss_of(model, *inputs).backward()
        optimizer.step()

    options = {"lowering": "eager", "stage": 0, "loss": "global"}
    with pytest.raises(StepError) as caught:
        torch.compile(step, backend="zero", options=options)(*inputs)
    assert line in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("form", first(1, ("counts_of_two", "looked_up_by_label", "guarded")))
@pytest.mark.slow(reason="a program of two micro-batches")
def test_micro_batches_train_as_one(form):
    expected = of_small(train_alone, form, 2, 1, False, False, 1)
    batches = [[batch_of(0), batch_of(1)]]
    found = of_small(train, form, batches, {"stage": 0, "loss": "global"})
    check(found, expected)


def test_a_sum_of_losses_may_be_beyond_float16():
    def loss_of(out, b):
        return F.cross_entropy((out.flatten(0, 1) * 1e5).half(), b["targets"].flatten())

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(RIGHT, "in float16", loss_of)
        options = {"stage": 0, "loss": "global"}
        (loss,), _ = train("in float16", [[batch_of(0)]], options)
    assert 65504 / 18 < loss < 65504


class SquaredError(torch.autograd.Function):
    """Divides by a rank's own count in its backward."""

    @staticmethod
    def forward(ctx, out):
        ctx.save_for_backward(out)
        return out.square().mean()

    @staticmethod
    def backward(ctx, gradient):
        (out,) = ctx.saved_tensors
        return gradient * 2 * out / out.numel()


class AddsLoss(torch.autograd.Function):
    """Adds the gradient of a loss to that of what it is given, as DeepSeek's balancing loss."""

    @staticmethod
    def forward(ctx, out, loss):
        return out.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, torch.ones(())


def by_sample(model, tokens):
    return model(tokens).square().mean((1, 2))


def with_shares(model, x, weights):
    return (by_sample(model, x) * weights * x.size(0)).sum()


MEMORY = torch.arange(15).view(3, 5) % 7

OF_PARTS = {
    "joined with a memory": (
        lambda model, x: by_sample(model, torch.cat([x, MEMORY])).mean(),
        "joins what all ranks have alike to the samples",
    ),
    "shares times the length": (
        lambda model, x: with_shares(model, x, x[:, 0] / x[:, 0].sum()),
        "multiplies shares of the batch by the batch's length, 8 .weights w / w.mean",
    ),
    "times the length, and divided": (
        lambda model, x: by_sample(model, x).mean() * x.size(0) / 2,
        "multiplies a mean over the batch by the batch's length, 8",
    ),
    "halves": (lambda model, x: by_sample(model, x).view(2, -1).mean(1).sum(), "takes the mean"),
    "of each place": (
        lambda model, x: by_sample(model, x).view(-1, 2).mean(0).square().sum(),
        "takes the mean",
    ),
    "spread of halves": (
        lambda model, x: by_sample(model, x).view(2, -1).std(1).sum(),
        "takes the std|takes the var",
    ),
    "times the length": (
        lambda model, x: by_sample(model, x).mean() * x.size(0),
        "multiplies a mean over the batch by the batch's length, 8",
    ),
    "a share times the length": (
        lambda model, x: by_sample(model, x).sum() / ((x[:, 0] > 3).float().mean() * x.size(0)),
        "multiplies a mean over the batch by the batch's length, 8",
    ),
    "its own backward": (lambda model, x: SquaredError.apply(model(x)), "takes the mean"),
    "its own gradient": (
        lambda model, x: AddsLoss.apply(model(x), by_sample(model, x).mean()).square().mean(),
        "returns a gradient whatever gradient it is given",
    ),
}


@pytest.mark.parametrize("name", first(3, OF_PARTS))
def test_what_is_of_a_part_or_of_a_rank_in_backward_is_refused(name):
    loss_of, words = OF_PARTS[name]
    tokens = torch.arange(40).view(8, 5) % 7
    assert re.search(words, refusal(loss_of, tokens))


@pytest.mark.parametrize(
    "loss_of",
    first(
        1,
        [
            lambda model, x: by_sample(model, x).view(-1, 2).mean(1).square().mean(),  # of pairs
            lambda model, x: 2 * by_sample(model, x).mean(),
            lambda model, x: torch.tensor(8.0) * by_sample(model, x).mean(),
            lambda model, x: by_sample(model, x).sum() / (x.numel() - torch.sum(input=x > 3)),
        ],
    ),
)
def test_what_is_of_few_samples_each_is_no_part_of_the_batch(loss_of):
    trains_as_torch_does(loss_of)


@pytest.mark.slow(reason="torch makes symbols of sizes")
@pytest.mark.parametrize(
    "loss_of",
    first(
        1,
        [
            lambda model, x: by_sample(model, x).sum() / x.size(0),
            lambda model, x: by_sample(model, x).sum() / float(x.numel()),
            lambda model, x: 8 * by_sample(model, x).mean(),
        ],
    ),
)
def test_a_loss_is_scaled_by_a_weight_or_divided_by_a_length_that_is_a_symbol(loss_of):
    trains_as_torch_does(loss_of, is_symbol=True)


@pytest.mark.nightly
def test_backward_may_be_told_by_name_what_it_starts_from():
    def set_gradients(loss, parameters):
        found = torch.autograd.grad(outputs=loss, inputs=parameters)
        for parameter, gradient in zip(parameters, found, strict=True):
            parameter.grad = gradient

    trains_as_torch_does(lambda model, x: by_sample(model, x).mean(), set_gradients)


def trains_as_torch_does(
    loss_of, backward=lambda loss, parameters: loss.backward(), is_symbol=False
):
    model, alone = Small(), Small()
    alone.load_state_dict(model.state_dict())
    tokens = torch.arange(40).view(8, 5) % 7
    if is_symbol:
        torch._dynamo.mark_dynamic(tokens, 0)
    for trained, options in ((model, {"stage": 0, "loss": "global"}), (alone, None)):
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.5)

        def step(tokens, trained=trained, optimizer=optimizer):
            backward(loss_of(trained, tokens), list(trained.parameters()))
            optimizer.step()
            optimizer.zero_grad()

        if options is not None:
            options = {"lowering": "eager", **options}
            step = torch.compile(step, backend="zero", options=options)
        step(tokens)
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_a_number_that_the_step_is_called_with_may_be_a_count_or_not():
    def loss_of(model, batch, number):
        return by_token(model(batch["tokens"]), batch).sum() / number

    words = refusal(loss_of, batch_of(0), torch.tensor(18.0))
    assert "by a number that the step is called with" in words


def test_the_inverse_of_a_number_of_elements_may_be_a_count_or_not():
    def loss_of(model, batch):
        each = by_token(model(batch["tokens"]), batch)
        return each.sum() * (1 / each.numel())

    assert "divides a sum over the batch by the number 18" in refusal(loss_of, batch_of(0))


def test_what_is_the_same_on_all_ranks_is_divided_by_no_count():
    def loss_of(model, batch):
        penalty = sum(p.square().sum() for p in model.parameters())
        return (by_token(model(batch["tokens"]), batch).sum() + penalty) / batch["mask"].sum()

    assert "by less than it is multiplied with" in refusal(loss_of, batch_of(0))


def test_a_bias_that_is_made_of_the_batch_is_followed():
    def loss_of(model, batch):
        hidden = model.hidden(batch["tokens"])[:, 0]
        means = hidden.mean(0) @ model.head.weight.T
        return F.linear(hidden, model.head.weight, means).square().mean()

    assert "of the whole batch to what is of samples" in refusal(loss_of, batch_of(0))


def test_attention_along_the_first_dimension_is_refused():
    attention = nn.MultiheadAttention(WIDTH, 2)

    def loss_of(model, batch):
        x = model.embedding(batch["tokens"])
        return attention(x, x, x, need_weights=False)[0].square().mean()

    assert "mixes the samples" in refusal(loss_of, batch_of(0))


def test_one_line_for_several_tasks_of_the_same_samples_may_be_meant_otherwise():
    def loss_of(model, batch):
        for labels in (batch["labels"], batch["targets"]):
            out = model(batch["tokens"])
            loss = F.cross_entropy(out.flatten(0, 1), labels.flatten())
            if labels is batch["labels"]:
                loss.backward()
        return loss

    assert "may be tasks with a divisor each" in refusal(loss_of, batch_of(0))


def train_with_gradient(batches: list[Batch], options: dict | None):
    """Train on a sum that the gradient given to backward() divides by its count."""
    torch.manual_seed(7)
    model = Small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def step(batch):
        optimizer.zero_grad()
        total = (by_token(model(batch["tokens"]), batch) * batch["mask"]).sum()
        total.backward(gradient=1.0 / batch["mask"].sum())
        optimizer.step()
        return total

    if options is not None:
        step = torch.compile(step, backend="zero", options={"lowering": "eager", **options})
    for batch in batches:
        step(batch)
    with zerofx.full_params(model):
        return [], [p.detach().clone() for p in model.parameters()]


def train_with_gradient_on_rank():
    batches = [batch_of(dist.get_rank(), len(ROWS) * call) for call in range(2)]
    return train_with_gradient(batches, {"loss": "global", "stage": 1})


@pytest.mark.slow(reason="ranks compile and train")
def test_a_gradient_given_to_backward_is_a_factor_of_the_loss(ranks):  # noqa: F811
    calls = (0, len(ROWS))
    batches = [joined([batch_of(rank, call) for rank in range(2)]) for call in calls]
    for found in ranks(2).run(train_with_gradient_on_rank):
        check(found, train_with_gradient(batches, None))


def train_tasks(form: str, batches: list[list[Batch]], options: dict | None):
    """Train on losses that one line divides, which are no micro-batches of each other."""
    torch.manual_seed(7)
    model = Model()
    heads = nn.ModuleList(nn.Linear(WIDTH, CLASSES) for _ in range(2))
    parameters = [*model.parameters(), *heads.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.5)

    def step(parts):
        losses = []
        if form == "an update each":
            for batch in parts:
                optimizer.zero_grad()
                out = model(batch["tokens"])
                loss = F.cross_entropy(out.flatten(0, 1), batch["labels"].flatten())
                loss.backward()
                optimizer.step()
                losses.append(loss)
            return losses
        optimizer.zero_grad()
        hidden = model.embedding(parts[0]["tokens"])
        for head, batch in zip(heads, parts, strict=True):
            labels = batch["labels"] if head is heads[0] else parts[0]["targets"]
            out = head(hidden)
            loss = F.cross_entropy(out.flatten(0, 1), labels.flatten(), ignore_index=-100)
            loss.backward(retain_graph=True)
            losses.append(loss)
        optimizer.step()
        return losses

    if options is not None:
        step = torch.compile(step, backend="zero", options={"lowering": "eager", **options})
    losses = [loss.item() for parts in batches for loss in step(parts)]
    with zerofx.full_params(model), zerofx.full_params(heads):
        return losses, [p.detach().clone() for p in parameters]


def train_tasks_on_rank(form, stage):
    rank = dist.get_rank()
    parts = [batch_of(rank, 0), batch_of(rank, 1)]
    return train_tasks(form, [parts, parts[::-1]], {"loss": "global", "stage": stage})


@pytest.mark.nightly
@pytest.mark.parametrize("form", ("an update each", nightly("a head each")))
def test_losses_of_one_line_that_are_no_micro_batches_have_divisors_of_their_own(ranks, form):  # noqa: F811
    parts = [joined([batch_of(rank, m) for rank in range(2)]) for m in range(2)]
    expected = train_tasks(form, [parts, parts[::-1]], None)
    for found in ranks(2).run(train_tasks_on_rank, form, 1):
        check(found, expected)


def test_a_batch_that_is_not_given_to_the_step_cannot_be_followed():
    batch = batch_of(0)
    words = refusal(lambda model: by_token(model(batch["tokens"]), batch).mean())
    assert "Call the step with the batch" in words


@pytest.mark.parametrize("alone", (nightly(True), False))
def test_a_penalty_of_gradients_is_refused(alone):
    """Which samples a gradient is of is not followed."""

    def loss_of(model, batch):
        each = by_token(model(batch["tokens"]), batch)
        (slope,) = torch.autograd.grad(each.sum(), model.embedding.weight, create_graph=True)
        penalty = slope.square().sum()
        return penalty if alone else each.sum() / batch["mask"].sum() + penalty

    assert "is computed of a gradient" in refusal(loss_of, batch_of(0))


def test_batch_norm_is_said_to_stay_a_ranks_own(caplog):
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    options = {"lowering": "eager", "stage": 0, "loss": "global"}
    step = torch.compile(step, backend="zero", options=options)
    with caplog.at_level("WARNING", logger="zerofx"):
        step(torch.randn(5, 3))
    assert "statistics of batch norm stay each rank's own" in caplog.text
    assert "counted over all ranks" in str(zerofx.explain(step))


@pytest.mark.slow(reason="a program of two ranks for each way to give a count")
@pytest.mark.parametrize("form", only(("given_globally",), [given.__name__ for given in GIVEN]))
def test_a_count_that_the_user_gives(ranks, form):  # noqa: F811
    arguments = 1, False, False, 1
    expected = of_small(train_alone, "cross_entropy", 2, *arguments)
    for found in ranks(2).run(of_small, train_on_rank, form, {"stage": 1}, *arguments):
        check(found, expected)


@pytest.mark.slow(reason="ranks compile and train")
def test_what_is_meant_for_each_rank_stays_a_mean_over_ranks(ranks):  # noqa: F811
    arguments = 1, False, False, 1
    expected = of_small(train_alone, "balanced_by_two", 2, *arguments)
    by_rank = train_on_rank, "balanced_by_rank", {"stage": 1}, *arguments
    for found in ranks(2).run(of_small, *by_rank):
        check(found, expected)


@pytest.mark.parametrize(
    "own_part",
    (
        lambda loss, count: zerofx.per_rank(loss.square()),
        nightly(lambda loss, count: loss * count / zerofx.global_count(8)),
    ),
)
def test_what_is_meant_for_each_rank_and_reads_what_all_divide_is_refused(own_part):
    def loss_of(model, batch):
        loss = masked(model(batch["tokens"]), batch)
        return loss + own_part(loss, batch["mask"].sum())

    words = refusal(loss_of, batch_of(0), line="losses.py:")
    assert "Compute that part once more, inside of what per_rank is given" in words


def test_by_rank_marks_change_nothing():
    check(
        of_small(train, "given_locally", [[batch_of(0)]], {"stage": 0}),
        of_small(train, "cross_entropy", [[batch_of(0)]], None),
    )


@pytest.mark.parametrize("checkpoints", (False, True))
def test_marks_are_nothing_to_other_compilers(checkpoints):
    def loss_of(x):
        return zerofx.per_rank(x.square().sum() / zerofx.local_count(x.new_tensor(4.0)))

    def function(x):
        return checkpoint(loss_of, x, use_reentrant=False) if checkpoints else loss_of(x)

    x = torch.randn(3, requires_grad=True)
    expected = torch.autograd.grad(function(x), x)
    found = torch.autograd.grad(torch.compile(function, backend="aot_eager")(x), x)
    torch.testing.assert_close(found, expected)


def test_by_rank_a_checkpointed_mark_changes_nothing():
    def loss_of(out, mask):
        return zerofx.per_rank((out * mask).sum() / zerofx.local_count(mask.sum()))

    def train_checkpointed(options):
        torch.manual_seed(7)
        model = nn.Linear(3, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

        def step(x, mask):
            checkpoint(loss_of, model(x), mask, use_reentrant=False).backward()
            optimizer.step()

        if options:
            step = torch.compile(step, backend="zero", options=options)
        step(torch.ones(2, 3), torch.tensor([[1.0, 0, 1], [0, 1, 0]]))
        return model.weight.detach()

    found = train_checkpointed({"stage": 0, "lowering": "eager"})
    torch.testing.assert_close(found, train_checkpointed(None))


def accumulate(loss_of, updates: bool):
    torch.manual_seed(7)
    model = Small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def add(batch):
        loss_of(model(batch["tokens"]), batch).backward()
        if updates:
            optimizer.step()

    step = torch.compile(
        add, backend="zero", options={"lowering": "eager", "stage": 0, "loss": "global"}
    )
    step(batch_of(0))
    return model


@pytest.mark.slow(reason="three programs with a loss over all ranks, one of which is refused")
@pytest.mark.parametrize("updates", (False, nightly(True)))
def test_gradients_of_several_calls_need_a_count_of_them_all(updates):
    with pytest.raises(StepError, match="gradients of several calls are added up"):
        accumulate(RIGHT["cross_entropy"], updates=False)
    for given in (given_locally, given_and_moved):
        model = accumulate(given, updates)
        assert model.head.weight.grad is not None


def test_a_count_is_given_in_one_way():
    with pytest.raises(StepError, match="Count both alike"):
        accumulate(given_both_ways, updates=True)


@pytest.mark.nightly
def test_gradients_that_are_set_to_zeros_are_of_one_call():
    torch.manual_seed(7)
    model = Small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def step(batch):
        optimizer.zero_grad(set_to_none=False)
        loss = masked(model(batch["tokens"]), batch)
        loss.backward()
        optimizer.step()
        return loss

    options = {"lowering": "eager", "stage": 0, "loss": "global"}
    step = torch.compile(step, backend="zero", options=options)
    assert step(batch_of(0)) > step(batch_of(0))


def test_a_loss_of_many_numbers_is_refused():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        model(x).backward(torch.ones(4, 2))
        optimizer.step()

    options = {"lowering": "eager", "stage": 0, "loss": "global"}
    with pytest.raises(StepError, match="a loss that is one number"):
        torch.compile(step, backend="zero", options=options)(torch.randn(4, 3))


def counting(model, x, counts):
    """Has gradients of a sum, and divides them by how many count on all ranks."""
    (model(x).square().sum(1) * counts).sum().backward()
    count = counts.sum()
    world_size = 1
    if dist.is_initialized():
        dist.all_reduce(count)
        world_size = dist.get_world_size()
    for p in model.parameters():
        p.grad.mul_(world_size / count)


def contrasting(model, x, counts):
    """Tells each row's pair from the pairs of all ranks' rows."""
    out, pairs = model(x), model(x + counts[:, None])
    if dist.is_initialized():
        out, pairs = (all_gather_tensor_autograd(z, 0, dist.group.WORLD) for z in (out, pairs))
    F.cross_entropy(out @ pairs.T, torch.arange(len(out))).backward()


def trained_by(backward, alone=False):
    """A linear layer's values after three steps, with all ranks' batches if it trains alone."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x, counts):
        backward(model, x, counts)
        optimizer.step()
        optimizer.zero_grad()

    if not alone:
        step = torch.compile(step, backend="zero", options={"stage": 3, "lowering": "eager"})
    for number in range(3):
        generator = torch.Generator().manual_seed(number)
        x, counts = torch.randn(8, 5, generator=generator), torch.ones(8)
        counts[:3] = 0.0
        rows = slice(None) if alone else slice(4 * dist.get_rank(), 4 * dist.get_rank() + 4)
        step(x[rows], counts[rows])
    return model.state_dict()


@pytest.mark.parametrize("backward", first(1, [counting, contrasting]))
@pytest.mark.slow(reason="two ranks trace and train")
def test_a_steps_own_collectives_over_all_ranks_train_as_one_process(ranks, backward):  # noqa: F811
    expected = trained_by(backward, alone=True)
    for found in ranks(2).run(trained_by, backward):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value)


def counting_alone(model, x, counts):
    (model(x).square().sum(1) * counts).sum().backward()
    count = counts.sum()
    dist.all_reduce(count, group=OWN_GROUP[0])
    for p in model.parameters():
        p.grad.div_(count)


OWN_GROUP = []


def refused_in_a_part_of_the_ranks():
    OWN_GROUP[:] = [dist.new_group([rank]) for rank in range(2)][dist.get_rank() :]
    with pytest.raises(StepError, match="is computed from values that differ between ranks"):
        trained_by(counting_alone)


@pytest.mark.slow(reason="two ranks trace")
def test_a_reduction_over_some_ranks_is_no_number_of_all(ranks):  # noqa: F811
    ranks(2).run(refused_in_a_part_of_the_ranks)
