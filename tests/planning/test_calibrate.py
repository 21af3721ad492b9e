"""``python -m zerofx calibrate``: measures, writes a file that plans read, refuses bad places."""

from __future__ import annotations

import json
import math

import pytest
import torch

import zerofx.__main__ as command_line
from tests.kit.ranks import Ranks, ranks_fixture  # noqa: F401
from zerofx import plan
from zerofx.calibration import OTHERS
from zerofx.hardware import of
from zerofx.planning import calibrate
from zerofx.runtime.comm.communication import Communicator

SMALL = (calibrate.Training(32, 1, 8, 0),)


def test_the_spread_is_wider_the_less_is_left_beside_what_was_fitted():
    errors = [0.05, -0.05, 0.05, -0.05]
    one, two = (math.log(calibrate.spread_of(errors, fitted)) for fitted in (1, 2))
    assert one == pytest.approx(1.638 * 0.1 / 3**0.5 * 1.25**0.5, rel=0.01)
    assert two == pytest.approx(1.886 * 0.1 / 2**0.5 * 1.25**0.5, rel=0.01)
    assert calibrate.spread_of([0.0], 1) == 1.0


@pytest.mark.nightly
def test_the_file_is_what_plans_read(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(calibrate, "TRAININGS", SMALL)
    monkeypatch.setattr(calibrate, "SECONDS", 0.0)
    monkeypatch.delenv("ZEROFX_HARDWARE", raising=False)
    path = tmp_path / "machine.json"
    assert command_line.main(["calibrate", "--json", str(path)]) == 0
    assert "calibrated by 1 rank(s) of CPU" in capsys.readouterr().out
    figures = of(str(path))
    assert figures.calibration is not None and figures.spread >= calibrate.LEAST_SPREAD
    costs = figures.calibration.operators
    assert {OTHERS, "aten.mm", "aten.addmm", "aten.gelu", "zerofx.update"} <= set(costs)
    assert 1e8 < 1 / costs["aten.mm"].seconds(0, 1.0) or costs["aten.mm"].flop_s == 0
    assert set(figures.calibration.whole) == {"eager"}

    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    options = {"hardware": str(path), "lowering": "eager"}
    made = plan(step, (torch.ones(2, 8),), ranks=1, stages=[0], options=options)
    facts = made.facts["stages"]["0"]
    low_s, high_s = facts["step_s"]
    assert 0 < low_s < facts["expected_s"] < high_s and facts["confidence"] == 0.8
    assert "calibrated by 1 rank(s)" in str(made)


def of_rank() -> dict:
    calibrate.SECONDS, calibrate.TRAININGS = 0.0, (calibrate.Training(32, 1, 8, 3),)
    return calibrate.as_json(calibrate.calibrate(Communicator.of(None), torch.device("cpu")))


@pytest.mark.nightly
def test_ranks_measure_the_same_together(ranks):
    one, other = ranks(2).run(of_rank)
    assert one == other
    found = one["calibration"]
    assert found["ranks"] == 2
    assert {"zerofx.all_gather_start", "zerofx.reduce_scatter_start"} <= set(found["collectives"])
    assert json.loads(json.dumps(one)) == one


def test_a_place_that_is_none_is_refused_before_anything_is_measured(tmp_path, capsys):
    path = tmp_path / "nowhere" / "machine.json"
    assert command_line.main(["calibrate", "--json", str(path)]) == 1
    assert "is no folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text, words",
    [
        ("{", "cannot be read as JSON"),
        ('{"function": "step", "stages": {}}', "'function' is unknown; known: latency_s"),
    ],
)
def test_a_plan_refuses_a_file_that_holds_something_else(tmp_path, capsys, text, words):
    path = tmp_path / "machine.json"
    path.write_text(text)
    given = ["plan", "--ranks", "2", "--hardware", str(path), "train.py"]
    assert command_line.main(given) == 1
    err = capsys.readouterr().err
    assert words in err and f"--hardware {path}" in err
    assert command_line.main([*given[:4], str(tmp_path / "none.json"), "train.py"]) == 1
    assert "cannot be read" in capsys.readouterr().err
