"""Errors of the backend reach the user as what they are, through Dynamo."""

import json

import pytest
import torch

from zerofx import compat
from zerofx.errors import FileTierError, StepError
from zerofx.runtime.comm.agreement import AgreementError


class Odd(Exception):
    def __init__(self, first, *, second):
        super().__init__(first, second)
        self.first = first


@pytest.mark.parametrize(
    "error",
    (
        AgreementError("ranks differ"),
        FileTierError("full", path="there"),
        StepError("words"),
        FileNotFoundError(2, "no such file", "there"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
        json.JSONDecodeError("no", "text", 1),
        Odd(1, second=2),
    ),
    ids=lambda error: type(error).__name__,
)
def test_an_error_keeps_its_type_its_words_and_what_it_knows(error):
    passed = compat.dynamo.pass_through_dynamo(error)
    assert isinstance(passed, torch._dynamo.exc.ShortenTraceback)
    assert isinstance(passed, type(error)) and type(passed).__name__ == type(error).__name__
    assert (str(passed), passed.args) == (str(error), error.args)
    assert vars(error).items() <= vars(passed).items()
