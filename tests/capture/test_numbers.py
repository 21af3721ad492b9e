"""NumPy's numbers and drawn ones: a step computes with them as eager torch, or is refused."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch._dynamo.exc import Unsupported

import tests.conftest  # noqa: F401  # the backend's name
from tests.kit.covering import each_pair
from zerofx.errors import StepError

FORMS = {
    "times_loss": lambda x, w: x.sum() * w,
    "times_rows": lambda x, w: x * w,
    "number_first": lambda x, w: w * x,
    "added": lambda x, w: x + w,
    "added_to_sum": lambda x, w: x.sum() + w,
    "power": lambda x, w: x.abs() ** w,
    "power_of": lambda x, w: (x * 0 + 2) ** w,
    "divided": lambda x, w: x / w,
    "where": lambda x, w: torch.where(x > 0, x, w),
    "computed_with": lambda x, w: x * (w * 2 + 1),
    "compared": lambda x, w: (x > w).float(),
    "in_place": lambda x, w: x.clone().mul_(w),
    "negative": lambda x, w: x.sum() * -w,
    "root": lambda x, w: x * np.sqrt(w),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64)
NUMBERS = (np.float64(0.3), np.float32(0.3), np.float16(0.3), np.int64(2), np.int32(2))


def compiled(step):
    torch._dynamo.reset()
    return torch.compile(step, backend="zero", options={"lowering": "eager"})


@pytest.mark.parametrize(("form", "dtype", "number"), each_pair(FORMS, DTYPES, NUMBERS))
def test_a_number_counts_as_in_eager_torch_or_is_refused(form, dtype, number):
    step, x = FORMS[form], (torch.arange(3) + 1).to(dtype)
    if form == "in_place" and dtype == torch.int64 and isinstance(number, np.floating):
        with pytest.raises(RuntimeError, match="can't be cast"):
            step(x, number)
        return
    expected = step(x, number)
    try:
        found = compiled(step)(x, number)
    except StepError as error:
        assert "a number of NumPy's" in str(error)
    else:
        assert found.dtype == expected.dtype and torch.equal(found, expected)


@pytest.mark.parametrize("form", ["times_rows", "added", "in_place", "compared"])
def test_with_rows_it_is_no_refusal(form):
    x, number = torch.arange(3.0), np.float64(0.3)
    assert torch.equal(compiled(FORMS[form])(x, number), FORMS[form](x, number))


def test_a_product_with_a_loss_is_refused_by_its_name():
    with pytest.raises(
        StepError, match=r"'weight'.*float64, and without.*float32.*float\(weight\)"
    ):
        compiled(lambda x, weight: x.sum() * weight)(torch.ones(3), np.float64(0.3))


def test_one_that_a_half_would_be_rounded_with_is_refused():
    with pytest.raises(StepError, match=r"rounded to torch\.bfloat16 first"):
        compiled(lambda x, w: w * x)(torch.ones(3).bfloat16(), np.float64(0.3))


OWN = random.Random(0)


@pytest.mark.parametrize("draw", [random.random, OWN.random], ids=["modules", "own"])
def test_a_random_number_that_python_draws_is_refused(draw):
    module = random if draw is random.random else OWN

    def step(x):
        return x.sum() * module.random()

    with pytest.raises((StepError, Unsupported), match="random number") as told:
        compiled(step)(torch.ones(3))
    assert "torch.rand" in str(told.value)
