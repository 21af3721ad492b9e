"""A checkpoint is loaded by any ranks at any stage, and training goes on as if nothing had been."""

from __future__ import annotations

import contextlib
import statistics
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zerofx
from tests.kit.checkpoints import assert_same, load_and_train, save_trained, train, zero
from tests.kit.covering import each_pair
from tests.kit.ranks import Ranks, ranks_fixture  # noqa: F401
from tests.runtime.parameters.test_parameters import bind
from zerofx.runtime.comm.communication import Communicator
from zerofx.runtime.parameters.registry import REGISTRY

SIZES, STAGES = (1, 2, 3, 4), (0, 1, 2, 3)


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory):  # noqa: F811
    """``saved(n, stage)``: a checkpoint, the losses of what went on, and the states before."""
    made = {}

    def of(world_size: int, stage: int):
        if (world_size, stage) not in made:
            path = tmp_path_factory.mktemp("saved") / f"{world_size}-{stage}"
            made[world_size, stage] = (
                path,
                ranks(world_size).run(save_trained, path, stage, {"at": {3: []}}),
            )
        return made[world_size, stage]

    return of


def averages(outcomes) -> list[float]:
    return [statistics.fmean(losses) for losses in zip(*(o[0] for o in outcomes), strict=True)]


@pytest.mark.slow(reason="ranks compile and train")
@pytest.mark.parametrize(
    ("size", "stage", "new_size", "new_stage", "is_bound"),
    each_pair(
        SIZES,
        STAGES,
        SIZES,
        STAGES,
        (False, True),
        default=[(2, 2, 1, 1, False)],
    ),
)
def test_training_goes_on(size, stage, new_size, new_stage, is_bound, saved, ranks):  # noqa: F811
    path, before = saved(size, stage)
    after = ranks(new_size).run(load_and_train, path, new_stage, is_bound)
    for _, loaded, _, extra in after:
        assert_same(loaded, before[0][1])
        assert extra == {"at": {3: []}}
    if (new_size, new_stage) == (size, stage):
        for (losses, _, states, _), (expected, _, wanted) in zip(after, before, strict=True):
            assert losses == expected
            assert_same(states, wanted)
    assert averages(after) == pytest.approx(averages(before), rel=1e-5)


class Big(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(11, 50_000)

    def forward(self, tokens):
        return self.body(F.one_hot(tokens, 11).float()).square().mean()


def count_what_is_sent(path, stage: int) -> tuple[int, int]:
    """Bytes that pass through collectives in a save, on this rank, and bytes of its file."""
    torch._dynamo.reset()
    model = Big()
    pair = model, torch.optim.AdamW(model.parameters())
    train(zero(stage), pair, range(1))
    zerofx.save(path.with_name("warm-up"), model)  # makes the group
    sent = 0

    def counting(original):
        def call(*args, **named):
            nonlocal sent
            for value in (*args, *named.values()):
                for item in value if isinstance(value, list | tuple) else [value]:
                    sent += item.nbytes if isinstance(item, torch.Tensor) else 0
            return original(*args, **named)

        return call

    names = "broadcast all_gather gather scatter all_reduce reduce_scatter send recv".split()
    own = "broadcast allgather gather scatter allreduce send recv".split()
    modules = {dist: names, dist.distributed_c10d: names, dist.ProcessGroupGloo: own}
    with contextlib.ExitStack() as patches:
        for module, its in modules.items():
            for name in its:
                patch = mock.patch.object(module, name, counting(getattr(module, name)))
                patches.enter_context(patch)
        zerofx.save(path, *pair)
    return sent, (path / f"__{dist.get_rank()}_0.distcp").stat().st_size


@pytest.mark.nightly
@pytest.mark.parametrize("stage", (1, 3))
def test_every_rank_writes_its_part_and_sends_names_alone(stage, ranks, tmp_path):  # noqa: F811
    whole = 3 * 4 * 12 * 50_000
    for sent, written in ranks(3).run(count_what_is_sent, tmp_path / "a", stage):
        assert 0 < sent < whole / 50
        assert whole / 3 < written < whole / 3 * 1.05


def save_models_of_the_same_ranks(path) -> None:
    """Two of three models are over meshes of their own, and one is over all ranks."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(5, 3) for _ in range(3)])
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    for part, outer_stage in zip(model, (3, 3, None), strict=True):
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("node", "gpu"))
        bind(part, communicator=Communicator.of(mesh, outer_stage))
    zerofx.save(path, model)
    model.load_state_dict({name: value + 1 for name, value in saved.items()})
    with zerofx.full_params(model):
        assert not REGISTRY.barrier.written, "all writes are confirmed"
    zerofx.load(path, model)
    assert_same(dict(model.state_dict()), saved)


def test_models_over_meshes_of_the_same_ranks_are_saved_together(ranks, tmp_path):  # noqa: F811
    ranks(2).run(save_models_of_the_same_ranks, tmp_path / "a")
