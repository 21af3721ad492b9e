"""Two ranks train a compiled model alike whether backward keeps its values or repeats them."""

from pathlib import Path

import pytest
import torch
from torch import nn

import tests.conftest  # noqa: F401  # the ranks need the backend's name too
from tests.kit.ranks import ranks_fixture  # noqa: F401
from tests.passes.test_saved_values import Gated

STEPS = 4


def train(recompute: bool, folder: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """One rank's losses, and the parameters at the end."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(Gated(), Gated())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(x):
        loss = (model(x) - 1).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    options = {"stage": 3, "lowering": "inductor", "recompute": recompute, "dump": folder}
    compiled = torch.compile(step, backend="zero", options=options)
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    batch = torch.randn(6, 8, generator=generator)
    losses = [compiled(batch).detach() for _ in range(STEPS)]
    return torch.stack(losses), model.state_dict()


def num_copies(folder: Path) -> int:
    """How many copies the dumped programs of both ranks have before anything is sharded."""
    dumps = folder.glob("rank*/*/*_data_parallel.py")
    return sum(path.read_text().count("# recompute: recompute") for path in dumps)


@pytest.mark.nightly
def test_two_ranks_train_alike_with_and_without(ranks, tmp_path):
    kept = ranks(2).run(train, False, str(tmp_path / "kept"), timeout_s=600.0)
    repeated = ranks(2).run(train, True, str(tmp_path / "repeated"), timeout_s=600.0)
    assert num_copies(tmp_path / "repeated") > 0 == num_copies(tmp_path / "kept")
    for rank in range(2):
        (losses, parameters), (others, other_parameters) = kept[rank], repeated[rank]
        assert others[-1] < others[0]
        torch.testing.assert_close(others, losses, rtol=1e-6, atol=0)
        for name, value in parameters.items():
            torch.testing.assert_close(other_parameters[name], value, rtol=0, atol=1e-6)
            assert torch.equal(other_parameters[name], repeated[0][1][name])
