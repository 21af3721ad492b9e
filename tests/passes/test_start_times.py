"""Under a memory budget a gather starts as late as hides it, if it fits, and no ranks differ."""

from __future__ import annotations

import functools
import random
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.kit.covering import first, only
from tests.kit.models import Gpt, language_loss, tokens
from tests.kit.programs import (
    Captured,
    assert_same_numerics,
    capture,
    clone,
    context_of,
    execute,
    mlp_step,
    nodes_of,
    rewritten,
    rewritten_by_rank,
    run_passes,
)
from zerofx import StepError
from zerofx.cost.program import live_bytes, seconds
from zerofx.cost.timeline import predict
from zerofx.hardware import of
from zerofx.ir import ops
from zerofx.ir.collectives import schedule
from zerofx.ir.graph import program_order
from zerofx.ir.roles import provenance
from zerofx.passes.schedule.start_times import (
    MARGIN,
    chain_of,
    start_behind,
    starts_within_budget,
)

COMPUTE = "flops_per_s=1e9 memory_bytes_per_s=1e9"
SLOW = f"latency_s=1e-6 bytes_per_s=1e8 {COMPUTE}"
FAST = f"latency_s=0 bytes_per_s=1e10 {COMPUTE}"
MEDIUM = f"latency_s=0 bytes_per_s=2e9 {COMPUTE}"
AT_THE_WAIT = f"{SLOW} overlaps=0"
LINKS = {"slow": SLOW, "fast": FAST, "no overlap": AT_THE_WAIT}
PLENTY = 10**9


