"""``delayed_update``: a call computes with values that lack the last update, and loses nothing."""

import copy
import gc
import subprocess
import sys
import textwrap
import threading
import weakref
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch.nn.utils import clip_grad_norm_

import zerofx
from tests.kit.covering import each_pair, nightly, only
from tests.kit.models import features
from tests.kit.ranks import ranks_fixture  # noqa: F401
from tests.kit.trainings import (
    CLIPPED,
    PRECISIONS,
    SCALERS,
    accumulated,
    assert_same,
    built,
    clipped,
    gradients_stay,
    plain,
    read_after,
    run,
    stepped_twice,
    zero,
)
from zerofx.compiler.choices import choose
from zerofx.errors import StepError
from zerofx.runtime.optimizer import update as updates
from zerofx.runtime.optimizer.steps import OptimizerSteps
from zerofx.runtime.optimizer.update import ReadyUpdate
from zerofx.runtime.parameters.registry import REGISTRY
from zerofx.runtime.storage.copies import Copies

DELAYED = {"offload": "optimizer", "delayed_update": True}


@pytest.fixture(autouse=True)
def forget_compiled_code():
    torch._dynamo.reset()


def pending(optimizer):
    """What is left to do of an optimizer's updates."""
    entries = [entry for each in REGISTRY.delayed for entry in each.pending.items()]
    return [update for key, update in entries if key[0]() is optimizer]


class Reference:
    """The definition, by hand: on whole tensors, with torch's optimizer.

    ``device`` is what a call computes with; ``host`` is what updates are made to.
    """

    def __init__(self, make=torch.optim.AdamW, dtype=torch.float32, num_ranks=1):
        self.host, self.optimizer = built(dtype, make)
        self.device = copy.deepcopy(self.host)
        self.num_ranks = num_ranks

    def call(self, x, y, step=plain):
        """One call; return the ranks' losses."""
        losses, gradients = [], []
        micro_batches = 2 if step is accumulated else 1
        for rank in range(self.num_ranks):
            parts = [part.chunk(self.num_ranks)[rank].chunk(micro_batches) for part in (x, y)]
            micro_losses = []
            for part in zip(*parts, strict=True):
                micro_losses.append(F.mse_loss(self.device(part[0]), part[1]))
                micro_losses[-1].backward()
            losses.append(torch.stack(micro_losses).sum().item())
            gradients.append([p.grad for p in self.device.parameters()])
            self.device.zero_grad()
        for p, *mine in zip(self.device.parameters(), *gradients, strict=True):
            p.grad = None if mine[0] is None else sum(mine) / self.num_ranks
        if step is clipped:
            clip_grad_norm_(self.device.parameters(), CLIPPED)
        gradients = [p.grad for p in self.device.parameters()]
        self.device.zero_grad()
        self.settle()  # what the call before's gradients have made
        for p, gradient in zip(self.host.parameters(), gradients, strict=True):
            p.grad = gradient
        self.optimizer.step()
        return losses

    def settle(self):
        with torch.no_grad():
            for p, new in zip(self.device.parameters(), self.host.parameters(), strict=True):
                p.copy_(new)


def schedule_of(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: 1 / (1 + number))


def expected(step, calls, settle_after=(), num_ranks=1, make=torch.optim.AdamW):
    """Losses of each rank, then parameters and states, by the definition."""
    reference = Reference(make, num_ranks=num_ranks)
    scheduler = schedule_of(reference.optimizer)
    losses = []
    for number in range(calls):
        losses.append(reference.call(*features(number, 8), step))
        scheduler.step()
        if number in settle_after:
            reference.settle()
    reference.settle()
    states = reference.device.state_dict(), reference.optimizer.state_dict()
    return [list(mine) for mine in zip(*losses, strict=True)], *states


def trained(step, calls, options, settle=(), make=torch.optim.AdamW):
    torch._dynamo.reset()
    model, optimizer = built(make=make)
    scheduler = schedule_of(optimizer)
    compiled, losses = zero(step, **{**DELAYED, **options}), []
    for number in range(calls):
        losses += run(compiled, (model, optimizer), [number])
        scheduler.step()
        for by in settle[number : number + 1]:
            SETTLE[by](model, optimizer)
    return losses, model.state_dict(), optimizer.state_dict()


