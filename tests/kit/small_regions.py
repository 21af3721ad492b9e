"""Regions of one operator, the smallest there are, for tests of what compiles regions."""

import pytest

from zerofx.lower import regions


@pytest.fixture
def every_region_is_compiled(monkeypatch):
    """Have regions of a single operator compiled too."""
    monkeypatch.setattr(regions, "_is_one_operator", lambda *_: False)
