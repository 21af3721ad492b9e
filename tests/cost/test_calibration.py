"""A calibration predicts operators, collectives and steps; files that hold none are refused."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from torch import fx

from zerofx.calibration import OTHERS, Calibration, Cost, calibration_of, fitted
from zerofx.cost.program import seconds
from zerofx.cost.timeline import predict, step_time
from zerofx.hardware import Hardware, of
from zerofx.ir import ops
from zerofx.ir.interface import InputRole, set_input_role
from zerofx.ir.parameters import ParameterTable

aten = torch.ops.aten
NONE = ParameterTable(())
CALIBRATION = Calibration(
    operators={
        OTHERS: Cost(call_s=1e-3, byte_s=1e-6),
        "aten.mm": Cost(call_s=1.0, flop_s=1e-3),
        "aten.view": Cost(call_s=5.0),
    },
    collectives={"zerofx.all_gather_start": Cost(call_s=2.0, byte_s=1e-3)},
    step=Cost(call_s=7.0),
    whole={"eager": Cost(byte_s=1e-3, flop_s=1.5)},
    ranks=2,
)
FIGURES = Hardware(1e-4, 1e9, spread=1.2, calibration=CALIBRATION)


def program() -> tuple[fx.Graph, dict[str, fx.Node]]:
    graph, nodes = fx.Graph(), {}
    x = graph.placeholder("x")
    set_input_role(x, InputRole("other"))
    nodes["mm"] = graph.call_function(aten.mm.default, (x, x))
    nodes["view"] = graph.call_function(aten.view.default, (x, [100]))
    nodes["relu"] = graph.call_function(aten.relu.default, (x,))
    nodes["gather"] = graph.call_function(ops.all_gather_start, (x, 2))
    graph.call_function(ops.wait, (nodes["gather"],))
    for node in graph.nodes:
        node.meta["val"] = torch.empty(10, 10)
    nodes["view"].meta["val"] = torch.empty(100)
    graph.output(())
    return graph, nodes


def test_a_fit_finds_the_costs_that_calls_have():
    cost = Cost(2e-5, 1e-10, 3e-12)
    calls = [(b, f, cost.seconds(b, f)) for b in (0.0, 1e4, 1e6) for f in (0.0, 1e6, 1e9)]
    found = fitted(calls)
    for name, value in dataclasses.asdict(cost).items():
        assert getattr(found, name) == pytest.approx(value, rel=1e-6)


def test_no_part_of_a_cost_is_negative():
    found = fitted([(1.0, 0.0, 2e-6), (1e6, 0.0, 1e-6), (2e6, 0.0, 5e-7)])
    assert found.call_s > 0 and found.byte_s == found.flop_s == 0
    assert fitted([(1e6, 0.0, 3e-6)]).seconds(1e6) == pytest.approx(3e-6)


def test_nodes_take_what_such_calls_took():
    graph, nodes = program()
    assert seconds(nodes["mm"], FIGURES, NONE) == pytest.approx(1.0 + 2 * 10**3 * 1e-3)
    assert seconds(nodes["view"], FIGURES, NONE) == 5.0
    assert seconds(nodes["relu"], FIGURES, NONE) == pytest.approx(1e-3 + 800 * 1e-6)
    timeline = predict(graph, FIGURES, NONE, 2)
    assert timeline.transfers[nodes["gather"]].seconds == pytest.approx(2.0 + 200 * 1e-3)


def test_a_steps_interval_lies_around_what_is_expected():
    graph, _ = program()
    time = step_time(graph, FIGURES, NONE, 2)
    assert time.expected_s == pytest.approx(predict(graph, FIGURES, NONE, 2).step_s)
    assert time.expected_s / 1.2 < time.low_s < time.expected_s < time.high_s
    assert time.high_s < 1.2 * time.expected_s, "not all lanes are wrong at once"
    wider = step_time(graph, dataclasses.replace(FIGURES, spread=2.0), NONE, 2)
    assert wider.low_s < time.low_s and wider.high_s > time.high_s
    certain = step_time(graph, dataclasses.replace(FIGURES, spread=1.0), NONE, 2)
    assert certain.low_s == certain.high_s == certain.expected_s
    of_all = step_time(graph, FIGURES, NONE, 2, whole=Cost(byte_s=10.0, flop_s=3.0))
    assert of_all.low_s == pytest.approx(10.0 + 3 * time.low_s), "there is one collective"


def test_a_file_has_what_was_measured(tmp_path):
    path = tmp_path / "measured.json"
    values = {"latency_s": 1e-4, "bytes_per_s": 1e9, "spread": 1.2, "source": "measured"}
    path.write_text(json.dumps({**values, "calibration": CALIBRATION.as_json()}))
    found = of(str(path))
    assert found.calibration == CALIBRATION
    assert (found.spread, found.source) == (1.2, "measured")
    assert found.whole("eager") == Cost(byte_s=1e-3, flop_s=1.5)
    assert found.whole("inductor") == Hardware(1e-4, 1e9).whole("eager") == Cost(flop_s=1.0)
    assert of(str(found)).calibration is None, "the text has the figures alone"
    assert hash(found) == hash(of(str(path)))


@pytest.mark.parametrize(
    "changed, words",
    [
        ({"calibration": []}, "as `python -m zerofx calibrate` writes"),
        ({"calibration": {"speed": 1}}, "as `python -m zerofx calibrate` writes"),
        ({"calibration": {"operators": {}}}, "has no 'others'; measure again"),
        ({"calibration": {"operators": 3}}, "operators is figures by name, not 3"),
        ({"calibration": {"operators": {OTHERS: {"second": 1}}}}, "holds byte_s, call_s, flop_s"),
        ({"calibration": {"operators": {OTHERS: {"call_s": -1}}}}, "call_s is 0 or more, not -1"),
        ({"calibration": {"operators": {OTHERS: {"call_s": "1"}}}}, "call_s is a number, not '1'"),
        ({"calibration": {"operators": {OTHERS: {}}, "whole": {"eager": None}}}, "whole.eager is"),
        ({"spread": 0.5}, "spread is a factor of 1 or more"),
        ({"spread": "wide"}, "spread is a positive number"),
    ],
)
def test_a_file_of_something_else_is_refused_with_the_reason(changed, words, tmp_path):
    path = tmp_path / "other.json"
    path.write_text(json.dumps({"latency_s": 1e-4, "bytes_per_s": 1e9, **changed}))
    with pytest.raises(ValueError) as raised:
        of(str(path))
    assert words in str(raised.value)


def test_a_calibration_is_checked_where_it_is_read():
    assert calibration_of(CALIBRATION.as_json()) == CALIBRATION