@pytest.mark.slow(reason="two ranks train")
@pytest.mark.parametrize(
    "step, world_size",
    each_pair((plain, clipped, accumulated), (1, 2), default=[(plain, 2)]),
)
def test_is_bitwise_the_definition(step, world_size, ranks):
    losses, *states = expected(step, 5, num_ranks=world_size)
    found = [trained(step, 5, {})] if world_size == 1 else ranks(2).run(trained, step, 5, {})
    for mine, (got, *rest) in zip(losses, found, strict=True):
        if step is clipped and world_size == 2:  # a norm is summed in another order
            torch.testing.assert_close((got, *rest), (mine, *states), rtol=1e-5, atol=1e-7)
        else:
            assert_same((got, *rest), (mine, *states))


@pytest.mark.nightly
@pytest.mark.parametrize(
    "options",
    [{"lowering": "inductor"}, {"bucket": False}, {"update_in_backward": False}],
    ids=str,
)
def test_is_the_definition_with_other_options(options):
    (losses,), *states = expected(plain, 4)
    got = trained(plain, 4, options)
    torch.testing.assert_close(got, (losses, *states), rtol=1e-5, atol=1e-7)


def settled_each_time(options, calls=3):
    torch._dynamo.reset()
    pair, losses = built(torch.bfloat16), []
    compiled = zero(**options)
    for number in range(calls):
        losses += run(compiled, pair, [number])
        pair[1].state_dict()
    return losses, pair[0].state_dict(), pair[1].state_dict()


@pytest.mark.nightly
@pytest.mark.parametrize("name", PRECISIONS)
def test_settled_after_every_call_it_is_the_same_as_without(name):
    with mock.patch("zerofx.codegen.rewrite.storage.FEWEST_CODED", 64):
        delayed = settled_each_time({**DELAYED, **PRECISIONS[name]})
        assert_same(delayed, settled_each_time({"offload": "optimizer", **PRECISIONS[name]}))


@pytest.mark.nightly
def test_differs_from_updates_in_time():
    model, optimizer = built()
    before = copy.deepcopy(model.state_dict())
    reference = Reference()
    first = reference.call(*features(0, 8))
    assert_same(reference.device.state_dict(), before)
    compiled = zero(**DELAYED)
    got = run(compiled, (model, optimizer), [0, 0])
    assert got == [first[0], first[0]], "the first call's update is not there in the second"
    assert run(compiled, (model, optimizer), [0])[0] < first[0]


# What settles


def loaded(model, optimizer):
    """Loads what is there: a parameter that is not loaded keeps the update too."""
    weight = model.head.weight
    saved = {"head.weight": torch.zeros(weight.shape)}
    model.load_state_dict(saved, strict=False)


def opened(model, optimizer):
    with zerofx.full_params(model):
        model.head.weight.detach().clone()


def evaluated(model, optimizer):
    run(zero(evaluation, offload="optimizer", delayed_update=True), (model, optimizer), [9])


def evaluation(model, optimizer, x, y):
    with torch.no_grad():
        return F.mse_loss(model(x), y)


SETTLE = {
    "model": lambda model, optimizer: model.state_dict(),
    "optimizer": lambda model, optimizer: optimizer.state_dict(),
    "open": opened,
    "evaluation": evaluated,
    "nothing": lambda model, optimizer: None,
    "unshard": lambda model, optimizer: zerofx.unshard(model, optimizer),
}


@pytest.mark.slow(reason="ranks compile and train")
@pytest.mark.parametrize("by", only(("open",), [by for by in SETTLE if by != "nothing"]))
def test_what_looks_settles_and_the_next_call_is_a_first_one(by, ranks):
    (first, second), *states = expected(plain, 4, settle_after=(0, 2), num_ranks=2)
    found = ranks(2).run(trained, plain, 4, {}, (by, "nothing", by))
    for mine, got in zip((first, second), found, strict=True):
        assert_same(got, (mine, *states))
    assert first != expected(plain, 4, num_ranks=2)[0][0], "settling shows"


def test_what_is_loaded_is_loaded_over_the_pending_update():
    reference = Reference()
    model, optimizer = built()
    compiled = zero(**DELAYED)
    for number in range(2):
        reference.call(*features(number, 8))
        run(compiled, (model, optimizer), [number])
    reference.settle()
    loaded(model, optimizer)
    wanted = reference.device.state_dict()
    wanted["head.weight"].zero_()
    assert_same(model.state_dict(), wanted)
    assert not pending(optimizer)


def test_loading_the_optimizer_settles_first():
    reference = Reference()
    model, optimizer = built()
    compiled = zero(**DELAYED)
    reference.call(*features(0, 8))
    run(compiled, (model, optimizer), [0])
    saved = optimizer.state_dict()
    reference.settle()
    for number in range(1, 3):
        reference.call(*features(number, 8))
        run(compiled, (model, optimizer), [number])
    optimizer.load_state_dict(saved)
    reference.settle()
    assert_same(model.state_dict(), reference.device.state_dict())
    assert_same(optimizer.state_dict(), saved)


