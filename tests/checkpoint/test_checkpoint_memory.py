"""What a save takes of memory: one tensor's part at a time, and of an asynchronous one a copy."""

from __future__ import annotations

import io
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp

import zerofx
from tests.kit.checkpoints import built, train, zero
from zerofx.checkpoint import saving
from zerofx.checkpoint.reading import Reader


@pytest.fixture
def pair():
    model = torch.nn.Sequential(*(torch.nn.Linear(160, 160) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 160)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_a_save_has_one_tensor_in_memory(pair, tmp_path):
    given: list[torch.Tensor] = []
    most = 0
    resolve = saving._Planner.resolve_data

    def watched(self, item):
        nonlocal most
        data = resolve(self, item)
        if not isinstance(data, io.BytesIO) and data.nbytes > 2**16:
            given.append(data)
        most = max(most, sum(bool(one.untyped_storage().nbytes()) for one in given))
        return data

    with mock.patch.object(saving._Planner, "resolve_data", watched):
        zerofx.save(tmp_path / "a", *pair)
    assert most == 1 and len(given) == 12


def test_what_was_not_written_whole_is_no_checkpoint(pair, tmp_path):
    """As if torch's writer asked for all tensors first, and wrote them then."""

    def together(self):
        tensors = [(self.resolve_fun(item), item) for _, item in self.items]
        yield from tensors

    loader = dcp.filesystem._SerialCpuLoader
    with (
        mock.patch.object(loader, "values", together),
        pytest.raises(zerofx.CheckpointError, match="was not written whole"),
    ):
        zerofx.save(tmp_path / "a", *pair)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow(reason="a step is compiled")
def test_an_old_state_is_gone_when_the_new_one_is_read(tmp_path):
    torch._dynamo.reset()
    pair = built()
    train(zero(1), pair, range(1))
    zerofx.save(tmp_path / "a", *pair)
    old = [weakref.ref(state["exp_avg"]) for state in pair[1].state.values()]
    alive, read = [], Reader.read

    def watched(self, entry, wanted, into):
        if entry.endswith("exp_avg"):
            alive.append(sum(reference() is not None for reference in old))
        return read(self, entry, wanted, into)

    with mock.patch.object(Reader, "read", watched):
        zerofx.load(tmp_path / "a", *pair)
    assert alive == list(reversed(range(len(old))))
