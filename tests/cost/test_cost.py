"""The bytes a program is said to hold are those that it holds."""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass
from importlib.util import find_spec
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import tests.conftest  # noqa: F401  # the ranks need the backend's name too
from tests.kit.allocations import Allocations
from tests.kit.covering import only
from tests.kit.models import Gpt, language_loss, tokens
from tests.kit.programs import mlp_step, nodes_of, rewritten, rewritten_by_rank
from tests.kit.ranks import ranks_fixture  # noqa: F401
from tests.kit.traffic import traffic_of
from zerofx import StepError, backend
from zerofx.cost.program import Lifetime, Rehearsal, allocations, live_bytes
from zerofx.hardware import PIECE_BYTES
from zerofx.ir import ops
from zerofx.runtime.comm.communication import Communicator

aten = torch.ops.aten
KIB = 1024


def program_of(*calls) -> fx.Graph:
    """A graph of ``name = target(*names)``, every result of 1 KiB unless the target is a view."""
    graph = fx.Graph()
    nodes = {"x": graph.placeholder("x")}
    nodes["x"].meta["val"] = torch.empty(256)
    for name, target, *operands in calls:
        nodes[name] = graph.call_function(target, tuple(nodes.get(o, o) for o in operands))
        nodes[name].meta["val"] = torch.empty(256)
    graph.output((nodes[calls[-1][0]],))
    return graph


def test_memory_lives_from_its_node_to_its_last_reader():
    graph = program_of(("a", aten.relu.default, "x"), ("b", aten.relu.default, "a"),
                       ("c", aten.relu.default, "b"))  # fmt: skip
    assert live_bytes(graph, 2) == [0, KIB, 2 * KIB, 2 * KIB, KIB]


def test_a_view_keeps_what_it_views():
    graph = program_of(("a", aten.relu.default, "x"), ("v", aten.alias.default, "a"),
                       ("b", aten.relu.default, "x"), ("c", aten.add.Tensor, "b", "v"))  # fmt: skip
    assert live_bytes(graph, 2) == [0, KIB, KIB, 2 * KIB, 3 * KIB, KIB]


def rehearsed(num_moments, *made, held_until=0):
    """The (begin, end, bytes, whether a result) of what a graph of five nodes allocates.

    Of these ``a``, ``b`` and ``c`` run as one: ``c`` is in what is made first.
    """
    graph = program_of(("w", aten.relu.default, "x"), ("a", aten.relu.default, "w"),
                       ("b", aten.relu.default, "a"), ("c", aten.relu.default, "b"),
                       ("d", aten.relu.default, "c"))  # fmt: skip
    _, w, a, b, c, *_ = graph.nodes
    lifetimes = [Lifetime(*of) for of in made]
    together = Rehearsal([a, b, c], num_moments, lifetimes, {c: 0}, {w: held_until})
    found, _ = allocations(graph, 2, rehearsals=[together])
    return [tuple(of[2:]) for of in found if of.node not in graph.find_nodes(op="output")]


def test_nodes_that_run_as_one_allocate_when_they_do():
    """Their moments are the positions 2 to 4; a result is there until its reader at 5 has run."""
    found = rehearsed(3, (1, None, 9), (0, 1, 7), held_until=1)
    assert found == [(2, 3, 7, True), (1, 3, KIB, False), (3, 5, 9, False), (5, 6, KIB, False)]


def test_an_input_that_is_freed_before_the_first_moment_is_gone_then():
    ends = {at: rehearsed(3, (0, None, 9), held_until=at)[0][1] for at in (-1, 0, 2)}
    assert ends == {-1: 1, 0: 2, 2: 4}


def test_of_more_moments_than_nodes_those_with_most_bytes_count():
    found = rehearsed(9, (8, None, 1), (1, 1, 5), (4, 4, 6), (5, 5, 7), (7, 8, 9))
    made = [(begin, end, nbytes) for begin, end, nbytes, _ in found if nbytes < KIB]
    assert made == [(2, 2, 5), (3, 3, 7), (4, 4, 9), (4, 5, 1)]


def test_of_fewer_moments_some_last_for_several_nodes():
    found = rehearsed(1, (0, None, 1), (0, 0, 5))
    assert found[0] == (2, 4, 5, True)


def test_every_part_of_a_split_keeps_what_was_split():
    graph = fx.Graph()
    x = graph.placeholder("x")
    whole = graph.call_function(aten.relu.default, (x,))
    parts = graph.call_function(aten.split.Tensor, (whole, 128))
    second = graph.call_function(operator.getitem, (parts, 1))
    other = graph.call_function(aten.relu.default, (x,))
    last = graph.call_function(aten.relu.default, (second,))
    graph.output((other, last))
    for node in (x, whole, other):
        node.meta["val"] = torch.empty(256)
    parts.meta["val"] = [torch.empty(128), torch.empty(128)]
    second.meta["val"], last.meta["val"] = torch.empty(128), torch.empty(128)
    alive = dict(zip(graph.nodes, live_bytes(graph, 2), strict=True))
    assert (alive[whole], alive[other], alive[last]) == (KIB, 2 * KIB, 2.5 * KIB)


