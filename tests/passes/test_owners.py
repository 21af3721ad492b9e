"""shard_optimizer gives each whole-tensor update to one rank, and balances their arithmetic."""

from __future__ import annotations

import functools
import itertools
import re

import pytest
import torch
from torch import nn

from tests.kit.covering import each_pair, only
from tests.kit.programs import (
    assert_program,
    assert_same_numerics,
    capture,
    clone,
    context_of,
    execute,
    mlp_step,
    nodes_of,
    rewritten,
    rewritten_by_rank,
)
from zerofx.codegen.rewrite.whole_tensors import newton_schulz_flops
from zerofx.cost import program
from zerofx.cost.program import live_bytes
from zerofx.cost.timeline import predict
from zerofx.cost.traffic import wire_bytes
from zerofx.hardware import NOMINAL
from zerofx.ir import ops
from zerofx.ir.collectives import schedule
from zerofx.ir.mesh import balanced
from zerofx.ir.roles import provenance
from zerofx.passes.fuse.write_back import write_back

STAGES = (1, 2, 3)


@functools.cache
def muon_step(clip: bool = False):
    """Two matrices by Muon, their biases by SGD."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    muon = torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=0.02)
    sgd = torch.optim.SGD([p for p in model.parameters() if p.ndim == 1], lr=0.1)

    def step(x):
        loss = model(x).pow(2).mean()
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        muon.step()
        sgd.step()
        muon.zero_grad()
        sgd.zero_grad()
        return loss

    return capture(step, torch.randn(4, 6), world_size=2)


@functools.cache
def one_matrix():
    torch.manual_seed(0)
    w = nn.Parameter(torch.randn(4, 2))
    optimizer = torch.optim.Muon([w], lr=0.1)

    def step(x):
        (x @ w).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return capture(step, torch.randn(3, 4), world_size=2)


def test_update_goes_on_with_what_its_owner_has_computed():
    flops = newton_schulz_flops((4, 2), {"ns_steps": 5})
    assert_program(
        rewritten(one_matrix()),
        f"""
        ...
        wait_1 = zerofx.wait(reduce_scatter_start)
        on_owners = zerofx.on_owners([w], [wait_1], Muon, [0], [0], {flops}, None)
        getitem = getitem(on_owners, 0)
        update = zerofx.update(w, getitem, Muon, 0, None)
        return []
        """,
    )


@pytest.mark.parametrize(
    ("clip", "stage"), each_pair((False, True), STAGES, default=[(False, 1), (False, 3), (True, 2)])
)
def test_every_stage_computes_the_captured_step(stage, clip):
    step = muon_step(clip)
    ranks = rewritten_by_rank(step, stage=stage, update_in_backward=True)
    assert_same_numerics(execute(step), execute(ranks), bitwise=not clip)


@pytest.mark.parametrize("world_size", only((3,), (1, 3, 5)))
def test_any_number_of_ranks_computes_the_captured_step(world_size):
    step = muon_step()
    ranks = rewritten_by_rank(step, world_size)
    (node,) = nodes_of(ranks[0], ops.on_owners)
    assert node.args[4] == [0, min(world_size - 1, 1)]
    assert_same_numerics(execute(clone(step, world_size)), execute(ranks), bitwise=False)


@pytest.mark.parametrize("stage", (0, *STAGES))
def test_elementwise_optimizers_own_nothing(stage):
    assert not nodes_of(rewritten(mlp_step(), stage=stage), ops.on_owners)


def test_stage_0_updates_whole_matrices_everywhere():
    assert not nodes_of(rewritten(muon_step(), stage=0), ops.on_owners)


def test_one_exchange_serves_all_matrices_of_a_step():
    step = rewritten(muon_step())
    (node,) = nodes_of(step, ops.on_owners)
    assert [step.table[index].name for index in node.args[3]] == ["0.weight", "2.weight"]
    assert sorted(node.args[4]) == [0, 1]
    assert node.args[5] == newton_schulz_flops((5, 6), {"ns_steps": 5})
    assert "2 tensors, owned by 2 of 2 ranks; one has 78% of the arithmetic" in (
        provenance(node).reason
    )


@pytest.mark.parametrize("stage", (1, 2))
def test_matrices_are_still_updated_where_their_bucket_lies(stage):
    step = rewritten(muon_step(), stage=stage, bucket=True)
    write_back(step.gm, context_of(step, stage=stage, bucket=True))
    in_place = [node.args[2] for node in nodes_of(step, ops.write_back)]
    assert sorted(index for bucket in in_place for index in bucket) == [0, 1, 2, 3]


def test_ranks_compare_their_owners():
    step = rewritten(muon_step())
    lines = schedule(step.gm, step.table, 3)
    assert "updates of whole 0.weight on 0, 2.weight on 1" in lines


def test_a_matrix_travels_to_its_owner_once_and_back_once():
    """The sum over ranks; what an owner has already does not travel."""
    ranks = rewritten_by_rank(muon_step())
    sent = sum(wire_bytes(rank.gm, 2).exchanges for rank in ranks)
    padding = 2 * 4 * 4 * 2  # each matrix's, where a bucket ends
    assert 0 <= sent - 2 * (30 + 15) * 4 // 2 <= padding


def test_plans_count_what_travels_and_what_owners_hold(monkeypatch):
    step = rewritten(muon_step())
    (node,) = nodes_of(step, ops.on_owners)
    share = -(-(30 + 15) * 4 // 2)
    here = list(step.graph.nodes).index(node)
    alive = live_bytes(step.graph, 2, table=step.table)
    monkeypatch.setattr(program, "OWNER_TEMPORARIES", 0)
    without = live_bytes(step.graph, 2, table=step.table)
    assert alive[here] - without[here] == 3 * 30 * 4, "of the owner who has most"
    assert alive[:here] + alive[here + 1 :] == without[:here] + without[here + 1 :]
    transfer = predict(step.graph, NOMINAL, step.table, 2).transfers[node]
    assert transfer.seconds == transfer.exposed_s == 2 * NOMINAL.transfer_s(share, 2)


class Lamb(torch.optim.Optimizer):
    """Scaled by a norm of the whole."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.sub_(p.grad, alpha=0.1 * min((p.norm() / p.grad.norm()).item(), 10.0))


