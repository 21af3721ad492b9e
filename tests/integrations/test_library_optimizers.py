"""Optimizers of packages on PyPI: right on shards, or refused with the reason before a step."""

from __future__ import annotations

import importlib.util
import re

import pytest
import torch

import tests.conftest  # noqa: F401  # the ranks need the backend's name too
from tests.kit.library_optimizers import OPTIMIZERS, losses_of, losses_on_a_rank
from tests.kit.ranks import ranks_fixture  # noqa: F401

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(
        importlib.util.find_spec("lion_pytorch") is None,
        reason="the packages are missing: see CONTRIBUTING.md, libraries",
    ),
]


@pytest.mark.parametrize("stage", (3, 0))
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_are_those_of_one_process_or_refused_with_the_reason(name, stage, ranks):  # noqa: F811
    published = OPTIMIZERS[name]
    if published.refused is None:
        found = ranks(2).run(losses_on_a_rank, name, stage)
        for losses, expected in zip(found, losses_of(name, 2), strict=True):
            torch.testing.assert_close(losses, expected, rtol=1e-6, atol=0)
        return
    with pytest.raises(Exception) as refusal:
        ranks(2).run(losses_on_a_rank, name, stage)
    assert re.search(published.refused, str(refusal.value), re.DOTALL), refusal.value
