"""An optimizer's state moves between a compiled step and a plain one in the middle of training."""

import copy

import pytest
import torch
from torch import nn

from tests.kit.covering import first
from tests.kit.models import Mlp, features, squared_loss
from tests.kit.optimizers import VARIANTS

# One per optimizer, with all the states that it can have.
NAMES = (
    *("adam_amsgrad", "adamw_tensor_lr", "sgd_nesterov", "rmsprop_centered", "adagrad_lr_decay"),
    *("adadelta", "adamax", "nadam_decoupled", "radam", "asgd_averages", "rprop", "lion"),
)


@pytest.fixture(autouse=True)
def forget_compiled_code():
    torch._dynamo.reset()


def step(model, optimizer, x, y):
    loss = squared_loss(model, x, y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def built(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Mlp()
    return model, VARIANTS[name](list(model.parameters()))


def train(step, pair, numbers) -> list[torch.Tensor]:
    return [step(*pair, *features(number, 4)).detach().clone() for number in numbers]


def hand_over(source, target) -> None:
    """Load everything that one pair of model and optimizer knows into another."""
    for one, other in zip(source, target, strict=True):
        other.load_state_dict(copy.deepcopy(one.state_dict()))


@pytest.mark.parametrize("name", first(1, NAMES))
def test_states_go_to_the_plain_optimizer_and_back_bitwise(name):
    whole, sharded, plain = built(name), built(name), built(name)
    zero = torch.compile(step, backend="zero", options={"stage": 3, "lowering": "eager"})
    expected = train(step, whole, range(9))
    found = train(zero, sharded, range(3))
    hand_over(sharded, plain)
    found += train(step, plain, range(3, 6))
    hand_over(plain, sharded)
    found += train(zero, sharded, range(6, 9))
    assert found == expected
    state, wanted = (pair[1].state_dict()["state"] for pair in (sharded, whole))
    assert state.keys() == wanted.keys()
    for number, entries in wanted.items():
        assert state[number].keys() == entries.keys()
        for key, value in entries.items():
            assert type(state[number][key]) is type(value)
            if isinstance(value, torch.Tensor):
                assert state[number][key].dtype is value.dtype
                assert torch.equal(state[number][key], value), key
            else:
                assert state[number][key] == value, key
