"""Ranks that choose differently come to one choice, or to one error."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from zerofx.compiler.best import Choice, Form, agreed, key_of
from zerofx.errors import BudgetError
from zerofx.options import Options


def form(step_s: float, **options) -> Form:
    return Form(Options(**options), 90, step_s)


class Searched:
    """A search of which it is known what it finds: forms that fit, the best one first."""

    limit, within = 100, "memory_limit is 100 bytes"

    def __init__(self, *forms: Form) -> None:
        self.forms = forms

    def run(self) -> Choice:
        if not self.forms:
            raise BudgetError("needs 200")
        return Choice(self.forms[0], self.limit, 1.0, self.forms)

    def form_of(self, key, has_budget):
        for each in self.forms:
            if (key_of(each.options), each.options.memory_budget is not None) == (key, has_budget):
                return each
        return None


def on_ranks(*searches: Searched) -> list:
    """Return what each rank agrees on, or its error's words; all meet at each exchange."""
    barrier = threading.Barrier(len(searches))
    posted = [b""] * len(searches)
    results: list = [None] * len(searches)

    def run(rank: int) -> None:
        def exchange(_lines, value):
            posted[rank] = value
            barrier.wait(10)
            every = list(posted)
            barrier.wait(10)
            return every

        try:
            results[rank] = agreed(searches[rank], exchange)
        except BudgetError as error:
            results[rank] = str(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(searches))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_the_same_choice_takes_no_more_than_who_has_least():
    one = form(1.0, stage=3, memory_budget=50, plan="auto")
    other = form(1.0, stage=3, memory_budget=40, plan=None)  # where the greedy choice was better
    found = [choice.options for choice in on_ranks(Searched(one), Searched(other))]
    assert found == [replace(one.options, memory_budget=40, plan=None)] * 2


def test_what_fits_all_is_taken_whose_slowest_rank_is_fastest():
    fast, slow, alone = form(1.0, stage=1), form(2.0, stage=3), form(0.5, stage=0)
    found = on_ranks(Searched(alone, fast, slow), Searched(fast, slow), Searched(slow, fast))
    assert [choice.options.stage for choice in found] == [1, 1, 1]


def test_nothing_that_fits_all_is_an_error_of_all():
    found = on_ranks(Searched(form(1.0, stage=0)), Searched(form(1.0, stage=3)))
    assert found[0] == found[1] and "none of 2 fits all of them" in found[0]


def test_what_fits_no_form_of_one_rank_is_an_error_of_all():
    found = on_ranks(Searched(form(1.0, stage=0)), Searched())
    assert found == ["rank 1: needs 200"] * 2


def test_a_limit_that_has_no_room_for_what_is_spare_is_told_to_those_who_take_it():
    one = replace(form(1.0, stage=3), spare=10)
    assert Choice(one, 100, 1.0, [one]).options == one.options
    assert Choice(one, 99, 1.0, [one]).options == replace(one.options, memory_limit=99)


@pytest.mark.parametrize("name", ["stage", "bucket_bytes", "offload", "recompute"])
def test_what_is_chosen_tells_forms_apart(name):
    other = {"stage": 1, "bucket_bytes": 7, "offload": ("optimizer",), "recompute": False}[name]
    assert key_of(Options()) != key_of(Options(**{name: other}))
