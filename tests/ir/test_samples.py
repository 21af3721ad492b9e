"""Samples are where a view has put them."""

import pytest

from zerofx.ir.samples import _reshaped

NONE = None


@pytest.mark.parametrize(
    "dims, before, after, expected",
    [
        (((1, 4), NONE), (4, 6), (24,), ((1, 4),)),
        (((1, 4),), (24,), (4, 6), ((1, 4), NONE)),
        (((1, 24),), (24,), (4, 6), ((1, 4), (1, 6))),
        ((NONE, (1, 3), NONE), (6, 3, 8), (6, 6, 4), (NONE, (1, 3), NONE)),
        ((NONE, (1, 3), NONE), (6, 6, 4), (18, 8), ((6, 3), NONE)),
        (((6, 3), NONE), (18, 8), (6, 3, 8), (NONE, (1, 3), NONE)),
        (((1, 4), NONE, NONE), (4, 1, 5), (4, 5), ((1, 4), NONE)),
        # One sample, whose dimension no factor shows.
        (((1, 1), NONE), (1, 6), (6,), ((1, 1),)),
        ((NONE, (1, 1), NONE), (6, 1, 8), (6, 8), ((6, 1), NONE)),
        (((6, 1), NONE), (6, 8), (6, 1, 8), (NONE, (1, 1), NONE)),
    ],
)
def test_a_view_keeps_samples_where_they_are(dims, before, after, expected):
    assert _reshaped(dims, before, after) == expected
