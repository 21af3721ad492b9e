"""Models of timm, torchvision, diffusers, sentence-transformers, x-transformers and torchtitan."""

from __future__ import annotations

import importlib.util

import pytest
import torch

import tests.conftest  # noqa: F401  # the ranks need the backend's name too
from tests.kit.library_models import (
    MODELS,
    losses_of,
    losses_on_a_rank,
    losses_with_own_fsdp2,
)
from tests.kit.ranks import ranks_fixture  # noqa: F401

LIBRARIES = {name.partition(":")[0] for name in MODELS}
MISSING = {one for one in LIBRARIES if not importlib.util.find_spec(one.replace("-", "_"))}

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(
        bool(MISSING), reason=f"{sorted(MISSING)} missing: see CONTRIBUTING.md, libraries"
    ),
]


@pytest.mark.parametrize("name", MODELS)
def test_losses_are_those_of_one_process_with_all_batches(name, ranks):  # noqa: F811
    options = {"stage": 3, "lowering": "eager"}
    found = ranks(2).run(losses_on_a_rank, name, options, timeout_s=600.0)
    for losses, expected in zip(found, losses_of(name, 2), strict=True):
        torch.testing.assert_close(losses, expected, rtol=1e-6, atol=0)
    assert found[0] != found[1], "each rank has its batch"


@pytest.mark.parametrize("name", ("torchtitan: llama3", "torchtitan: qwen3"))
def test_losses_are_those_of_torchtitans_own_fsdp2(name, ranks):  # noqa: F811
    options = {"stage": 3, "lowering": "eager"}
    found = ranks(2).run(losses_on_a_rank, name, options, timeout_s=600.0)
    expected = ranks(2).run(losses_with_own_fsdp2, name, timeout_s=600.0)
    for losses, its in zip(found, expected, strict=True):
        torch.testing.assert_close(losses, its, rtol=1e-6, atol=0)
