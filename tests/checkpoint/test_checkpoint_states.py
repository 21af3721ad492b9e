"""Whatever an optimizer keeps, and wherever, is saved as its state dict has it, and resumed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zerofx
from tests.kit.checkpoints import assert_same, states
from tests.kit.covering import each_value, exhaustive, first
from tests.kit.models import features
from tests.kit.optimizers import VARIANTS
from tests.kit.ranks import ranks_fixture  # noqa: F401
from tests.kit.trainings import PRECISIONS
from zerofx.codegen.rewrite.storage import UPDATES

NAMES = (
    *("adam_amsgrad", "adamw_tensor_lr", "sgd", "asgd_averages", "lion"),
    *map(
        exhaustive,
        ("sgd_nesterov", "rmsprop_centered", "adagrad_lr_decay", "nadam_decoupled", "rprop"),
    ),
)


class Wide(nn.Module):
    """Enough for moments in blocks of eight bits."""

    def __init__(self, width: int):
        super().__init__()
        self.body, self.head = nn.Linear(6, width), nn.Linear(width, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x)))


def step(model, optimizer, x, y):
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def built(seed, make, dtype=torch.float32, width=11):
    torch.manual_seed(seed)
    model = Wide(width).to(dtype)
    return model, make(list(model.parameters()))


def train(compiled, pair, numbers):
    dtype = next(pair[0].parameters()).dtype
    return [compiled(*pair, *(t.to(dtype) for t in features(n, 4))).item() for n in numbers]


def zero(stage, options):
    options = {"stage": stage, "lowering": "eager", **options}
    return torch.compile(step, backend="zero", options=options)


def resume(path, make, stage, options, is_bound, new_options=None, **model):
    """Train and save; load into another pair; both go on."""
    torch._dynamo.reset()
    pair, compiled = built(0, make, **model), zero(stage, options)
    train(compiled, pair, range(3))
    zerofx.save(path, *pair)
    saved = states(pair)
    losses = train(compiled, pair, range(3, 6))
    torch._dynamo.reset()
    other = built(1, make, **model)
    compiled = zero(stage, options if new_options is None else new_options)
    if is_bound:
        train(compiled, other, range(2))
    zerofx.load(path, *other)
    if is_bound:  # before, an optimizer does not know in what it will keep its states
        assert_same(states(other), saved)
    assert train(compiled, other, range(3, 6)) == losses
    assert_same(states(other), states(pair))


@pytest.mark.parametrize("name", first(1, NAMES))
def test_every_optimizer_goes_on_bitwise(name, tmp_path):
    resume(tmp_path / "a", VARIANTS[name], 3, {}, is_bound=len(name) % 2 == 0)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=1e-2)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("precision", "make", "is_bound"),
    each_value(PRECISIONS, (adamw, momentum, sgd), (True, False)),
)
def test_every_precision_goes_on_bitwise(
    precision,
    make,
    is_bound,
    tmp_path,
    ranks,  # noqa: F811
):
    model = {"dtype": torch.bfloat16, "width": 1500}
    options = PRECISIONS[precision]
    arguments = (make, 3 if is_bound else 2, options, is_bound, None)
    ranks(2).run(resume_of, tmp_path / "a", *arguments, model)


@pytest.mark.nightly
def test_moments_in_eight_bits_go_on_bitwise(tmp_path):
    options = PRECISIONS["masters, int8 moments"]
    resume(tmp_path / "a", momentum, 3, options, True, dtype=torch.bfloat16, width=1500)


def resume_of(path, make, stage, options, is_bound, new_options, model):
    resume(path, make, stage, options, is_bound, new_options, **model)


@pytest.mark.nightly
def test_a_count_of_updates_is_taken_along_and_never_asked_for(tmp_path):
    rounding, plain = {"stochastic_rounding": True}, {}

    def trained(seed, options, path=None):
        torch._dynamo.reset()
        pair = built(seed, sgd, dtype=torch.bfloat16)
        train(zero(3, options), pair, range(3))
        if path is not None:
            zerofx.load(path, *pair)
        return pair, counts_of(pair)

    def counts_of(pair):
        return {state.get(UPDATES) for state in pair[1].state_dict()["state"].values()}

    for name, options, counts in (("rounded", rounding, {3}), ("plain", plain, set())):
        pair, found = trained(0, options)
        assert found == counts
        zerofx.save(tmp_path / name, *pair)
    assert trained(1, plain, tmp_path / "rounded")[1] == {3}
    pair, found = trained(1, rounding, tmp_path / "plain")
    assert found == set()
    for options, count in (
        (rounding, 1),
        (rounding, 2),
        (plain, 2),
        ({"moment_dtype": "bfloat16"}, 2),  # there are none, and nothing is rounded
        (rounding, 3),
    ):
        torch._dynamo.reset()
        train(zero(3, options), pair, range(1))
        assert counts_of(pair) == {count}
    zerofx.unshard(*pair)
    assert counts_of(pair) == {3}


PLACES = {
    "optimizer": {"offload": "optimizer"},
    "all": {"offload": "optimizer,params"},
    "all in files": {"offload": "optimizer,params", "offload_tier": "nvme"},
    "on the device": {},
}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("place", "new_place", "is_bound"),
    first(
        1,
        [
            ("optimizer", "all in files", True),
            ("all in files", "all in files", True),
            ("all in files", "on the device", True),
            ("on the device", "all in files", False),
            ("all", "optimizer", False),
        ],
    ),
)
def test_states_move_between_device_host_and_files(
    place,
    new_place,
    is_bound,
    tmp_path,
    ranks,  # noqa: F811
):
    (tmp_path / "files").mkdir()
    places = [
        {**PLACES[name], "offload_dir": str(tmp_path / "files")}
        if "files" in name
        else PLACES[name]
        for name in (place, new_place)
    ]
    ranks(2).run(resume_of, tmp_path / "a", adamw, 3, places[0], is_bound, places[1], {})


def load_after_an_evaluation(path: str) -> tuple[list, list, list]:
    """A model that is sharded, with an optimizer that has no states yet; losses, and shapes."""
    torch._dynamo.reset()
    pair = built(0, adamw)
    train(zero(3, {}), pair, range(2))
    zerofx.save(path, *pair)
    expected = train(zero(3, {}), pair, range(2, 4))
    model, optimizer = built(1, adamw)

    def evaluate(x):
        with torch.no_grad():
            return model(x)

    torch._dynamo.reset()
    torch.compile(evaluate, backend="zero", options={"stage": 3, "lowering": "eager"})(
        features(0, 4)[0]
    )
    zerofx.load(path, model, optimizer)
    shapes = [tuple(state["exp_avg"].shape) for state in optimizer.state.values()]
    return expected, train(zero(3, {}), (model, optimizer), range(2, 4)), shapes


@pytest.mark.slow(reason="ranks load, and train on")
def test_a_model_that_is_sharded_gets_states_as_shards(ranks, tmp_path):  # noqa: F811
    for expected, losses, shapes in ranks(2).run(load_after_an_evaluation, str(tmp_path / "a")):
        assert losses == expected
        assert all(len(shape) == 1 for shape in shapes)
        whole = sum(parameter.numel() for parameter in Wide(11).parameters())
        assert sum(length for (length,) in shapes) <= whole / 2 + 8


class CountsByNumber(torch.optim.Optimizer):
    """Has a state for each power of the gradient, by number, and one that is empty at first."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            sums, empty = self.state[p].setdefault("sums", {}), self.state[p].setdefault("none", {})
            for power in (1, 2):
                sums[power] = sums.get(power, 0) + p.grad**power
            p.add_(sums[1] / (1 + sums[2]) + len(empty), alpha=-self.param_groups[0]["lr"])


def test_states_by_number_and_empty_ones_are_what_they_were(tmp_path):
    one, other = (built(seed, CountsByNumber) for seed in (0, 1))
    train(step, one, range(3))
    zerofx.save(tmp_path / "saved", *one)
    zerofx.load(tmp_path / "saved", *other)
    for state in other[1].state.values():
        assert list(state["sums"]) == [1, 2] and state["none"] == {}
    assert train(step, one, [3, 4]) == train(step, other, [3, 4])


def save_and_load_where_tensors_are_made_elsewhere(path):
    model = nn.Linear(4, 4)
    torch.set_default_device("meta")
    try:
        zerofx.save(path, model)
        zerofx.load(path, model)
    finally:
        torch.set_default_device(None)


def test_a_default_device_is_nothing_to_ranks_that_save(ranks, tmp_path):  # noqa: F811
    ranks(2).run(save_and_load_where_tensors_are_made_elsewhere, str(tmp_path / "saved"))