@pytest.mark.nightly
def test_a_run_may_begin_in_time_and_go_on_delayed_and_back():
    reference, pair = Reference(), built()
    in_time, delayed = zero(offload="optimizer"), zero(**DELAYED)
    for number, compiled in enumerate((in_time, delayed, delayed, in_time, delayed, delayed)):
        if compiled is in_time:
            reference.settle()  # before, and its own
        assert run(compiled, pair, [number]) == reference.call(*features(number, 8))
        if compiled is in_time:
            reference.settle()
    reference.settle()
    assert_same(pair[0].state_dict(), reference.device.state_dict())
    assert_same(pair[1].state_dict(), reference.optimizer.state_dict())


@pytest.mark.nightly
def test_an_evaluation_in_inference_mode_leaves_states_that_later_steps_change(monkeypatch):
    monkeypatch.setattr(updates, "FEWEST_ELEMENTS", 0)
    pair, compiled = built(), zero(lowering="inductor", **DELAYED)
    run(compiled, pair, [0])
    with torch.inference_mode():
        evaluated(*pair)
    assert not pending(pair[1])
    assert not any(value.is_inference() for s in pair[1].state.values() for value in s.values())
    run(compiled, pair, [1, 2])


@pytest.mark.nightly
def test_two_models_of_one_function_do_not_settle_each_other():
    pairs = [built(), built()]
    wanted = Reference()
    compiled = zero(**DELAYED)
    for number in range(4):
        loss = wanted.call(*features(number, 8))
        for pair in pairs:
            assert run(compiled, pair, [number]) == loss


@pytest.mark.nightly
def test_another_batch_size_takes_over_what_is_pending():
    reference, pair = Reference(), built()
    compiled = zero(**DELAYED)
    for number, rows in enumerate((8, 6, 8, 6)):
        x, y = features(number, rows)
        assert compiled(*pair, x, y).item() == reference.call(x, y)[0]
    reference.settle()
    assert_same(pair[0].state_dict(), reference.device.state_dict())


@pytest.mark.nightly
def test_a_function_that_is_gone_loses_nothing():
    reference, (model, optimizer) = Reference(), built()
    compiled = zero(**DELAYED)
    for number in range(2):
        reference.call(*features(number, 8))
        run(compiled, (model, optimizer), [number])
    torch._dynamo.reset()
    del compiled
    gc.collect()
    reference.settle()
    assert_same(optimizer.state_dict(), reference.optimizer.state_dict())
    assert_same(model.state_dict(), reference.device.state_dict())


@pytest.mark.nightly
def test_an_optimizer_that_is_gone_leaves_its_values_and_a_model_that_is_gone_nothing():
    reference, (model, optimizer) = Reference(), built()
    compiled = zero(**DELAYED)
    reference.call(*features(0, 8))
    run(compiled, (model, optimizer), [0])
    gone = [weakref.ref(optimizer), weakref.ref(model.head.weight)]
    torch._dynamo.reset()
    del optimizer
    gc.collect()
    assert gone[0]() is None
    reference.settle()
    assert_same(model.state_dict(), reference.device.state_dict())
    pair = built()
    run(compiled, pair, [0])
    for each in pending(pair[1]):
        each.updating._computing.result()  # a thread holds parameters for as long as it computes
    update = weakref.ref(pending(pair[1])[0])
    del each
    torch._dynamo.reset()
    parameter = weakref.ref(pair[0].head.weight)
    del pair, model
    gc.collect()
    assert parameter() is None and gone[1]() is None and update() is None


# Beside the call


def test_a_call_ends_while_its_updates_are_under_way():
    pair, compiled = built(), zero(**DELAYED)
    run(compiled, pair, range(2))
    go, original = threading.Event(), ReadyUpdate.__init__

    def held(self, compute, finish):
        def later():
            assert go.wait(30)
            return compute()

        original(self, later, finish)

    with mock.patch.object(ReadyUpdate, "__init__", held):
        run(compiled, pair, [2])
        assert pending(pair[1])
        assert all(update.updating is not None for update in pending(pair[1]))
        go.set()
        wanted = Reference()
        for number in range(3):
            wanted.call(*features(number, 8))
        wanted.settle()
        assert_same(pair[0].state_dict(), wanted.device.state_dict())


