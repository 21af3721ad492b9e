"""Each distinct call runs once to find what its operator allocates for itself."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from zerofx.cost import own
from zerofx.cost.own import own_bytes
from zerofx.cost.program import Own

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def nothing_known():
    with mock.patch.object(own, "_KNOWN", {}):
        yield


def call(target, *operands):
    graph = fx.Graph()

    def placeholder(operand):
        if not isinstance(operand, torch.Tensor):
            return operand
        node = graph.placeholder("x")
        node.meta["val"] = operand
        return node

    node = graph.call_function(target, tuple(map(placeholder, operands)))
    node.meta["val"] = target(*operands)
    return node


def test_an_operand_that_is_cast_is_counted_while_the_call_runs():
    node = call(aten.add.Tensor, torch.ones(100, dtype=torch.bfloat16), torch.ones(100))
    assert own_bytes([node]) == {node: Own(400)}


def test_a_result_in_more_memory_than_it_fills_keeps_it():
    node = call(aten.mse_loss.default, torch.ones(100), torch.ones(100))
    assert own_bytes([node])[node].kept == 396


def test_views_and_calls_that_need_nothing_are_left_out():
    nodes = [call(aten.t.default, torch.ones(4, 8)), call(aten.relu.default, torch.ones(8))]
    assert own_bytes(nodes) == {}


def test_a_call_runs_once_and_draws_nothing():
    node = call(aten.native_dropout.default, torch.ones(64), 0.5, True)
    state = torch.get_rng_state()
    first = own_bytes([node])
    assert first and torch.equal(torch.get_rng_state(), state)
    with mock.patch.object(own, "_measured", side_effect=AssertionError):
        assert own_bytes([node]) == first


def test_large_calls_and_those_that_zeros_do_not_fit_are_not_counted():
    with mock.patch.object(own, "LARGEST_BYTES", 100):
        large = call(aten.add.Tensor, torch.ones(100, dtype=torch.bfloat16), torch.ones(100))
        assert own_bytes([large]) == {}
    node = call(aten.multinomial.default, torch.ones(5), 2)
    assert own_bytes([node]) == {}


def test_while_a_profiler_runs_that_is_said_and_found_later(caplog):
    node = call(aten.add.Tensor, torch.ones(100, dtype=torch.bfloat16), torch.ones(100))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert own_bytes([node]) == {}
    assert "a profiler is running" in caplog.text
    assert own_bytes([node]) == {node: Own(400)}


def test_a_call_is_given_what_the_one_before_it_returns():
    """torch says that a narrow batch norm's statistics are narrow, which its backward refuses."""

    def norm(x, weight):
        y, mean, scale = aten.native_batch_norm(x, weight, weight, None, None, True, 0.1, 1e-5)
        wanted = [True, False, False]
        return aten.native_batch_norm_backward(
            y.mul(2), x, weight, None, None, mean, scale, True, 1e-5, wanted
        )

    operands = torch.ones(64, 8, 4, 4, dtype=torch.bfloat16), torch.ones(8)
    nodes = make_fx(norm, tracing_mode="fake")(*operands).graph.nodes
    found = {node.target: of for node, of in own_bytes(nodes).items()}
    assert found[aten.native_batch_norm_backward.default].during == 64 * 8 * 4 * 4 * 2
