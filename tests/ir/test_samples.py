"""Samples are where a view has put them."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zerofx
from tests.kit.covering import only
from tests.kit.programs import capture, nodes_of
from zerofx.errors import StepError
from zerofx.ir import ops
from zerofx.ir.samples.views import reshaped

NONE = None


@pytest.mark.parametrize(
    "dims, before, after, expected",
    [
        (((1, 4), NONE), (4, 6), (24,), ((1, 4),)),
        (((1, 4),), (24,), (4, 6), ((1, 4), NONE)),
        (((1, 24),), (24,), (4, 6), ((1, 4), (1, 6))),
        ((NONE, (1, 3), NONE), (6, 3, 8), (6, 6, 4), (NONE, (1, 3), NONE)),
        ((NONE, (1, 3), NONE), (6, 6, 4), (18, 8), ((6, 3), NONE)),
        (((6, 3), NONE), (18, 8), (6, 3, 8), (NONE, (1, 3), NONE)),
        (((1, 4), NONE, NONE), (4, 1, 5), (4, 5), ((1, 4), NONE)),
        # One sample, whose dimension no factor shows.
        (((1, 1), NONE), (1, 6), (6,), ((1, 1),)),
        ((NONE, (1, 1), NONE), (6, 1, 8), (6, 8), ((6, 1), NONE)),
        (((6, 1), NONE), (6, 8), (6, 1, 8), (NONE, (1, 1), NONE)),
        ((NONE, (1, 1), NONE), (6, 1, 8), (6, 2, 4), (NONE, (1, 1), NONE)),
    ],
)
def test_a_view_keeps_samples_where_they_are(dims, before, after, expected):
    assert reshaped(dims, before, after) == expected


PARTS = {
    "chunk": lambda x: x.chunk(2),
    "split": lambda x: x.split([2, 2]),
    "slice": lambda x: (x[:2], x[2:]),
    "joined again": lambda x: (torch.cat([*x.chunk(2)]),),
}


def test_a_batch_of_one_row_is_followed_through_attention_that_returns_its_weights():
    model = nn.MultiheadAttention(6, 2, batch_first=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        optimizer.zero_grad()
        model(x, x, x)[0].square().mean().backward()
        optimizer.step()

    assert nodes_of(
        capture(step, torch.randn(1, 3, 6), world_size=2, loss="global"), ops.over_ranks
    )


@pytest.mark.parametrize("way", only(("chunk",), PARTS))
def test_a_part_of_a_batch_has_as_many_samples_as_it_is_long(way):
    """Or a view behind would take its tokens for samples, which attention mixes."""
    model = nn.MultiheadAttention(6, 2, batch_first=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x, y):
        optimizer.zero_grad()
        for part, labels in zip(PARTS[way](x), PARTS[way](y), strict=True):
            logits, _ = model(part, part, part, need_weights=False)
            F.cross_entropy(logits.flatten(1), labels).backward()
        optimizer.step()

    batch = torch.randn(4, 3, 6), torch.zeros(4, dtype=torch.int64)
    captured = capture(step, *batch, world_size=2, loss="global")
    assert nodes_of(captured, ops.over_ranks)


def num_counts(loss_of, *batch, is_symbol=False):
    """Return how many counts are summed over ranks, for a loss of what a linear layer computes."""
    x = torch.randn(4, 6)
    if is_symbol:
        torch._dynamo.mark_dynamic(x, 0)
    model = nn.Linear(6, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x, *given):
        optimizer.zero_grad()
        loss_of(model(x), *given).backward()
        optimizer.step()

    captured = capture(step, x, *batch, world_size=2, loss="global")
    return len(nodes_of(captured, ops.over_ranks)) - 2  # ranks, and those that have data


@pytest.mark.parametrize("counts_others", (True, False))
def test_a_count_of_what_a_mask_leaves_out_is_summed_over_ranks(counts_others):
    """Its length is a plain number in the traced program, as in transformers' LabelSmoother."""

    def loss_of(out, padding):
        counts = padding.long().sum()
        counts = padding.numel() - counts if counts_others else counts
        return out.square().sum() / counts

    assert num_counts(loss_of, torch.arange(4) > 2) == (2 if counts_others else 1)


@pytest.mark.parametrize("is_sum", (True, False))
def test_what_a_users_count_divides_has_counts_of_all_ranks_if_it_is_a_sum(is_sum):
    """Else it is made a sum of this rank by this rank's count, which the mean was divided by."""

    def loss_of(out, y):
        counts = (y >= 0).float()
        total = (out.square().sum(1) * counts / counts.mean()).sum()
        total = total if is_sum else F.cross_entropy(out, y, ignore_index=-1) * counts.sum()
        return total / zerofx.global_count(8)

    assert num_counts(loss_of, torch.tensor([1, -1, 0, 1])) == (2 if is_sum else 0)


