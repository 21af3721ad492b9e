"""With nothing to dump, nothing of what dumps is called: not when compiling, nor in a step."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import tests.conftest  # noqa: F401
import zerofx

ROOT = Path(zerofx.__file__).parent
OF_DUMPS = ("report/", "replay/")


def calls_into_dumps(dump):
    """The functions of these modules that compiling a step and running it calls."""
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters())

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    options = {"lowering": "eager", "dump": dump}
    compiled = torch.compile(step, backend="zero", options=options)
    found = set()
    paths = tuple(str(ROOT / name) for name in OF_DUMPS)

    def note(frame, event, argument):
        if event == "call" and frame.f_code.co_filename.startswith(paths):
            found.add(f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        for _ in range(3):
            compiled(torch.ones(2, 4))
    finally:
        sys.setprofile(before)
    return found


@pytest.mark.nightly
def test_nothing_is_called_while_dumps_are_off():
    assert calls_into_dumps(None) == set()


@pytest.mark.nightly
@pytest.mark.parametrize("name", ("write.py:write", "timeline.py:trace_of"))
def test_with_dumps_the_same_would_be_seen(name, tmp_path):
    assert name in calls_into_dumps(str(tmp_path))
