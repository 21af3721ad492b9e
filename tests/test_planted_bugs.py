"""Bugs planted behind every pass are found by the verifier or by validation, or are none."""

import pytest

from tests.planted.steps import FORMS
from tests.planted.verdicts import verdicts

SOME = 12
"""By default one bug of so many is planted."""

QUICK = ("layers, everything in files", "convolutions, two optimizers")


def survivors_without_a_reason(name, is_chosen):
    form = FORMS[name]
    with form.captured() as step:
        found = list(verdicts(step, is_chosen, **form.arguments))
    assert len(found) > 20 and any(not one.survived for one in found)
    return [str(one) for one in found if one.survived and not one.why]


@pytest.mark.parametrize("name", QUICK)
def test_some_bugs_are_found_or_are_none(name):
    assert survivors_without_a_reason(name, lambda number: number % SOME == 0) == []


@pytest.mark.long
@pytest.mark.parametrize("name", FORMS)
def test_every_bug_is_found_or_is_none(name):
    assert survivors_without_a_reason(name, lambda number: True) == []
