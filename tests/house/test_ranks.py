"""The ranks of the tests are processes as a launcher starts them, but for what they import."""

import os

import torch
import torch._dynamo.convert_frame

from tests.kit.ranks import kept, ranks_fixture  # noqa: F401


def hash_and_environment():
    return hash("zero"), os.environ.get("ZEROFX_TESTED")


def test_ranks_hash_strings_differently_and_have_the_environment_of_now(ranks, monkeypatch):
    monkeypatch.setenv("ZEROFX_TESTED", "yes")
    (one, here), (other, there) = ranks(2).run(hash_and_environment)
    assert one != other
    assert here == there == "yes"


def test_their_processes_are_kept_while_the_environment_is_the_same(ranks, monkeypatch):
    before = ranks(2).run(os.getpid)
    assert ranks(2).run(os.getpid) == before
    monkeypatch.setenv("ZEROFX_TESTED", "again")
    assert not set(ranks(2).run(os.getpid)) & set(before)


def test_behind_a_module_they_forget_what_is_compiled(ranks):
    assert ranks(2).run(compile_something) == [1, 1]
    kept().forget()
    assert ranks(2).run(num_compiled) == [0, 0]


def compile_something():
    torch.compile(torch.sin, backend="eager")(torch.ones(1))
    return num_compiled()


def num_compiled():
    return len(torch._dynamo.convert_frame.output_codes.seen)
