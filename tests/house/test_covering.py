"""Which cases of a product of parameters the default run takes, and which another tier."""

import itertools

import pytest

from tests.kit.covering import each_pair, each_value, exhaustive, first, nightly, only

AXES = ("abcdef", (1, 2, 3), (False, True))


def of(cases, *tiers):
    """The values of the cases in these tiers; ``""`` is the default one."""
    return [case.values for case in cases if "".join(mark.name for mark in case.marks) in tiers]


@pytest.mark.parametrize("covering", (each_value, each_pair))
def test_all_of_the_product_is_there_once(covering):
    assert of(covering(*AXES), "", "nightly", "exhaustive") == list(itertools.product(*AXES))


@pytest.mark.parametrize("covering", (each_value, each_pair))
def test_every_value_is_in_the_default_run_which_is_as_long_as_the_longest_axis(covering):
    found = of(covering(*AXES), "")
    assert len(found) == 6
    for axis, values in zip(AXES, zip(*found, strict=True), strict=True):
        assert set(values) == set(axis)


def test_every_pair_is_in_the_nightly_run_which_adds_few_to_the_two_longest_axes():
    assert of(each_value(*AXES), "nightly") == []
    found = of(each_pair(*AXES), "", "nightly")
    assert len(found) <= 18 + 6
    for one, other in itertools.combinations(range(3), 2):
        pairs = {(case[one], case[other]) for case in found}
        assert pairs == set(itertools.product(AXES[one], AXES[other]))


def test_the_default_runs_cases_may_be_chosen():
    chosen = [("a", 3, True), ("f", 1, False)]
    assert of(each_pair(*AXES, default=chosen), "") == chosen
    with pytest.raises(ValueError, match="not in list"):
        each_pair(*AXES, default=[("x", 3, True)])


CASES = ["a", exhaustive("b"), "c", pytest.param("d", id="the last")]


def test_all_but_the_first_are_nightly():
    cases = first(1, CASES)
    assert cases[0] == "a"
    assert of(cases[1:], "nightly") == [("c",), ("d",)]
    assert of(cases[1:], "exhaustive") == [("b",)]
    assert cases[-1].id == "the last"


def test_all_but_the_chosen_are_nightly():
    cases = only(("c",), CASES)
    assert cases[2] == "c"
    assert of([cases[0], cases[3]], "nightly") == [("a",), ("d",)]
    assert of([cases[1]], "exhaustive") == [("b",)]
    assert only([(1, 2)], [(1, 2), (3, 4)]) == [(1, 2), nightly(3, 4)]


def test_a_chosen_case_that_there_is_not_is_refused():
    with pytest.raises(ValueError, match="'x'.* is none of the cases"):
        only(("a", "x"), CASES)
