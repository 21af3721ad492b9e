"""A product of parameters of which the default run takes part; the rest is in another tier."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def exhaustive(*case: Any) -> Any:
    """A case for the exhaustive run, and for a nightly one that draws it."""
    return pytest.param(*case, marks=pytest.mark.exhaustive)


def nightly(*case: Any) -> Any:
    """A case for the nightly run."""
    return pytest.param(*case, marks=pytest.mark.nightly)


def each_value(*axes: Iterable[Any]) -> list:
    """The product of ``axes``; those that a short run can miss are ``exhaustive``.

    The default run has every value of every axis at least once: as many cases as the longest axis
    has values.  All axes turn at once, so that neighbours differ in every one.
    """
    return _marked(axes, size=1)


def each_pair(*axes: Iterable[Any]) -> list:
    """``each_value``, but the default run has every pair of values of two axes."""
    return _marked(axes, size=2)


def _marked(axes: Iterable[Iterable[Any]], size: int) -> list:
    values = [list(axis) for axis in axes]
    cases = list(itertools.product(*(range(len(axis)) for axis in values)))
    short = _covering(cases, size)
    found = []
    for case in cases:
        of_case = [axis[index] for axis, index in zip(values, case, strict=True)]
        found.append(pytest.param(*of_case) if case in short else exhaustive(*of_case))
    return found


def _covering(cases: Sequence[tuple[int, ...]], size: int) -> set[tuple[int, ...]]:
    """Few of ``cases`` that have every combination of ``size`` indices, chosen greedily.

    Among equals the one whose indices were used least is chosen, and then the first.
    """
    missing = {part for case in cases for part in _parts(case, size)}
    used: dict[tuple[int, int], int] = {}
    chosen: set[tuple[int, ...]] = set()
    while missing:
        best = max(
            cases,
            key=lambda case: (
                len(missing & _parts(case, size)),
                -sum(used.get(place, 0) for place in enumerate(case)),
            ),
        )
        chosen.add(best)
        missing -= _parts(best, size)
        for place in enumerate(best):
            used[place] = used.get(place, 0) + 1
    return chosen


def _parts(case: tuple[int, ...], size: int) -> set[tuple[tuple[int, int], ...]]:
    return set(itertools.combinations(enumerate(case), size))
