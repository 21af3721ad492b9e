"""One rank compiles again in the middle of a training: others need not know, or all hear why."""

from __future__ import annotations

import contextlib
import re
import time
from unittest import mock

import pytest
import torch

import tests.conftest  # noqa: F401  # the ranks need the backend's name too
from tests.kit import models
from tests.kit.models import Mlp, squared_loss
from tests.kit.ranks import ranks_fixture  # noqa: F401
from zerofx import backend
from zerofx.runtime.comm.agreement import Agreement, AgreementError

TIMEOUT_S = 2.0


def step(model, optimizer, x, y, clip=False):
    loss = squared_loss(model, x, y)
    loss.backward()
    if clip:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def built():
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Mlp()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


@contextlib.contextmanager
def meetings():
    """Every time that this rank waits for the others to agree on a program."""
    met = []
    original = Agreement.exchange

    def meet(self, lines, *rest):
        if lines:  # and not on the layouts of buffers
            met.append(tuple(lines))
        return original(self, lines, *rest)

    with mock.patch.object(Agreement, "exchange", meet):
        yield met


def compiled(**options):
    return torch.compile(step, backend="zero", options={"stage": 3, "lowering": "eager", **options})


def num_programs(function) -> int:
    """How many programs the function has that was compiled last from this code."""
    code = function._torchdynamo_orig_callable.__code__
    known = [known for known in backend.zero.functions if known.code is code]
    return len(max(known, key=lambda known: known.number).programs)


# The schedule does not change.


def rows_of(reason: str, rank: int, number: int) -> int:
    """Rank 1 alone has a batch of other rows, at step 5 or from then on."""
    if rank == 0 or number < 5:
        return 4
    return 3 if number == 5 or reason == "for good" else 4


def train_with_other_rows(reason: str) -> tuple:
    pair, training = built(), compiled()
    rank = torch.distributed.get_rank()
    before, compiled_at = 0, []
    with meetings() as met:
        for number in range(1, 9):
            batch = models.features(10 * rank + number, rows_of(reason, rank, number))
            if reason == "marked dynamic":
                for part in batch:
                    torch._dynamo.mark_dynamic(part, 0)
            training(*pair, *batch)
            if num_programs(training) > before:
                compiled_at.append(number)
            before = num_programs(training)
    return compiled_at, len(met), pair[0].state_dict()


@pytest.mark.nightly
@pytest.mark.parametrize(
    "reason, compiled_on_rank_1",
    [
        # Back to the first shape at step 6: dynamo's second entry, or its first, from its cache.
        ("once", [1, 5]),
        ("for good", [1, 5]),
        ("marked dynamic", [1]),
    ],
)
def test_a_rank_that_retraces_alone_needs_no_other(reason, compiled_on_rank_1, ranks):  # noqa: F811
    (alone, met, state), (other, met_too, its_state) = ranks(2).run(train_with_other_rows, reason)
    assert (alone, other) == ([1], compiled_on_rank_1)
    assert met == met_too == 1
    for name, value in state.items():
        assert torch.equal(value, its_state[name])


# It does.


def train_with_another_program(peer_memory: bool) -> tuple:
    """Rank 1 clips from step 5 on, which takes another collective."""
    pair, training = built(), compiled(peer_memory=peer_memory)
    rank = torch.distributed.get_rank()
    own, backend.AGREEMENT_TIMEOUT_S = backend.AGREEMENT_TIMEOUT_S, TIMEOUT_S
    finished, began = 0, 0.0
    try:
        for number in range(1, 9):
            began = time.monotonic()
            training(*pair, *models.features(number, 4), clip=rank == 1 and number >= 5)
            finished = number
    except AgreementError as error:
        return finished, time.monotonic() - began, str(error)
    finally:
        backend.AGREEMENT_TIMEOUT_S = own
    return finished, 0.0, "trained"


@pytest.mark.nightly
def test_a_rank_that_retraces_alone_to_another_schedule_ends_all(ranks):  # noqa: F811
    (before, took, text), (before_too, took_too, its_text) = ranks(2).run(
        train_with_another_program, True
    )
    assert before == before_too == 4
    assert max(took, took_too) < 30  # the group itself would give up after 60
    assert "rank(s) [0] posted no schedule for" in its_text
    assert "Its new schedule first differs in line" in its_text
    assert "rank 1 has compiled another program of" in text
    assert re.search(
        r"Line \d+ of the schedule is `\w+.*` on rank 0 and `\w+.*` on rank 1\. All", text
    )


@pytest.mark.nightly
def test_ranks_that_were_divided_train_on_together(ranks):  # noqa: F811
    """Both have failed as often as the other: nothing is left under way."""
    ranks(2).run(train_with_another_program, True)
    (alone, *_), (other, *_) = ranks(2).run(train_with_other_rows, "for good")
    assert (alone, other) == ([1], [1, 5])


def run_what_is_known(peer_memory: bool) -> str:
    """Both ranks have both programs, and at step 5 they take different ones."""
    pair, training = built(), compiled(peer_memory=peer_memory)
    rank = torch.distributed.get_rank()
    with meetings() as met:
        for number in range(1, 5):
            training(*pair, *models.features(number, 4), clip=number > 2)
        assert len(met) == num_programs(training) == 2
        try:
            training(*pair, *models.features(5, 4), clip=rank == 1)
        except AgreementError as error:
            assert len(met) == 2  # nothing was compiled
            return str(error)
    return "trained"


@pytest.mark.nightly
def test_ranks_that_take_different_programs_from_the_cache_hear_where_they_part(ranks):  # noqa: F811
    for rank, text in enumerate(ranks(2).run(run_what_is_known, True)):
        assert f"rank {1 - rank} runs another program than rank {rank}" in text
        assert re.search(r"Line \d+ of the schedule is .* on rank \d and .* on rank \d\.", text)


def compile_again(options: dict) -> tuple[list[int], list[int]]:
    """Meetings and programs of one step compiled three times, with all of torch's caches on."""
    met_by_turn, programs = [], []
    for _ in range(3):
        pair, training = built(), compiled(**options)
        with meetings() as met:
            training(*pair, *models.features(0, 4))
        met_by_turn.append(len(met))
        programs.append(num_programs(training))
    return met_by_turn, programs


@pytest.mark.nightly
@pytest.mark.parametrize("lowering", ("eager", "inductor"))
def test_a_program_whose_parts_come_from_caches_is_agreed_on(lowering, ranks):  # noqa: F811
    """Inductor's and our regions' caches are below the program, AOTAutograd keeps none of ours."""
    for met, programs in ranks(2).run(compile_again, {"lowering": lowering}):
        assert met == [1, 1, 1]
        assert programs == [1, 1, 1]


def test_a_hook_that_is_added_after_the_first_call_runs_until_it_is_removed():
    model = torch.nn.Sequential(torch.nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    compiled = torch.compile(step, backend="zero", options={"lowering": "eager", "stage": 0})
    x = torch.ones(1, 3)
    compiled(x)
    hook = model[0].register_forward_hook(lambda module, inputs, result: result * 0.0)
    assert compiled(x) == 0
    hook.remove()
    assert compiled(x) != 0