@functools.cache
def lamb_step(sizes: tuple[int, ...] = (6, 5, 3)):
    torch.manual_seed(0)
    model = nn.Sequential(*map(nn.Linear, sizes, sizes[1:]))
    optimizer = Lamb(model.parameters())

    def step(x):
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return capture(step, torch.randn(4, sizes[0]), world_size=2)


@pytest.mark.parametrize(("stage", "owner"), ((3, 0), (0, -1)))
def test_an_own_step_takes_parameters_and_gives_new_values(stage, owner):
    torch.manual_seed(0)
    w = nn.Parameter(torch.randn(4, 2))
    optimizer = Lamb([w])

    def step(x):
        (x @ w).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    program = rewritten(capture(step, torch.randn(3, 4), world_size=2), stage=stage)
    start = "reduce_scatter_start" if stage else "all_reduce_start"
    assert_program(
        program,
        f"""
        ...
        wait{"_1" if stage else ""} = zerofx.wait({start})
        on_owners = zerofx.on_owners([w], [wait{"_1" if stage else ""}], Lamb, [0], [{owner}], \
8, None, own_step=True)
        getitem = getitem(on_owners, 0)
        update = zerofx.update(w, getitem, Lamb, 0, None)
        return []
        """,
    )
    (node,) = nodes_of(program, ops.on_owners)
    assert re.search("Lamb chooses what to do by the value of a tensor", provenance(node).reason)


@pytest.mark.parametrize("stage", only((0, 3), (0, *STAGES)))
def test_every_stage_computes_the_captured_own_step(stage):
    step = lamb_step()
    assert_same_numerics(execute(step), execute(rewritten_by_rank(step, stage=stage)), bitwise=True)


def test_plans_count_what_own_steps_send_and_hold():
    sent = [wire_bytes(rank.gm, 2) for rank in rewritten_by_rank(lamb_step())]
    numel, padding = 30 + 5 + 15 + 3, 3 * 4 * 4 * 2
    assert 0 <= sum(one.exchanges for one in sent) - 3 * numel * 4 // 2 <= padding
    assert [one.scalars for one in sent] == [512, 512]
    step = rewritten(lamb_step(), stage=0)
    assert not wire_bytes(step.gm, 2).exchanges
    (node,) = nodes_of(step, ops.on_owners)
    assert predict(step.graph, NOMINAL, step.table, 2).transfers[node].seconds == 0


def test_work_is_balanced():
    assert balanced([3, 3, 2, 2, 2], 2) == ([0, 1, 0, 1, 0], 7)
    assert balanced([8, 1, 1, 1], 2) == ([0, 1, 1, 1], 8)
    assert balanced([5], 4) == ([0], 5)
    assert balanced([0, 0, 0], 2) == ([0, 0, 0], 0)


def test_no_rank_has_a_third_more_than_it_must():
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        work = torch.randint(1, 100, (7,), generator=generator).tolist()
        best = min(
            max(
                sum(w for w, owner in zip(work, owners, strict=True) if owner == rank)
                for rank in range(3)
            )
            for owners in itertools.product(range(3), repeat=7)
        )
        assert balanced(work, 3)[1] <= best * 4 / 3
