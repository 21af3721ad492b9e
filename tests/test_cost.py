"""The bytes a program is said to hold are those that it holds."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn

import tests.conftest  # noqa: F401
from tests.models import Gpt, language_loss, tokens
from tests.programs import mlp_step, nodes_of, rewritten
from tests.test_memory import Allocations
from zerofx import backend, ops
from zerofx.cost import live_bytes

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


def test_what_is_never_read_is_gone_at_once():
    graph = program_of(("a", aten.relu.default, "x"), ("b", aten.relu.default, "x"))
    assert live_bytes(graph, 2) == [0, KIB, KIB, KIB]


def test_ignored_nodes_hold_nothing():
    graph = program_of(("a", aten.relu.default, "x"), ("b", aten.relu.default, "a"))
    ignored = [node for node in graph.nodes if node.name == "relu_default"]
    assert live_bytes(graph, 2, ignored) == [0, 0, KIB, KIB]


def test_a_reduction_receives_into_a_buffer_and_reads_its_input_until_the_wait():
    program = rewritten(mlp_step(num_layers=2), stage=2)
    alive = live_bytes(program.graph, 2)
    order = {node: position for position, node in enumerate(program.graph.nodes)}
    for start in nodes_of(program, ops.reduce_scatter_start):
        (wait,) = start.users
        nbytes = start.args[0].meta["val"].nbytes
        for position in range(order[start], order[wait] + 1):
            assert alive[position] >= 2 * nbytes


@pytest.mark.parametrize("stage", (0, 3))
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
