"""What ``offload`` names stays on the device as far as ``memory_budget`` has room for it."""

import dataclasses
import functools

import pytest
import torch
from torch import nn

from tests.kit.covering import each_pair, only
from tests.kit.programs import (
    assert_same_numerics,
    capture,
    clone,
    context_of,
    execute,
    rewritten,
    rewritten_by_rank,
)
from zerofx import StepError
from zerofx.cost.program import live_bytes
from zerofx.ir import ops
from zerofx.ir.interface import recorded
from zerofx.passes.manager import run_pipeline
from zerofx.passes.pipeline import PIPELINE, rewrites

OFFLOADED = {"offload": "optimizer", "update_in_backward": True, "bucket": True}
WIDTH = 16
LAYER = 4 * WIDTH * WIDTH
"""Bytes of one layer's weight."""


@functools.cache
def layers_step(world_size=2, clip=False, number=4, twice=False, optimizer=torch.optim.AdamW):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(number)))
    found = optimizer(model.parameters(), lr=0.1)

    def step(x):
        for _ in range(2 if twice else 1):
            loss = model(x).square().mean()
            loss.backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            found.step()
            found.zero_grad()
        return loss

    return capture(step, torch.randn(3, WIDTH), world_size=world_size)


def updated_on_device(graph):
    return {node.args[3] for node in graph.nodes if node.target is ops.update}


def assert_same(captured, budget, stage):
    options = {"bucket_bytes": LAYER, "stage": stage}
    before = rewritten_by_rank(captured, **options)
    after = rewritten_by_rank(captured, **OFFLOADED, **options, memory_budget=budget)
    assert_same_numerics(execute(before), execute(after))


def planned(budget, stage=3, world_size=2, **how):
    captured = layers_step(world_size, **how)
    options = {**OFFLOADED, "stage": stage, "bucket_bytes": LAYER}
    return captured, rewritten(captured, rank=0, memory_budget=budget, **options)


def smallest_budget(stage, **how):
    with pytest.raises(StepError, match="allocates") as caught:
        planned(1, stage, **how)
    return int(str(caught.value).split("this step allocates ")[1].split()[0])


@pytest.mark.slow(reason="whole programs are rewritten and run")
@pytest.mark.parametrize(
    ("stage", "clip"), each_pair((1, 2, 3), (False, True), default=[(3, False)])
)
def test_with_every_shard_of_room_one_more_bucket_stays_the_last_reduced_first(stage, clip):
    least = smallest_budget(stage, clip=clip)
    states = 2 * LAYER // 2  # two moments of half a weight
    on_device = []
    for room in range(5):
        captured, program = planned(least + room * states, stage, clip=clip)
        there = updated_on_device(program.graph)
        assert len(there) == min(room, 4)
        on_device.append(there)
        if room:
            _, short = planned(least + room * states - 1, stage, clip=clip)
            assert updated_on_device(short.graph) == on_device[room - 1]
        assert_same(captured, least + room * states, stage)
    # Backward comes to the first layer last; stage 1 reduces all at the end if it must clip.
    last = [3, 2, 1, 0] if stage == 1 and clip else [0, 1, 2, 3]
    assert on_device == [set(last[:number]) for number in range(5)]


@pytest.mark.slow(reason="whole programs are rewritten and run")
@pytest.mark.parametrize(
    ("stage", "clip"), each_pair((1, 2, 3), (False, True), default=[(1, False)])
)
def test_what_is_allocated_and_what_stays_is_within_the_budget(stage, clip):
    least = smallest_budget(stage, clip=clip)
    for budget in range(least, least + 6 * LAYER, LAYER // 3):
        _, program = planned(budget, stage, clip=clip)
        alive = max(live_bytes(program.graph, 2, table=program.table))
        assert alive + len(updated_on_device(program.graph)) * LAYER <= budget


def test_states_go_before_gathered_layers():
    least = smallest_budget(3)
    _, program = planned(least + 4 * LAYER)
    there = recorded(program.graph).decisions.residency
    assert there.state_bytes == 4 * LAYER and len(there.states) == 4
    gathers = [n for n in program.graph.nodes if n.target is ops.all_gather_start]
    _, more = planned(least + 9 * LAYER)
    kept = [n for n in more.graph.nodes if n.target is ops.all_gather_start]
    assert len(kept) < len(gathers)


def test_without_a_budget_all_of_it_leaves():
    captured = layers_step()
    program = rewritten(captured, **OFFLOADED)
    assert not updated_on_device(program.graph)


@pytest.mark.nightly
def test_an_optimizer_that_steps_twice_leaves_whole():
    least = smallest_budget(2, twice=True)
    captured, program = planned(least + 100 * LAYER, 2, twice=True)
    assert not updated_on_device(program.graph)
    assert_same(captured, least + 100 * LAYER, 2)


class Unknown(torch.optim.SGD):
    """One whose step fails where states are counted."""

    def step(self, closure=None):
        if self.param_groups[0]["params"][0].shape == (4, 4):
            raise RuntimeError("too small")
        return super().step(closure)


def test_states_of_unknown_size_leave():
    least = smallest_budget(2, optimizer=Unknown)
    _, program = planned(least + 100 * LAYER, 2, optimizer=Unknown)
    assert not updated_on_device(program.graph)


def test_ranks_choose_alike_where_their_shards_differ():
    captured = layers_step(3)
    options = {"stage": 3, "bucket_bytes": LAYER, "memory_budget": 20 * LAYER}
    programs = rewritten_by_rank(captured, **OFFLOADED, **options)
    assert len({recorded(program.graph).decisions.residency.states for program in programs}) == 1
    assert updated_on_device(programs[0].graph)


def kept(budget, options, agreed=None):
    """Return what a rank keeps with a budget, and the parameters that it updates on the device."""
    program = clone(layers_step())
    options = {**OFFLOADED, "bucket_bytes": LAYER, "memory_budget": budget, **options}
    ctx = context_of(program, **options)
    if agreed is not None:
        ctx = dataclasses.replace(ctx, kept_gathered={agreed.choices: agreed})
    run_pipeline(program.gm, ctx, rewrites(PIPELINE))
    residency = recorded(program.graph).decisions.residency
    return residency.kept_gathered, updated_on_device(program.graph)


@pytest.mark.parametrize(
    "options", only([{"stage": 3}], ({"stage": 2}, {"stage": 3}, {"plan": "auto"})), ids=str
)
def test_what_all_ranks_could_keep_stays_while_it_fits(options):
    least = smallest_budget(options.get("stage", 3))
    small, large = least + LAYER, least + 100 * LAYER
    (few, there), (many, _) = kept(small, options), kept(large, options)
    assert len(few.states) < len(many.states) == 4
    agreed = many.also_fitting(many.unpacked(few.packed()))
    assert agreed == few
    assert kept(large, options, agreed) == (few, there)
    assert kept(least, options, agreed)[1] == set()