@functools.cache
def gpt_step() -> Captured:
    torch.manual_seed(0)
    model = Gpt(layers=2)
    optimizer = torch.optim.AdamW(model.parameters())

    def step(*batch):
        with torch.autocast("cpu", torch.bfloat16):
            loss = language_loss(model, *batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return capture(step, *tokens(0, 8), world_size=2)


@functools.cache
def tied_step() -> Captured:
    torch.manual_seed(0)
    embedding, middle = nn.Embedding(31, 12), nn.Linear(12, 12)
    optimizer = torch.optim.SGD([*embedding.parameters(), *middle.parameters()], lr=0.1)

    def step(ids):
        hidden = torch.tanh(middle(embedding(ids)))
        F.linear(hidden, embedding.weight).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return capture(step, torch.arange(6), world_size=2)


def deep() -> Captured:
    return mlp_step(num_layers=6, width=33)


MODELS = {"MLP": deep, "GPT": gpt_step, "tied": tied_step}


def within(captured: Captured, budget: int | None, link: str = SLOW, **options) -> Captured:
    return rewritten(captured, memory_budget=budget, hardware=link, **options)


def by_rank(captured: Captured, budget: int, link: str, **options) -> tuple[Captured, ...]:
    options = {"memory_budget": budget, "hardware": link, "update_in_backward": True, **options}
    return rewritten_by_rank(captured, **options)


def smallest_of(captured: Captured, **options) -> int:
    with pytest.raises(StepError, match="this step allocates") as caught:
        run_passes(clone(captured), memory_budget=1, **options)
    return int(str(caught.value).split("allocates ")[1].split()[0])


def peak_of(captured: Captured) -> int:
    return max(live_bytes(captured.graph, captured.world_size))


def gathers(captured: Captured):
    """(start, wait) of every gather, in order of the waits."""
    waits = nodes_of(captured, ops.wait)
    return [(w.args[0], w) for w in waits if w.args[0].target is ops.all_gather_start]


def compute_ahead(captured: Captured, link: str) -> list[float]:
    """Predicted seconds of compute between each gather's start and its wait."""
    nodes, order = list(captured.graph.nodes), program_order(captured.graph)
    figures = of(link)
    return [
        sum(seconds(n, figures, captured.table) for n in nodes[order[start] : order[wait]])
        for start, wait in gathers(captured)
    ]


@pytest.mark.nightly
@pytest.mark.parametrize("link", first(1, LINKS.values()), ids=LINKS)
@pytest.mark.parametrize("model", only(["MLP"], MODELS))
def test_no_budget_is_exceeded_and_ranks_choose_alike(model, link):
    captured = MODELS[model]()
    options = {"bucket": True, "update_in_backward": True}
    smallest = smallest_of(captured, hardware=link, **options)
    most = peak_of(by_rank(captured, PLENTY, link, **options)[0])
    draw = random.Random(f"{model} {link}")
    shares = (0.0, *(draw.random() for _ in range(2)), 1.0)
    for budget in (smallest + int(share * max(most - smallest, 0)) for share in shares):
        ranks = by_rank(captured, budget, link, **options)
        for program in ranks:
            assert peak_of(program) <= budget
        first, second = (schedule(program.gm, program.table, 3) for program in ranks)
        assert first == second


def test_a_slow_link_starts_earlier_than_a_fast_one():
    slow, fast = (within(deep(), PLENTY, link) for link in (SLOW, FAST))
    assert len(gathers(slow)) == len(gathers(fast))
    ahead = [compute_ahead(program, SLOW) for program in (slow, fast)]
    assert all(early >= late for early, late in zip(*ahead, strict=True))
    assert sum(ahead[0]) > 1.5 * sum(ahead[1])


@pytest.mark.parametrize("link", (MEDIUM, FAST), ids=("medium", "fast"))
def test_with_plenty_a_gather_is_given_what_it_takes_and_little_more(link):
    """Or starts as soon as it can; the first layers have nothing before them to hide behind."""
    program = within(deep(), PLENTY, link)
    figures = of(link)
    longest = max(seconds(n, figures, program.table) for n in program.graph.nodes)
    transfers = predict(program.graph, figures, program.table, 2).transfers
    found = 0
    for (start, wait), ahead in zip(gathers(program), compute_ahead(program, link), strict=True):
        if "as late as hides it" in provenance(start).reason:
            in_between = [node for node in transfers if start <= node < wait]
            asked = MARGIN * transfers[start].seconds
            asked += sum(transfers[node].seconds for node in in_between[1:])
            assert transfers[start].is_hidden
            assert ahead <= asked + longest
            found += 1
    assert found > 1


def test_less_memory_starts_later_and_says_so():
    captured = deep()
    smallest = smallest_of(captured, hardware=SLOW)
    little, much = within(captured, smallest), within(captured, PLENTY)

    def limited(program):
        reasons = [provenance(start).reason for start, _ in gathers(program)]
        return sum("starts as early as memory_budget allows" in reason for reason in reasons)

    assert limited(little) > 0 == limited(much)
    figures = of(SLOW)
    waited = [predict(p.graph, figures, p.table, 2).exposed_s for p in (little, much)]
    assert waited[0] > waited[1]


def test_what_is_read_at_the_wait_starts_there():
    program = within(deep(), PLENTY, AT_THE_WAIT)
    for start, wait in gathers(program):
        assert start.next is wait
        assert "as it is read only then" in provenance(start).reason


@pytest.mark.nightly
def test_what_is_read_at_the_wait_leaves_room_to_keep_more():
    captured = deep()
    smallest, most = smallest_of(captured), peak_of(within(captured, PLENTY))
    budget = smallest + (most - smallest) // 2
    kept = [len(gathers(within(captured, budget, link))) for link in (AT_THE_WAIT, SLOW)]
    assert kept[0] < kept[1]


@pytest.mark.parametrize("link", only((SLOW,), (SLOW, FAST)), ids=("slow", "fast"))
def test_without_a_budget_one_gather_is_ahead_whatever_the_link(link):
    program = within(deep(), None, link)
    order = program_order(program.graph)
    for (_, previous), (start, _) in pairwise(gathers(program)):
        assert order[start] == order[previous] + 1
        assert provenance(start).reason.endswith("starts one gather ahead")


@functools.cache
def uneven_step() -> Captured:
    """Large and small layers in turn: where a large one does not fit yet, a small one would."""
    torch.manual_seed(0)
    sizes = (60, 60, 2, 60, 60, 2, 60, 60)
    layers = [nn.Linear(a, b, bias=False) for a, b in pairwise(sizes)]
    model = nn.Sequential(*sum(([layer, nn.Tanh()] for layer in layers), []))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        model(x).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return capture(step, torch.randn(3, 60), world_size=2)


@pytest.mark.slow(reason="whole programs are rewritten and run")
def test_starts_come_in_the_order_of_waits_whatever_fits():
    captured = uneven_step()
    smallest = smallest_of(captured, hardware=SLOW)
    limited = 0
    for budget in (smallest, smallest + 1000, smallest + 4000, PLENTY):
        program = within(captured, budget)
        order = program_order(program.graph)
        starts = [order[start] for start, _ in gathers(program)]
        assert starts == sorted(starts)
        assert peak_of(program) <= budget
        limited += any("memory_budget allows" in provenance(s).reason for s, _ in gathers(program))
    assert limited >= 2


@pytest.mark.parametrize("link", only((SLOW,), (SLOW, MEDIUM)), ids=("slow", "medium"))
def test_no_start_passes_another_collective_whatever_fits(link):
    """How early depends on a rank's batch; the order in which ranks meet must not."""
    least, early = smallest_of(deep(), hardware=link), 0
    for share in (0.05, 0.1, 0.2, 0.4):
        program = within(deep(), int(least * (1 + share)), link)
        order = program_order(program.graph)
        others = [n for n in order if n.target in (ops.all_reduce_start, ops.reduce_scatter_start)]
        assert others
        for start, wait in gathers(program):
            early += order[wait] - order[start] > 1
            assert not any(order[start] < order[other] < order[wait] for other in others)
    assert early


def test_what_is_gathered_twice_is_not_there_twice():
    """However much memory there is: to keep it would be better."""
    program = within(deep(), None, prefetch=False)
    waits = [wait for _, wait in gathers(program)]
    starts = starts_within_budget(program.graph, context_of(program, hardware=SLOW), waits, PLENTY)
    assert set(starts) == {wait.name for wait in waits}
    nodes = {node.name: node for node in program.graph.nodes}
    start_behind((chain_of(wait), nodes[starts[wait.name][0]]) for wait in waits)
    alive: set[int] = set()
    seen = most = 0
    for node in program.graph.nodes:
        if node.target is ops.all_gather_start:
            assert provenance(node).parameter not in alive
            seen += 1
            alive.add(provenance(node).parameter)
        elif node.target is ops.free:
            alive.remove(provenance(node).parameter)
        most = max(most, len(alive))
    assert seen > len(program.table) and most > 4


def test_a_gather_of_an_updated_value_stays_behind_the_update():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def step(x):
        model(x).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            return model(x).sum()

    captured = capture(step, torch.randn(3, 5), world_size=2)
    program = within(captured, PLENTY)
    assert_same_numerics(execute(captured), execute(program))


@pytest.mark.parametrize("link", first(1, LINKS.values()), ids=LINKS)
@pytest.mark.parametrize("model", only(("MLP",), MODELS))
def test_is_bitwise_the_program_before_it(model, link):
    captured = MODELS[model]()
    budget = int(1.1 * smallest_of(captured))
    before = within(captured, budget, link, prefetch=False)
    assert_same_numerics(execute(before), execute(within(captured, budget, link)))