def skipping(model, optimizer, x, y):
    scaler = SCALERS[0]
    loss = F.mse_loss(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return loss


def test_a_skipped_update_stores_the_one_before_and_leaves_nothing():
    SCALERS[:] = [torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=100)]
    reference, pair = Reference(make=torch.optim.SGD), built(make=torch.optim.SGD)
    compiled = zero(skipping, **DELAYED)
    for number in range(6):
        x, y = features(number, 8)
        if number in (2, 4):
            loss = compiled(*pair, x, y * float("inf"))
            assert not loss.isfinite() and not pending(pair[1])
            reference.settle()
        else:
            assert compiled(*pair, x, y).item() == reference.call(x, y)[0]
    reference.settle()
    assert_same(pair[0].state_dict(), reference.device.state_dict())


def test_a_step_that_fails_leaves_nothing_half_done():
    reference, (model, optimizer) = Reference(), built()
    compiled = zero(update_in_backward=False, **DELAYED)
    for number in range(2):
        reference.call(*features(number, 8))
        run(compiled, (model, optimizer), [number])
    with (
        mock.patch.object(Copies, "to_host_start", side_effect=OSError("no more")),
        pytest.raises(OSError, match="no more"),
    ):
        run(compiled, (model, optimizer), [2])
    assert not pending(optimizer)
    reference.settle()
    assert_same(optimizer.state_dict(), reference.optimizer.state_dict())
    for number in range(3, 5):
        assert run(compiled, (model, optimizer), [number]) == reference.call(*features(number, 8))
    reference.settle()
    assert_same(model.state_dict(), reference.device.state_dict())


@pytest.mark.nightly
def test_a_step_that_fails_leaves_another_models_updates_to_it():
    reference, pair, failing = Reference(), built(), built()
    compiled = zero(update_in_backward=False, bucket_bytes=400, **DELAYED)
    for each in (failing, pair):
        run(compiled, each, [0])
    failing[1].state_dict()
    go, original = threading.Event(), ReadyUpdate.__init__

    def held(self, compute, finish):
        original(self, lambda: (go.wait(30), compute())[1], finish)

    def fail(*_arguments, **_named):
        threading.Timer(0.1, go.set).start()
        raise OSError("no more")

    with mock.patch.object(ReadyUpdate, "__init__", held):
        run(compiled, pair, [1])
    with (
        mock.patch.object(Copies, "to_host_start", side_effect=fail),
        pytest.raises(OSError, match="no more"),
    ):
        run(compiled, failing, [1])
    for number in range(2):
        reference.call(*features(number, 8))
    assert run(compiled, pair, [2]) == reference.call(*features(2, 8))


@pytest.mark.nightly
def test_a_step_that_fails_after_its_updates_has_made_them():
    reference, (model, optimizer) = Reference(), built()
    compiled = zero(update_in_backward=False, **DELAYED)
    for number in range(2):
        reference.call(*features(number, 8))
        run(compiled, (model, optimizer), [number])
    with (
        mock.patch.object(OptimizerSteps, "finish", side_effect=OSError("no more")),
        pytest.raises(OSError, match="no more"),
    ):
        run(compiled, (model, optimizer), [2])
    reference.call(*features(2, 8))
    reference.settle()
    assert_same(optimizer.state_dict(), reference.optimizer.state_dict())
    assert_same(model.state_dict(), reference.device.state_dict())


@pytest.mark.nightly
def test_an_update_that_fails_is_raised_by_who_waits_for_it():
    pair, compiled = built(), zero(**DELAYED)
    run(compiled, pair, range(2))
    original = ReadyUpdate.__init__

    def failing(self, compute, finish):
        original(self, mock.Mock(side_effect=OSError("no more")), finish)

    with mock.patch.object(ReadyUpdate, "__init__", failing):
        run(compiled, pair, [2])
    with pytest.raises(OSError, match="no more"):
        run(compiled, pair, [3])
    assert not pending(pair[1])
    before = pair[0].state_dict()
    run(compiled, pair, [4])
    assert pair[0].state_dict()["head.weight"].ne(before["head.weight"]).any()