@pytest.mark.parametrize(
    ("ranks", "bucket", "copies"), ((3, False, 1), (2, True, 1), (2, False, 0))
)
def test_ranks_of_one_machine_add_up_piece_by_piece(ranks, bucket, copies):
    """At the wait, beside what is reduced and the result; but two ranks one tensor as it is."""
    program = rewritten(mlp_step(num_layers=2), stage=2, world_size=ranks, bucket=bucket)
    pieces = live_bytes(program.graph, ranks)
    with mock.patch("zerofx.cost.program.PIECE_BYTES", 0):
        none = live_bytes(program.graph, ranks)
    waits = [*map(ops.wait_of, nodes_of(program, ops.reduce_scatter_start))]
    for node, with_piece, without in zip(program.graph.nodes, pieces, none, strict=True):
        result = node.args[0].meta["val"].nbytes if node in waits else 0
        assert with_piece - without == copies * result < PIECE_BYTES


def test_what_is_never_read_is_gone_at_once():
    graph = program_of(("a", aten.relu.default, "x"), ("b", aten.relu.default, "x"))
    assert live_bytes(graph, 2) == [0, KIB, KIB, KIB]


def test_ignored_nodes_hold_nothing():
    graph = program_of(("a", aten.relu.default, "x"), ("b", aten.relu.default, "a"))
    ignored = [node for node in graph.nodes if node.name == "relu_default"]
    assert live_bytes(graph, 2, ignored) == [0, 0, KIB, KIB]


def test_over_sockets_a_reduction_receives_into_a_buffer_and_reads_its_input_until_the_wait():
    program = rewritten(mlp_step(num_layers=2), stage=2)
    alive = live_bytes(program.graph, 2, sockets=True)
    order = {node: position for position, node in enumerate(program.graph.nodes)}
    for start in nodes_of(program, ops.reduce_scatter_start):
        (wait,) = start.users
        nbytes = start.args[0].meta["val"].nbytes
        for position in range(order[start], order[wait] + 1):
            assert alive[position] >= 2 * nbytes


def test_ranks_can_count_an_updates_memory_as_on_the_one_where_it_is_largest():
    """Their shards of a parameter differ, and they must make the same plan."""
    ranks = rewritten_by_rank(mlp_step(num_layers=3), update_in_backward=True)
    own = [live_bytes(program.graph, 2) for program in ranks]
    planned = [live_bytes(program.graph, 2, table=program.table) for program in ranks]
    assert own[0] != own[1] and planned[0] == planned[1]
    assert planned[0] == [max(pair) for pair in zip(*own, strict=True)]


