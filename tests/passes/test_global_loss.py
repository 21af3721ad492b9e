"""global_loss: one collective for all counts, before forward, and one for what is returned."""

import functools

import pytest
import torch
from torch import nn

from tests.kit.covering import each_value, only
from tests.kit.programs import assert_same_numerics, capture, execute, nodes_of, rewritten
from zerofx.ir import ops
from zerofx.ir.graph import is_backward
from zerofx.ir.roles import Role, role

aten = torch.ops.aten


@functools.cache
def counted_step(micro_batches=1, axes=()):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x, y, mask):
        optimizer.zero_grad()
        for number in range(micro_batches):
            out, weights = model(x[:, number]), mask[:, number]
            each = nn.functional.cross_entropy(out, y[:, number], reduction="none")
            loss = (each * weights).sum() / weights.sum().clamp(min=1) + out.square().mean()
            (loss / micro_batches).backward()
        optimizer.step()
        return loss, loss.detach() / 2, out.detach().mean()

    y, mask = torch.tensor([[1, 2], [3, 0], [0, 1]]), torch.tensor([[1.0, 1], [0, 0], [1, 0]])
    inputs = torch.randn(3, micro_batches, 5), y[:, :micro_batches], mask[:, :micro_batches]
    return capture(step, *inputs, world_size=4, axes=axes, loss="global")


def summed(captured):
    return rewritten(captured, until="global_loss", loss="global")


def starts(captured):
    return nodes_of(captured, ops.all_reduce_start)


@pytest.mark.parametrize(
    ("micro_batches", "axes"), each_value((1, 2), ((), (("node", 2), ("gpu", 2))))
)
def test_it_computes_what_capture_has_marked(micro_batches, axes):
    captured = counted_step(micro_batches, axes)
    assert nodes_of(captured, ops.over_ranks)
    after = summed(captured)
    assert not nodes_of(after, ops.over_ranks)
    assert_same_numerics(execute(captured), execute(after), bitwise=False)


@pytest.mark.parametrize("micro_batches", only((1,), (1, 2)))
def test_all_counts_travel_together_before_forward_and_results_behind_the_loss(micro_batches):
    after = summed(counted_step(micro_batches))
    counts, results = starts(after)
    assert (role(counts), role(results)) == (Role.LOSS_COUNT, Role.LOSS_VALUE)
    assert counts < min(nodes_of(after, aten.addmm.default))
    assert counts.meta["val"].numel() * counts.meta["val"].itemsize <= 64
    assert results.meta["val"].numel() * results.meta["val"].itemsize <= 64
    waits = nodes_of(after, ops.wait)
    assert nodes_of(after, aten.addmm.default)[1] < waits[0], "a forward pass hides the counts"
    # Nothing in the step waits for what is returned.
    assert waits[-1].args[0] is results
    assert max(filter(is_backward, after.graph.nodes)) < waits[-1]


def test_by_rank_there_is_nothing_to_do():
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()

    captured = capture(step, torch.randn(4, 3))
    assert not nodes_of(captured, ops.over_ranks, ops.count, ops.loss_part)
    assert not starts(summed(captured))


@pytest.mark.parametrize("loss", only(("global",), ("rank", "global")))
def test_statistics_of_batch_norms_are_summed_up_one_after_the_other(loss):
    """Those of a batch, which could go to the front, are computed of each other."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    options = {"batch_norm": "global", "loss": loss}
    captured = capture(step, torch.randn(3, 5), world_size=4, **options)
    after = rewritten(captured, until="global_loss", **options)
    assert not nodes_of(after, ops.over_ranks)
    # How many samples both norms have, with the sum over the batch; the rest one by one.  Nobody
    # asks for the batch's gradient.
    assert len(starts(after)) == 1 + 1 + 2 + 1
    assert_same_numerics(execute(captured), execute(after), bitwise=False)