@pytest.mark.nightly
def test_the_process_may_end_with_updates_pending():
    program = """
        import time, torch, zerofx
        from unittest import mock
        from tests.runtime.optimizer.test_delayed_update import DELAYED
        from tests.kit.trainings import built, run, zero
        from zerofx.runtime.optimizer.update import ReadyUpdate
        original = ReadyUpdate.__init__
        def slow(self, compute, finish):
            original(self, lambda: (time.sleep(0.3), compute())[1], finish)
        ReadyUpdate.__init__ = slow
        pair = built()
        run(zero(**DELAYED), pair, range(2))
        print("end")
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=60
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "end\n", "")


class Counting(torch.optim.SGD):
    """Its groups change with every step, and the update depends on them."""

    def __init__(self, params, lr):
        super().__init__(params, lr=lr)
        for group in self.param_groups:
            group["count"] = 0.0

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad * (group["lr"] / (1.0 + group["count"])))
            group["count"] = group["count"] + 1.0


@pytest.mark.nightly
def test_groups_that_an_update_changes_are_changed_before_the_next_begins():
    reference, (model, optimizer) = Reference(make=Counting), built(make=Counting)
    compiled = zero(**DELAYED)
    for number in range(4):
        assert run(compiled, (model, optimizer), [number]) == reference.call(*features(number, 8))
    reference.settle()
    assert optimizer.state_dict()["param_groups"][1]["count"] == 4.0
    assert_same(model.state_dict(), reference.device.state_dict())


def tensor_rates(params, lr):
    groups = [{**group, "lr": torch.tensor(group.get("lr", lr))} for group in params]
    return torch.optim.SGD(groups, lr=torch.tensor(lr), momentum=0.9)


def test_a_learning_rate_that_is_a_tensor_is_read_at_the_call():
    """Schedulers write to it in place, while the update is under way."""
    go, original = threading.Event(), ReadyUpdate.__init__

    def held(self, compute, finish):
        original(self, lambda: (go.wait(30), compute())[1], finish)

    reference, (model, optimizer) = Reference(make=tensor_rates), built(make=tensor_rates)
    compiled = zero(**DELAYED)
    with mock.patch.object(ReadyUpdate, "__init__", held):
        run(compiled, (model, optimizer), [0])
        for group in optimizer.param_groups:
            group["lr"].fill_(7.0)
        go.set()
        reference.call(*features(0, 8))
        reference.settle()
        assert_same(model.state_dict(), reference.device.state_dict())


# What is refused


def decayed(model, optimizer, x, y):
    with torch.no_grad():
        model.head.weight.mul_(0.9)
    return plain(model, optimizer, x, y)


@pytest.mark.parametrize(
    ("step", "words"),
    [
        nightly(stepped_twice, "is updated twice in a call"),
        (read_after, "'.*twice.weight' is read after its update"),
        (decayed, "'.*head.weight' is written to in the step"),
    ],
)
def test_steps_are_refused_before_anything_changes(step, words):
    model, optimizer = built()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(StepError, match=f"{words}.*delayed_update"):
        run(zero(step, **DELAYED), (model, optimizer), [0])
    assert_same(model.state_dict(), before)


def zeroed_first(model, optimizer, x, y):
    optimizer.zero_grad(set_to_none=False)
    return gradients_stay(model, optimizer, x, y)


def zeroed_last(model, optimizer, x, y):
    loss = gradients_stay(model, optimizer, x, y)
    optimizer.zero_grad(set_to_none=False)
    return loss


@pytest.mark.nightly
def test_gradients_that_a_call_begins_by_zeroing_are_not_another_ones():
    reference, pair, compiled = Reference(), built(), zero(zeroed_first, **DELAYED)
    for number in range(3):
        assert run(compiled, pair, [number]) == reference.call(*features(number, 8))


@pytest.mark.nightly
@pytest.mark.parametrize("step", (gradients_stay, zeroed_last))
def test_accumulation_across_calls_is_refused(step):
    pair, compiled = built(), zero(step, **DELAYED)
    run(compiled, pair, [0])
    words = "another call has left.*zero_grad.*, with set_to_none=False before its backward"
    with pytest.raises(StepError, match=words):
        run(compiled, pair, [1])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"offload": None}, "add offload='optimizer'"),
        ({"offload": "activations"}, "add offload='optimizer'"),
        ({"stage": 2}, "needs stage 3: stage 2 keeps whole parameters"),
        ({"stage": 1}, "needs stage 3"),
        ({"offload": "optimizer,params"}, "parameters on the device"),
        ({"offload_tier": "nvme", "offload_dir": "x"}, "states in host memory"),
        ({"memory_budget": 9}, "Choose one"),
    ],
)
def test_options_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        choose({**DELAYED, **options}, {})
    twin = {"ZEROFX_DELAYED_UPDATE": "1"}
    assert choose({"offload": "optimizer"}, twin).delayed_update
    assert not choose({}, {}).delayed_update
