"""update_in_backward: a parameter is updated as soon as its gradient is there, and not before."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.kit.covering import each_pair
from tests.kit.programs import (
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
from zerofx import GraphError
from zerofx.ir import ops
from zerofx.ir.graph import is_backward, program_order
from zerofx.ir.parameters import Place
from zerofx.ir.roles import role
from zerofx.verify.verifier import verify

STAGES = (0, 1, 2, 3)
FACTS = frozenset({"averaged_gradients"})


def moved(captured, stage=3, **options):
    return rewritten(captured, stage=stage, update_in_backward=True, **options)


@functools.cache
def tied_step():
    torch.manual_seed(0)
    embedding = nn.Embedding(7, 5)
    layer = nn.Linear(5, 5)
    parameters = [*embedding.parameters(), *layer.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=0.01)

    def step(tokens):
        hidden = torch.tanh(layer(embedding(tokens)))
        loss = (hidden @ embedding.weight.t()).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return capture(step, torch.arange(6).view(2, 3), world_size=2)


@functools.cache
def reading_afterwards():
    """The step returns what the new weights make of the batch."""
    torch.manual_seed(0)
    layer = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)

    def step(x):
        loss = layer(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            return loss, layer(x).pow(2).mean()

    return capture(step, torch.randn(2, 4), world_size=2)


@functools.cache
def decaying_step():
    """One weight is changed by hand between backward and the update."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(x):
        loss = model(x).pow(2).mean()
        loss.backward()
        with torch.no_grad():
            model[2].weight.mul_(0.9)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return capture(step, torch.randn(2, 4), world_size=2)


def clipping_with_gradients_of_earlier_calls():
    """Only the weights are updated: of the biases only gradients come in."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    optimizer = torch.optim.SGD([model[0].weight, model[2].weight], lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)

    def step(x):
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        return x.sum()

    return capture(step, torch.randn(2, 4), world_size=2)


STEPS = {
    "decaying": decaying_step,
    "mlp": mlp_step,
    "clipped": lambda: mlp_step(clip=True),
    "tied": tied_step,
    "reading afterwards": reading_afterwards,
}


@pytest.mark.parametrize("stage", (0, 2, 3))
def test_all_but_the_last_updates_stand_before_the_end_of_backward(stage):
    program = moved(mlp_step(num_layers=4), stage)
    order = program_order(program.graph)
    last = max(order[n] for n in program.graph.nodes if is_backward(n) and role(n) is None)
    late = [n for n in nodes_of(program, ops.update) if order[n] > last]
    assert len(nodes_of(program, ops.update)) == 8 and len(late) <= 2


def gradients_alive(program) -> int:
    """The most reduced gradients that wait for their update at one moment."""
    order = program_order(program.graph)
    spans = [
        (order[node.args[1]], order[node])
        for node in nodes_of(program, ops.update)
        if node.args[1].target is ops.wait
    ]
    assert spans
    return max(sum(start <= moment < stop for start, stop in spans) for moment, _ in spans)


def test_gradients_never_all_exist_at_once():
    deep = mlp_step(num_layers=4)
    assert gradients_alive(rewritten(deep)) == 8
    assert gradients_alive(moved(deep)) <= 3


def test_updates_stay_behind_the_norm_of_all_gradients():
    program = moved(mlp_step(clip=True))
    order = program_order(program.graph)
    norms = [n for n in nodes_of(program, ops.wait) if role(n) == "reduce_scalar"]
    assert len(norms) == 1
    assert all(order[norms[0]] < order[update] for update in nodes_of(program, ops.update))


@pytest.mark.parametrize(("name", "stage"), each_pair(STEPS, STAGES))
def test_nothing_else_changes(name, stage):
    captured = STEPS[name]()
    before, after = rewritten(captured, stage=stage), moved(captured, stage)
    assert_same_numerics(execute(before), execute(after))


@pytest.mark.parametrize("name", STEPS)
def test_the_old_value_has_no_reader_left(name):
    """In a world of one a gathered parameter is its shard: a late reader would see the update."""
    program = moved(STEPS[name]())
    order = program_order(program.graph)
    for update in nodes_of(program, ops.update):
        pending, seen = [update.args[0]], set()
        while pending:
            node = pending.pop()
            for user in node.users:
                if user in seen or user is update or user.op == "output":
                    continue
                seen.add(user)
                assert order[user] < order[update] or user.target is torch.ops.aten.copy_.default
                if role(user) in ("gather", "whole", "pack", "free"):
                    pending.append(user)


def test_an_update_before_the_last_reader_is_found():
    program = clone(rewritten(mlp_step()))
    update = nodes_of(program, ops.update)[0]
    gathers = [n for n in nodes_of(program, ops.wait) if n.args[0].args[0] is update.args[0]]
    assert gathers
    gradient = update.args[1]
    whole = next(iter(gathers[-1].users))
    with program.graph.inserting_after(gradient):
        late = program.graph.call_function(torch.ops.aten.alias.default, (gathers[-1],))
    late.meta = dict(gathers[-1].meta)
    free = next(user for user in gathers[-1].users if user.target is ops.free)
    update.append(late)
    late.append(free)
    assert whole is not late
    with pytest.raises(GraphError, match="after .* has overwritten it"):
        verify(program.gm, context_of(program).table, FACTS)


def test_a_bucket_may_have_parameters_of_which_only_gradients_come_in():
    captured = clipping_with_gradients_of_earlier_calls()
    places = [Place(0, *place, shard_numel=22) for place in ((0, 20), (20, 15), (35, 5), (40, 4))]
    infos = zip(captured.table, places, strict=True)
    captured.table.parameters = tuple(replace(info, assigned=place) for info, place in infos)
    before, after = (
        rewritten_by_rank(captured, bucket=False, update_in_backward=moves)
        for moves in (False, True)
    )
    assert_same_numerics(execute(before), execute(after))
