"""What the default run takes of a product of parameters, and what is left to another."""

import itertools

import pytest

from tests.covering import each_pair, each_value

AXES = ("abcdef", (1, 2, 3), (False, True))


def short(cases):
    return [case.values for case in cases if not case.marks]


@pytest.mark.parametrize("covering", (each_value, each_pair))
def test_all_of_the_product_is_there_once(covering):
    cases = covering(*AXES)
    assert [case.values for case in cases] == list(itertools.product(*AXES))
    assert all(case.marks in ((), (pytest.mark.exhaustive,)) for case in cases)


def test_every_value_is_in_the_short_run_which_is_as_long_as_the_longest_axis():
    found = short(each_value(*AXES))
    assert len(found) == 6
    for axis, values in zip(AXES, zip(*found, strict=True), strict=True):
        assert set(values) == set(axis)


def test_every_pair_is_in_the_short_run_which_is_no_longer_than_the_two_longest_axes():
    found = short(each_pair(*AXES))
    assert len(found) == 18
    for one, other in itertools.combinations(range(3), 2):
        pairs = {(case[one], case[other]) for case in found}
        assert pairs == set(itertools.product(AXES[one], AXES[other]))
