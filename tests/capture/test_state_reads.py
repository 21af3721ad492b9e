"""A step that looks into ``optimizer.state``: right at stage 0, refused where it would not be."""

import pytest
import torch

import tests.conftest  # noqa: F401  # the backend's name
from tests.kit.covering import each_pair, each_value, nightly
from tests.kit.trainings import assert_same, built, plain, run, zero
from zerofx.errors import StepError


@pytest.fixture(autouse=True)
def forget_compiled_code():
    torch._dynamo.reset()


def read_after(model, optimizer, x, y):
    loss = plain(model, optimizer, x, y)
    return loss + optimizer.state[model.head.weight]["exp_avg"].sum()


def read_before(model, optimizer, x, y):
    moment = optimizer.state[model.head.weight]["exp_avg_sq"].sum()
    return plain(model, optimizer, x, y) + moment


def read_if_there(model, optimizer, x, y):
    loss = plain(model, optimizer, x, y)
    state = optimizer.state.get(model.head.weight)
    return loss if state is None else loss + state["exp_avg"].sum()


def count_states(model, optimizer, x, y):
    return plain(model, optimizer, x, y) + len(optimizer.state)


def count_steps(model, optimizer, x, y):
    loss = plain(model, optimizer, x, y)
    return loss + optimizer.state[model.head.weight]["step"]


def look_only(model, optimizer, x, y):
    return optimizer.state[model.head.weight]["exp_avg"].abs().max()


def refused(step, words, pair, **options):
    """Refuse it in the middle of a training, which then goes on as if it had not been tried."""
    other = built()
    losses = run(zero(plain, **options), pair, range(2))
    with pytest.raises(StepError, match=words):
        run(zero(step, **options), pair, range(2, 4))
    losses += run(zero(plain, **options), pair, range(2, 4))
    assert losses == run(plain, other, range(4))
    assert_same(pair[0].state_dict(), other[0].state_dict())


SHARD = r"reads optimizer\.state\[\.\.\.\]\['exp_avg(_sq)?'\] of AdamW, .* its shard alone"


@pytest.mark.parametrize(
    ("step", "stage"),
    each_pair(
        (read_after, read_before, read_if_there, look_only),
        (1, 2, 3),
        default=[(read_after, 1)],
    ),
)
def test_states_that_are_shards_are_refused(step, stage):
    refused(step, SHARD, built(), stage=stage)


@pytest.mark.parametrize("step", (read_before, nightly(read_after)))
def test_states_that_its_own_update_will_replace_are_refused(step):
    """They are whole, from eager steps, and another tensor is updated."""
    pair = built()
    run(plain, pair, range(2))
    with pytest.raises(StepError, match=SHARD):
        run(zero(step, stage=3), pair, range(2, 3))


@pytest.mark.parametrize("step, stage", each_value((read_if_there, count_states), (0, 3)))
def test_states_that_are_not_there_yet_are_refused(step, stage):
    pair = built()
    with pytest.raises(StepError, match="the state of AdamW, which its own .* the first to fill"):
        run(zero(step, stage=stage), pair, range(1))
    assert not pair[1].state


@pytest.mark.parametrize(
    ("step", "stage"), (nightly(read_after, 0), nightly(read_before, 0), (count_steps, 3))
)
def test_whole_states_and_the_number_of_steps_are_read_as_they_are(step, stage):
    pair, other = built(), built()
    for one in (pair, other):
        run(plain, one, range(2))
    assert run(zero(step, stage=stage), pair, range(2, 5)) == run(step, other, range(2, 5))