@torch.library.custom_op("test_samples::mean_and_each", mutates_args=())
def mean_and_each(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.mean(), x.square()


mean_and_each.register_fake(lambda x: (x.new_empty(()), torch.empty_like(x)))
mean_and_each.register_autograd(lambda ctx, mean, each: mean + each)


def test_a_number_that_an_unknown_operator_makes_of_samples_is_not_the_same_on_all_ranks():
    """Its other results are of samples, as those of torch's chunked linear_cross_entropy."""
    with pytest.raises(StepError, match="an operator that the samples cannot be followed through"):
        num_counts(lambda out: mean_and_each(out)[0] + out.square().mean())


DRAWN = {
    "flat": lambda y: torch.rand(y.numel()),
    "second": lambda y: torch.rand(3, y.shape[0]).t().flatten(),
    "by probabilities": lambda y: torch.full((12,), 0.5).bernoulli(),
}


@pytest.mark.parametrize("way", DRAWN)
def test_a_mask_that_is_drawn_before_its_length_is_known_is_refused(way):
    model = nn.Linear(6, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x, y):
        keep = (DRAWN[way](y) < 0.5).float()
        optimizer.zero_grad()
        each = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="none")
        ((each * keep).sum() / keep.sum()).backward()
        optimizer.step()

    batch = torch.randn(4, 3, 6), torch.zeros(4, 3, dtype=torch.int64)
    with pytest.raises(StepError, match="what is drawn as long as the batch, and not of it"):
        capture(step, *batch, world_size=2, loss="global")


def test_a_mask_that_is_drawn_over_features_is_none_of_the_batch():
    """Though its length may be a multiple of the batch's."""

    def loss_of(out):
        mask = (torch.rand(8) < 0.5).float()
        return (out.repeat(1, 4).square() * mask).sum() / mask.sum()

    assert num_counts(loss_of) == 0


def test_labels_of_the_largest_are_counted_as_those_of_argmax_are():
    def loss_of(find):
        def loss(out):
            hard = find(out)
            return (out.square().sum(-1) * hard).sum() / hard.sum()

        return loss

    argmax = num_counts(loss_of(lambda out: out.argmax(-1)))
    assert num_counts(loss_of(lambda out: out.max(-1)[1])) == argmax == 1


@pytest.mark.parametrize("is_mean", (True, False))
def test_a_count_of_what_a_network_decides_is_summed_over_ranks(is_mean):
    teacher = nn.Linear(2, 2).requires_grad_(False)

    def loss_of(out):
        confidence, labels = teacher(out.detach()).softmax(-1).max(-1)
        if is_mean:
            return F.cross_entropy(out, labels)
        keep = (confidence > 0.6).float()
        return (F.cross_entropy(out, labels, reduction="none") * keep).sum() / keep.sum()

    assert num_counts(loss_of) == 1


def weighed(out, weights):
    return (out * weights).sum() / weights.sum()


@pytest.mark.parametrize(
    "loss_of",
    [
        lambda out: out.square().mean() + out.new_zeros(()),
        lambda out: (out + out.new_zeros(3, 4, 2)[0, 0]).square().mean(),
        lambda out: weighed(out, out.new_ones(4, 1)),
    ],
)
def test_what_a_tensor_makes_is_of_samples_if_it_begins_as_that_does(loss_of):
    assert num_counts(loss_of) == 1


@pytest.mark.parametrize(
    "loss_of, words",
    [
        (lambda out: weighed(out, out.new_ones(1, 4).t()), "what is made as long as the batch"),
        (lambda out: out.sum() / out.new_full((), 4.0), "a number that is made of the batch's"),
    ],
)
def test_what_a_tensor_makes_of_the_batchs_length_is_refused(loss_of, words):
    with pytest.raises(StepError, match=words):
        num_counts(loss_of)


@pytest.mark.parametrize(
    "loss_of, words",
    [
        (lambda out: weighed(out, torch.ones(len(out), 1)), "what is made as long as the batch"),
        (lambda out: out.sum() / torch.full((), len(out)), "a number that is made of the batch's"),
    ],
)
def test_what_is_made_of_a_length_that_is_a_symbol_is_refused(loss_of, words):
    with pytest.raises(StepError, match=words):
        num_counts(loss_of, is_symbol=True)
