"""What a program becomes when it is compiled: regions that let go of their inputs."""

import operator
import weakref

import pytest
import torch
from torch import fx

from zerofx.lower import lower

aten = torch.ops.aten


@pytest.fixture
def program():
    """``sin`` between two operators that end a region, as communication does."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(4)
    sine = graph.call_function(aten.sin.default, (x,))
    sine.meta["val"] = torch.empty(4)
    written = graph.call_function(aten.copy_.default, (x, sine))
    written.meta["val"] = torch.empty(4)
    cosine = graph.call_function(aten.cos.default, (sine,))
    cosine.meta["val"] = torch.empty(4)
    graph.output((cosine,))
    return fx.GraphModule({}, graph)


def test_a_region_is_the_last_to_hold_what_nobody_reads_later(program):
    lowered = lower(program, {}, "inductor")
    (first, second) = lowered.children()
    x = torch.randn(4)
    (sine,) = first([x])
    expected = sine.cos()
    values, gone = [sine], weakref.ref(sine)
    del sine
    (cosine,) = second(values)
    assert values == [] and gone() is None
    torch.testing.assert_close(cosine, expected)


def test_the_program_has_no_name_for_a_region_s_inputs_while_it_runs(program):
    lowered = lower(program, {}, "inductor")
    calls = [node for node in lowered.graph.nodes if node.op == "call_module"]
    assert len(calls) == 2
    for call in calls:
        (box,) = call.args
        assert box.target is not operator.getitem and list(box.users) == [call]
    x = torch.randn(4)
    torch.testing.assert_close(lowered(x.clone())[0], x.sin().cos())


def test_a_region_may_read_a_view_of_a_larger_tensor():
    """Sizes are no symbols: the offset of a view would be one that no input defines."""
    graph = fx.Graph()
    x, weight = graph.placeholder("x"), graph.placeholder("weight")
    x.meta["val"], weight.meta["val"] = torch.empty(8, 6).chunk(2)[1], torch.empty(6, 3)
    product = graph.call_function(aten.mm.default, (x, weight))
    product.meta["val"] = torch.empty(4, 3)
    loss = graph.call_function(aten.mean.default, (product,))
    loss.meta["val"] = torch.empty(())
    graph.output((product, loss))
    batch, weight = torch.randn(8, 6), torch.randn(6, 3)
    lowered = lower(fx.GraphModule({}, graph), {}, "inductor")
    found, mean = lowered(batch.chunk(2)[1], weight)
    torch.testing.assert_close(found, batch[4:] @ weight)
    torch.testing.assert_close(mean, (batch[4:] @ weight).mean())
