"""memory_budget: what is kept gathered from forward to backward, and what is too little."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from tests.kit.covering import only
from tests.kit.programs import (
    assert_same_numerics,
    capture,
    clone,
    execute,
    gathers_of,
    mlp_step,
    rewritten,
    run_passes,
)
from zerofx import StepError
from zerofx.cost.program import live_bytes
from zerofx.passes.memory.decisions import keep_gathered
from zerofx.passes.zero.gathers import GatherSpan

DEEP = {"num_layers": 6, "width": 33}
PLENTY = 10**9


def deep():
    return mlp_step(**DEEP)


def gathers(captured) -> int:
    return sum(len(gathers_of(captured, info.name)) for info in captured.table)


def within(budget: int | None, **options):
    return rewritten(deep(), memory_budget=budget, **options)


def peak_of(captured) -> int:
    return max(live_bytes(captured.graph, captured.world_size))


def test_without_a_budget_nothing_is_kept():
    # Backward does not read biases, nor the first weight; the last one serves both at once.
    assert gathers(within(None)) == 2 * 4 + 2 + 6


def test_with_plenty_every_parameter_is_gathered_once():
    assert gathers(within(PLENTY)) == 12


@pytest.mark.parametrize("prefetch", only((True,), (False, True)))
def test_more_memory_means_fewer_gathers_and_the_budget_holds(prefetch):
    least = peak_of(within(None, prefetch=prefetch))
    most = peak_of(within(PLENTY, prefetch=prefetch))
    assert most > 1.2 * least
    counts = []
    for share in (0.1, 0.5, 1.0):
        budget = least + int(share * (most - least)) + 2000
        program = within(budget, prefetch=prefetch)
        assert peak_of(program) <= budget
        counts.append(gathers(program))
    assert counts == sorted(counts, reverse=True) and counts[0] > counts[-1]


def test_the_layers_next_to_backward_are_kept_first():
    least, most = peak_of(within(None)), peak_of(within(PLENTY))
    program = within((least + most) // 2)
    weights = [len(gathers_of(program, f"{2 * layer}.weight")) for layer in range(6)]
    assert weights[1:] == sorted(weights[1:], reverse=True)
    assert weights[1] == 2 and weights[-2] == 1


def test_results_do_not_depend_on_the_budget():
    least, most = peak_of(within(None)), peak_of(within(PLENTY))
    expected = execute(within(None))
    for budget in (PLENTY, (least + most) // 2):
        assert_same_numerics(expected, execute(within(budget)))


def test_too_small_a_budget_says_what_would_do():
    with pytest.raises(StepError, match="memory_budget is 1000 bytes, and .* allocates") as caught:
        run_passes(clone(deep()), memory_budget=1000)
    smallest = int(str(caught.value).split("allocates ")[1].split()[0])
    assert peak_of(within(smallest)) <= smallest <= 1.05 * peak_of(within(None))


@pytest.mark.nightly
def test_wires_count():
    coded = {"gather_dtype": "int8", "bucket": True}
    with pytest.raises(StepError, match="allocates") as caught:
        rewritten(deep(), memory_budget=1000, **coded)
    smallest = int(str(caught.value).split("allocates ")[1].split()[0])
    assert peak_of(rewritten(deep(), memory_budget=smallest, **coded)) <= smallest
    for budget in (PLENTY, smallest + 9000):
        assert peak_of(rewritten(deep(), memory_budget=budget, **coded)) <= budget


@functools.cache
def decayed_step():
    """Weights are decayed by hand in front of their update, which so reads what backward made."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(33, 33), nn.GELU(), nn.Linear(33, 33))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(x):
        model(x).square().mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.99)
        optimizer.step()
        optimizer.zero_grad()

    return capture(step, torch.randn(3, 33), world_size=2)


def test_updates_are_counted_where_they_will_stand():
    options = {"update_in_backward": True, "bucket": True, "peer_memory": True}
    with pytest.raises(StepError, match="allocates") as caught:
        rewritten(decayed_step(), memory_budget=1, **options)
    smallest = int(str(caught.value).split("allocates ")[1].split()[0])
    assert peak_of(rewritten(decayed_step(), memory_budget=smallest, **options)) == smallest


def test_stages_that_gather_nothing_ignore_it():
    captured = mlp_step()
    for stage in (0, 1, 2):
        run_passes(clone(captured), stage=stage, memory_budget=1)


@dataclass(eq=False)
class Unit:
    """What ``keep_gathered`` looks at of a bucket."""

    nbytes: int
    regather: bool = True

    @property
    def held_bytes(self) -> int:
        return self.nbytes


@pytest.mark.parametrize(
    "transfer_s, kept",
    [(lambda nbytes: 1.0, "small"), (lambda nbytes: nbytes / 1e9, "large")],
    ids=("latency", "bandwidth"),
)
def test_of_two_that_do_not_fit_together_the_one_that_saves_more_is_kept(transfer_s, kept):
    """Seconds for bytes held times how long: where latency is all, a small bucket saves as much."""
    small, large = Unit(10), Unit(100)
    planned = {
        small: [GatherSpan(0, 0, []), GatherSpan(18, 18, [])],
        large: [GatherSpan(5, 5, []), GatherSpan(10, 10, [])],
    }
    alive = [8 if 5 < position < 10 else 0 for position in range(20)]
    cuts = keep_gathered(planned, alive, 110, False, transfer_s)
    assert list(map(len, cuts)) == ([1, 2] if kept == "small" else [2, 1])
