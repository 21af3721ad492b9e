"""A checkpoint is loaded by any ranks at any stage, and training goes on as if nothing had been."""

from __future__ import annotations

import statistics

import pytest
import torch

from tests.checkpoints import assert_same, load_and_train, save_trained
from tests.covering import each_pair
from tests.ranks import Ranks, ranks_fixture  # noqa: F401

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


@pytest.mark.parametrize(
    ("size", "stage", "new_size", "new_stage", "is_bound"),
    each_pair(SIZES, STAGES, SIZES, STAGES, (False, True)),
)
def test_training_goes_on(size, stage, new_size, new_stage, is_bound, saved, ranks):  # noqa: F811
    path, before = saved(size, stage)
    after = ranks(new_size).run(load_and_train, path, new_stage, is_bound)
    for _, loaded, _, extra in after:
        assert_same(loaded, before[0][1])
        assert extra == {"at": {3: []}}
    if (new_size, new_stage) == (size, stage):
        for (losses, _, states), (expected, _, wanted) in zip(
            [(o[0], o[1], o[2]) for o in after], before, strict=True
        ):
            assert losses == expected
            assert_same(states, wanted)
    assert averages(after) == pytest.approx(averages(before), rel=1e-5)
    assert torch.isfinite(torch.tensor(averages(after))).all()
