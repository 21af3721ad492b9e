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


def first(count: int, cases: Iterable[Any]) -> list:
    """Mark all cases ``nightly`` but the first ``count`` of those that have no tier yet.

    A tuple is a case of several values.
    """
    found = []
    for case in cases:
        if not _marks(case):
            count -= 1
            case = case if count >= 0 else _at_night(case)
        found.append(case)
    return found


def only(kept: Sequence[Any], cases: Iterable[Any]) -> list:
    """Mark all cases ``nightly`` but those with these values, and those that have a tier already.

    Raises: ValueError for a value that no case has.
    """
    cases = list(cases)
    values = [_value(case) for case in cases]
    if unknown := [value for value in kept if value not in values]:
        raise ValueError(f"{unknown} is none of the cases {values}")
    return [
        case if _marks(case) or value in kept else _at_night(case)
        for case, value in zip(cases, values, strict=True)
    ]


_Marked = type(pytest.param())


def _marks(case: Any) -> Any:
    return case.marks if isinstance(case, _Marked) else ()


def _value(case: Any) -> Any:
    """Return a case without its marks: one value, or a tuple of several."""
    if not isinstance(case, _Marked):
        return case
    return case.values[0] if len(case.values) == 1 else case.values


def _at_night(case: Any) -> Any:
    if isinstance(case, _Marked):
        return pytest.param(*case.values, marks=pytest.mark.nightly, id=case.id)
    case = case if isinstance(case, tuple) else (case,)
    return pytest.param(*case, marks=pytest.mark.nightly)


def each_value(*axes: Iterable[Any]) -> list:
    """The product of ``axes``; the default run has every value of every axis at least once.

    These are as many cases as the longest axis has values.  All axes turn at once, so that
    neighbours differ in every one.  The others are ``exhaustive``.
    """
    return _marked(axes, nightly_size=1)


def each_pair(*axes: Iterable[Any], default: Sequence[tuple] = ()) -> list:
    """``each_value``, but the nightly run has every pair of values of two axes beside.

    ``default`` are the cases of the default run, where some tell more than others.
    """
    return _marked(axes, nightly_size=2, default=default)


def _marked(
    axes: Iterable[Iterable[Any]], nightly_size: int, default: Sequence[tuple] = ()
) -> list:
    values = [list(axis) for axis in axes]
    cases = list(itertools.product(*(range(len(axis)) for axis in values)))
    of_default = _covering(cases, 1)
    if default:
        of_default = {
            tuple(axis.index(value) for axis, value in zip(values, case, strict=True))
            for case in default
        }
    of_nightly = _covering(cases, nightly_size)
    found = []
    for case in cases:
        marks = () if case in of_default else "nightly" if case in of_nightly else "exhaustive"
        of_case = [axis[index] for axis, index in zip(values, case, strict=True)]
        found.append(pytest.param(*of_case, marks=getattr(pytest.mark, marks) if marks else ()))
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
