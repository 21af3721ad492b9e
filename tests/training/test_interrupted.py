"""A call that fails tells what it has updated; saving inside of a call is refused."""

from __future__ import annotations

import logging
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import tests.conftest  # noqa: F401
import zerofx
from tests.kit.covering import nightly
from tests.kit.models import Mlp
from tests.kit.refusals import BATCH, good_step, values, zero
from zerofx.compat.fake_ranks import init_fake_group
from zerofx.errors import StepError
from zerofx.runtime.optimizer.update import OptimizerRunner
from zerofx.runtime.parameters.registry import REGISTRY


@pytest.fixture(autouse=True)
def forget_compiled_code():
    torch._dynamo.reset()


def trained(**options):
    torch.manual_seed(0)
    model = Mlp()
    optimizer, step = torch.optim.SGD(model.parameters(), lr=0.1), zero(good_step, **options)
    step(model, optimizer, *BATCH)
    return model, optimizer, step


@pytest.mark.parametrize("which", (nightly(1), 3))
def test_updates_before_a_call_failed_are_counted_for_who_goes_on(which, caplog):
    model, optimizer, step = trained(stage=1, lowering="eager")
    before, run, calls = values(model), OptimizerRunner.run, []

    def fails(self, *arguments):
        calls.append(None)
        if len(calls) == which:
            raise torch.OutOfMemoryError("no room")
        return run(self, *arguments)

    caplog.set_level(logging.WARNING, "zerofx")
    with (
        mock.patch.object(OptimizerRunner, "run", fails),
        mock.patch.object(OptimizerRunner, "run_together", fails),
        pytest.raises(torch.OutOfMemoryError) as caught,
    ):
        step(model, optimizer, *BATCH)
    words = "parameter(s) had begun when the call failed"
    assert words in caplog.text and "go on from a checkpoint" in caplog.text
    assert any(words in note for note in caught.value.__notes__)
    changed = sum(not torch.equal(*pair) for pair in zip(values(model), before, strict=True))
    assert changed == 0 if which == 1 else changed > 0


def test_a_call_that_failed_before_its_updates_says_nothing(caplog):
    model, optimizer, step = trained(stage=1, lowering="eager")
    fails = mock.Mock(side_effect=torch.OutOfMemoryError("no room"))
    with (
        mock.patch("zerofx.runtime.optimizer.steps.OptimizerSteps.enter", fails),
        pytest.raises(torch.OutOfMemoryError),
    ):
        step(model, optimizer, *BATCH)
    assert "begun when the call failed" not in caplog.text


def test_nothing_is_saved_or_read_from_inside_of_a_call(tmp_path):
    """As the handler of a signal may try, which arrives while a step runs."""
    model, optimizer, step = trained(stage=3)

    def opened():
        with zerofx.full_params(model):
            pass

    tries = {
        "save": lambda: zerofx.save(tmp_path / "saved", model, optimizer),
        "full_params()": opened,
        "unshard()": lambda: zerofx.unshard(model, optimizer),
    }
    REGISTRY.enter_call()
    try:
        for name, attempt in tries.items():
            with pytest.raises(RuntimeError, match="called while a compiled step runs") as caught:
                attempt()
            assert name.strip("()") in str(caught.value)
    finally:
        REGISTRY.exit_call()
    assert not (tmp_path / "saved").exists()
    tries["save"]()
    step(model, optimizer, *BATCH)


def test_ranks_that_meet_after_the_first_call_are_not_left_alone():
    model, optimizer, step = trained(stage=1)
    init_fake_group(0, 2)
    try:
        with pytest.raises(StepError, match="first called before init_process_group"):
            step(model, optimizer, *BATCH)
    finally:
        dist.destroy_process_group()
    step(model, optimizer, *BATCH)