@pytest.mark.slow(reason="steps are compiled and run")
@pytest.mark.parametrize("stage", only((3,), (0, 3)))
def test_the_peak_is_what_torch_allocates(stage):
    def step(model, optimizer, *batch):
        loss = language_loss(model, *batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    torch._dynamo.reset()
    torch.manual_seed(0)
    model: nn.Module = Gpt(layers=2, width=48)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    known = set(backend.zero.functions)
    compiled = torch.compile(step, backend="zero", options={"stage": stage, "lowering": "eager"})
    batch = tokens(0, 16)
    for _ in range(2):
        compiled(model, optimizer, *batch)
    with Allocations() as allocations:
        compiled(model, optimizer, *batch)
    alive = peak = 0
    for _, change in allocations.changes:
        alive += change
        peak = max(peak, alive)
    programs = [p for f in backend.zero.functions if f not in known for p in f.programs]
    predicted = max(max(live_bytes(program.gm.graph, 1)) for program in programs)
    assert predicted == pytest.approx(peak, rel=0.05)


@pytest.mark.nightly
@pytest.mark.parametrize("memory_budget, programs", ((None, 1), (10**9, 3)))
def test_only_a_plan_within_a_budget_is_one_for_its_sizes(memory_budget, programs):
    """To predict seconds puts no guard on sizes that are symbols."""

    def step(model, optimizer, x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(5, 5), nn.GELU(), nn.Linear(5, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    known = set(backend.zero.functions)
    options = {"lowering": "eager", "memory_budget": memory_budget}
    compiled = torch.compile(step, backend="zero", dynamic=True, options=options)
    for rows in (7, 9, 11):
        compiled(model, optimizer, torch.ones(rows, 5))
    (function,) = [f for f in backend.zero.functions if f not in known]
    assert len(function.programs) == programs


# With a budget, on two ranks.


class Deep(nn.Module):
    """Nearly all of what it allocates is parameters and gradients."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(255, 255) for _ in range(6))

    def forward(self, x):
        for layer in self.layers:
            x = F.gelu(layer(x))
        return x


def tiny_llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 33, "hidden_size": 48, "intermediate_size": 99}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, num_hidden_layers=4))


def llama_loss(model, inputs, targets):
    logits = model(input_ids=inputs, use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


MODELS = {
    "GPT": (lambda: Gpt(layers=4, width=48), language_loss, lambda: tokens(0, 64)),
    "MLP": (Deep, lambda model, x: model(x).square().mean(), lambda: (torch.ones(4, 255),)),
    "Llama": (tiny_llama, llama_loss, lambda: tokens(0, 16)),
}
"""How to build a model, its loss, and a batch of it."""

PLENTY = 10**12


@dataclass
class Budgeted:
    """One rank's steps with some ``memory_budget``, bytes of the last one, and its losses."""

    predicted: int
    allocated: int
    gathered_bytes: int
    losses: list[float]


def within(name: str, budget: int | None, **options) -> Budgeted:
    build, loss_of, batch = MODELS[name]

    def step(model, optimizer, *batch):
        loss = loss_of(model, *batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    torch._dynamo.reset()
    torch.manual_seed(0)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    known = set(backend.zero.functions)
    communicator = Communicator.of(None)  # kept: only a living one is the step's own
    traffic = traffic_of(communicator)
    options = {"memory_budget": budget, **options}
    compiled = torch.compile(step, backend="zero", options={"lowering": "eager", **options})
    losses = [compiled(model, optimizer, *batch()) for _ in range(2)]
    (function,) = [f for f in backend.zero.functions if f not in known]
    (program,) = function.programs
    traffic.reset()
    with Allocations() as allocations:
        losses.append(compiled(model, optimizer, *batch()))
    alive = peak = 0
    for _, change in allocations.changes:
        alive += change
        peak = max(peak, alive)
    return Budgeted(
        max(live_bytes(program.gm.graph, 2)),
        peak,
        traffic.sent_bytes["gather"],
        [loss.item() for loss in losses],
    )


def smallest_budget(name: str, **options) -> int:
    """What the refusal of a budget that is far too small says would do."""
    with pytest.raises(
        StepError, match="memory_budget is 1 bytes, and this step allocates"
    ) as caught:
        within(name, 1, **options)
    return int(str(caught.value).split("allocates ")[1].split()[0])


@pytest.fixture(name="on_both", scope="module")
def on_both_fixture(ranks):
    """``on_both(function, *arguments, **options)``: what it returns on two ranks; once each."""

    @functools.cache
    def run(function, *arguments, **options):
        return ranks(2).run(functools.partial(function, **options), *arguments, timeout_s=600.0)

    return run


@pytest.fixture(
    name="name",
    params=[
        "MLP",
        *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("GPT", "Llama")),
    ],
)
def name_fixture(request) -> str:
    if request.param == "Llama" and find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    return request.param


@pytest.mark.nightly
@pytest.mark.parametrize("share", only((0.5,), (0.0, 0.5, 1.0)))
def test_what_a_budget_lets_a_step_allocate_is_predicted(on_both, name, share):
    """From the smallest budget that works (0) to one that keeps everything gathered (1)."""
    smallest, _ = on_both(smallest_budget, name)
    largest = on_both(within, name, PLENTY)[0].predicted
    budget = smallest + int(share * (largest - smallest))
    for rank in on_both(within, name, budget):
        assert rank.predicted == pytest.approx(rank.allocated, rel=0.05)
        assert rank.allocated <= 1.05 * budget
    if share == 1.0:
        assert on_both(within, name, budget)[0].allocated > 1.02 * smallest


@pytest.mark.nightly
def test_30_percent_less_than_keeps_everything_gathered_is_slower_and_computes_the_same(on_both):
    most = on_both(within, "MLP", PLENTY)
    budget = int(0.7 * most[0].predicted)
    for less, more in zip(on_both(within, "MLP", budget), most, strict=True):
        assert less.losses == more.losses
        assert less.gathered_bytes > 1.3 * more.gathered_bytes  # the time it takes, on a network
        assert less.allocated <= 1.05 * budget


@pytest.mark.nightly
def test_one_byte_less_than_the_smallest_budget_is_refused_and_it_is_not(on_both, ranks):
    smallest, other = on_both(smallest_budget, "MLP")
    assert smallest == other
    on_both(within, "MLP", smallest)
    with pytest.raises(RuntimeError, match=f"allocates {smallest} on this rank with"):
        ranks(2).run(within, "MLP", smallest - 1)
