"""Buckets as an accelerator has them, of a layer and aligned to 128 elements, on the CPU."""

from __future__ import annotations

from unittest import mock

import pytest

from tests.kit.covering import each_pair
from tests.kit.ranks import ranks_fixture  # noqa: F401
from tests.kit.trainings import FORMS, assert_same, clipped, read_after, scaled, trained
from zerofx.passes import base
from zerofx.passes.zero import bucket


def as_on_an_accelerator(step, options):
    """Tower's largest parameter is shorter than two aligned shards: a rank has padding alone."""
    with (
        mock.patch.object(base, "is_accelerator", lambda device: True),
        mock.patch.object(bucket, "is_accelerator", lambda device: True),
    ):
        return trained(step, options)


@pytest.mark.slow(reason="ranks compile and train")
@pytest.mark.parametrize(
    "step, stage, one_by_one",
    each_pair(FORMS, (1, 2, 3), (False, True), default=[(FORMS[0], 3, True)]),
)
def test_the_layout_of_an_accelerator_trains_alike(step, stage, one_by_one, ranks):  # noqa: F811
    """One parameter alone is aligned too; sums over shards have another order."""
    options = {"stage": stage} | ({"bucket_bytes": 1} if one_by_one else {})
    expected = ranks(2).run(trained, step, {"stage": stage})
    for mine, other in zip(
        ranks(2).run(as_on_an_accelerator, step, options), expected, strict=True
    ):
        if step in (clipped, scaled, read_after):
            assert mine[0] == pytest.approx(other[0], rel=1e-6, nan_ok=True)
        else:
            assert_same(mine[0], other[0])
        if step not in (clipped, scaled):  # a norm scales what is trained
            assert_same(mine[1:3], other[1:3])
