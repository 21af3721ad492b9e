"""The ranks of the tests are processes as a launcher starts them, but for what they import."""

import os

from tests.kit.ranks import ranks_fixture  # noqa: F401


def hash_and_environment():
    return hash("zero"), os.environ.get("ZEROFX_TESTED")


def test_ranks_hash_strings_differently_and_have_the_environment_of_now(ranks, monkeypatch):
    monkeypatch.setenv("ZEROFX_TESTED", "yes")
    (one, here), (other, there) = ranks(2).run(hash_and_environment)
    assert one != other
    assert here == there == "yes"
