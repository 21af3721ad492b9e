"""``offload="auto"``: as little leaves the device as makes the step fit ``memory_budget``."""

import functools
import re

import pytest
import torch
from torch import nn

import tests.conftest  # noqa: F401  # the ranks need the backend's name too
import zerofx
from tests.kit.ranks import ranks_fixture  # noqa: F401
from tests.kit.trainings import (
    assert_same,
    program_of,
    tensors_of,
)
from zerofx.cost.program import live_bytes
from zerofx.cost.traffic import moved_bytes
from zerofx.errors import BudgetError
from zerofx.ir.interface import recorded
from zerofx.runtime.parameters.registry import REGISTRY

WIDTH, LAYERS, ROWS = 64, 4, 96


@pytest.fixture(autouse=True)
def forget_compiled_code():
    torch._dynamo.reset()


def built():
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)]
    model = nn.Sequential(*layers)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def step(model, optimizer, x):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def trained(budget, stage=3):
    """Losses, parameters and states after three steps, and what has left the device."""
    torch._dynamo.reset()
    pair = built()
    options = {"stage": stage, "lowering": "eager", "bucket_bytes": 4 * WIDTH * WIDTH}
    if budget is not None:
        options |= {"offload": "auto", "memory_budget": budget}
    compiled = torch.compile(step, backend="zero", options=options)
    torch.manual_seed(1)
    losses = [compiled(*pair, torch.randn(ROWS, WIDTH)).item() for _ in range(3)]
    program = program_of(compiled)
    held = sum(map(REGISTRY.host.holds, tensors_of(pair[1])))
    moved = moved_bytes(program.gm)
    away = {
        "states": held,
        "all states": len(tensors_of(pair[1])),
        "activations": moved.num_activations,
        "params": "params" in program.options.offload,
        "moved": moved.to_host + moved.to_device,
    }
    return losses, pair[0].state_dict(), pair[1].state_dict(), away, on_device(program)


def on_device(program):
    """What the plan has on the device at most: all that is kept there, and allocated in a step."""
    shards = sum(info.largest_shard_numel * 4 for info in program.table)
    whole = sum(info.nbytes for info in program.table)
    kept = shards if program.options.stage == 3 else whole
    if "params" in program.options.offload:
        kept = 0
    residency = recorded(program.gm.graph).decisions.residency
    there = residency.state_bytes if residency else 0
    alive = live_bytes(program.gm.graph, program.function.communicator.world_size)
    return kept + there + max(alive)


def least(stage):
    """The smallest budget that works, as refusals say: each but the last names what it lacks."""
    low, high = 1, 2**22
    while high - low > 512:
        middle = (low + high) // 2
        try:
            trained(middle, stage)
            high = middle
        except BudgetError:
            low = middle
    return high


@functools.cache
def ladder(stage):
    """What leaves, from the smallest budget that works up to one where nothing has to."""
    smallest = least(stage)
    return {budget: trained(budget, stage) for budget in range(smallest, 2 * 2**18, 2**15)}


@pytest.mark.nightly
@pytest.mark.parametrize("stage", (3, pytest.param(1, marks=pytest.mark.exhaustive)))
def test_the_more_fits_the_less_leaves_and_results_are_the_same(stage):
    expected = trained(None, stage)
    found = ladder(stage)
    for budget, one in found.items():
        assert_same(one[:3], expected[:3])
        assert one[4] <= budget
    away = [one[3] for one in found.values()]
    assert away[-1]["moved"] == 0 and away[-1]["states"] == 0
    first = away[0]
    assert first["states"] == first["all states"] and first["activations"]
    assert first["params"] is (stage == 3)
    # States first and only part of them, then activations, then parameters.
    assert any(0 < one["states"] < one["all states"] for one in away)
    assert any(one["states"] and not one["activations"] for one in away)
    for one in away:
        if one["activations"]:
            assert one["states"] == one["all states"]
    params = [one["params"] for one in away]
    assert params == sorted(params, reverse=True)


@pytest.mark.slow(reason="a step is compiled and run")
def test_it_trains_as_plain_torch_and_explain_says_what_leaves():
    pair = built()
    options = {"lowering": "eager", "offload": "auto", "memory_budget": 180_000}
    compiled = torch.compile(step, backend="zero", options=options)
    inputs, plain = torch.randn(ROWS, WIDTH), built()
    for _ in range(2):
        assert compiled(*pair, inputs) == step(*plain, inputs)
    chosen = ", ".join(program_of(compiled).options.offload)
    assert chosen.startswith("optimizer")
    assert re.search(
        f"leaves the device, as far as it has to +{chosen}\n", zerofx.explain(compiled)
    )


def test_what_cannot_be_met_is_refused_with_the_numbers_before_anything_changes():
    pair = built()
    options = {"offload": "auto", "memory_budget": 10_000, "lowering": "eager"}
    compiled = torch.compile(step, backend="zero", options=options)
    with pytest.raises(BudgetError, match="memory_budget is 10000 bytes, and this step allocates"):
        compiled(*pair, torch.randn(ROWS, WIDTH))
    assert not pair[1].state and pair[0](torch.randn(1, WIDTH)).shape == (1, WIDTH)


def on_two_ranks(budget):
    return trained(None), trained(budget)


@pytest.mark.nightly
def test_ranks_choose_together(ranks):
    for without, found in ranks(2).run(on_two_ranks, 2**17 + 2**15):
        assert_same(found[:3], without[:3])
        assert found[3]["states"]


def in_files(budget, directory):
    """Losses, parameters and states after three steps, and what was read from files."""
    torch._dynamo.reset()
    pair = built()
    compiled = torch.compile(
        step,
        backend="zero",
        options={
            "lowering": "eager",
            "bucket_bytes": 4 * WIDTH * WIDTH,
            "offload": "auto",
            "memory_budget": budget,
            "offload_tier": "nvme",
            "offload_dir": directory,
            "offload_cache_bytes": 2**18,
        },
    )
    torch.manual_seed(1)
    losses = [compiled(*pair, torch.randn(ROWS, WIDTH)).item() for _ in range(3)]
    files = program_of(compiled).runtime.files
    kinds = {bucket.what for bucket in files.buckets} if files is not None else set()
    return losses, pair[0].state_dict(), pair[1].state_dict(), kinds


@pytest.mark.nightly
def test_what_has_to_leave_may_go_to_files(tmp_path):
    expected = trained(None)
    budgets = (2**22, 400_000, 160_000)
    folders = [tmp_path / str(budget) for budget in budgets]
    for folder in folders:
        folder.mkdir()
    found = [in_files(*pair) for pair in zip(budgets, folders, strict=True)]
    for one in found:
        assert_same(one[:3], expected[:3])
    kinds = [one[3] for one in found]
    assert kinds[0] == set() and kinds[1] == {"optimizer states"}
    assert kinds[2] == {"optimizer states", "parameter shards", "activations"}
