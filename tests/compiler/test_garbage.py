"""Python's garbage collection rests while a step compiles, and is as the user left it after."""

import gc
from unittest import mock

import pytest
import torch

from tests.kit.covering import each_value
from tests.kit.models import FEATURES, Mlp, squared_loss
from zerofx.compiler import program as compiler
from zerofx.errors import StepError


def step(model, optimizer, x):
    loss = squared_loss(model, x, x[:, :3])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


@pytest.mark.parametrize("is_on, fails", each_value((True, False), (False, True)))
def test_garbage_is_not_collected_while_a_step_compiles(is_on, fails):
    seen, original = [], compiler.rewrite

    def noted(*arguments, **options):
        seen.append(gc.isenabled())
        if fails:
            raise StepError("refused")
        return original(*arguments, **options)

    torch._dynamo.reset()
    model = Mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = torch.compile(step, backend="zero", options={"lowering": "eager"})
    was_on = gc.isenabled()
    (gc.enable if is_on else gc.disable)()
    try:
        with mock.patch.object(compiler, "rewrite", noted):
            if fails:
                with pytest.raises(StepError, match="refused"):
                    compiled(model, optimizer, torch.ones(2, FEATURES))
            else:
                compiled(model, optimizer, torch.ones(2, FEATURES))
        assert seen == [False] and gc.isenabled() is is_on
    finally:
        (gc.enable if was_on else gc.disable)()
