"""``options={"offload": "params"}``, alone and with ``optimizer``: shards live in host memory.

On a machine without a GPU what torch's CPU allocator gives stands for the device, and memory of the
system's own for the host: every byte that moves is copied.
"""

import copy
import gc
import re
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tests.conftest  # noqa: F401  # the ranks need the backend's name too
import zerofx
from tests.kit.covering import nightly, only
from tests.kit.device_memory import Deep, assert_falls_as_planned, measured, squares
from tests.kit.fake_cuda import Cuda
from tests.kit.ranks import ranks_fixture  # noqa: F401
from tests.kit.trainings import (
    FORMS,
    PRECISIONS,
    assert_same,
    built,
    clipped,
    plain,
    program_of,
    run,
    save_and_resume,
    tensors_of,
    train_with,
    trained,
    with_kernels,
    write_between,
    zero,
)
from zerofx.compiler.choices import choose
from zerofx.cost.program import live_bytes
from zerofx.cost.traffic import moved_bytes
from zerofx.errors import StepError
from zerofx.runtime.parameters.registry import REGISTRY
from zerofx.runtime.storage import copies as copying
from zerofx.runtime.storage.copies import Copies
from zerofx.runtime.storage.memory import HostMemory

PARAMS, ALL = {"offload": "params"}, {"offload": "optimizer,params"}
EITHER = pytest.mark.parametrize("offload", (PARAMS, ALL), ids=("params", "optimizer,params"))


@pytest.fixture(autouse=True)
def forget_compiled_code():
    torch._dynamo.reset()


def shards_of(model) -> list[torch.Tensor]:
    bounds = [REGISTRY.lookup(parameter) for parameter in model.parameters()]
    return [bound.shard for bound in bounds if bound is not None]


def on_host(model) -> set[bool]:
    """Whether the model's shards are in host memory: all, none, or some of each."""
    shards = [shard for shard in shards_of(model) if shard.numel()]
    assert shards
    return {REGISTRY.host.holds(shard) for shard in shards}


def autocast(model, optimizer, x, y):
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.mse_loss(model(x).float(), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def arithmetic(model, optimizer, x, y):
    """Parameters are read and written by themselves: a penalty, an average, a decay, a copy."""
    weight, average = model.twice.weight, model.frozen.weight
    penalty = sum(p.square().sum() for p in model.parameters() if p.requires_grad)
    loss = F.mse_loss(model(x), y) + 1e-3 * penalty
    loss.backward()
    before = model.head.weight.detach().clone()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        average.copy_(0.9 * average + 0.1 * weight)
        model.head.bias.mul_(0.5)
        model.frozen.bias.copy_(model.twice.bias)
    return loss + (before - model.head.weight.detach()).abs().sum()


def own_sgd(model, optimizer, x, y):
    """The step's own update, after an optimizer's: two updates of a parameter in one step."""
    for _ in range(2):
        loss = plain(model, optimizer, x, y)
    F.mse_loss(model(x), y).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.sub_(1e-2 * parameter.grad)
    optimizer.zero_grad()
    return loss


def without_and_with(cases, offloads):
    """Losses, parameters and states of trainings: without offload, and with each of these."""
    found = []
    for step, options, dtype in cases:
        one = trained(step, options, dtype, steps=3)[:3]
        found.append((one, [trained(step, {**options, **o}, dtype, steps=3)[:3] for o in offloads]))
    return found


def check(found_by_rank):
    for found in found_by_rank:
        for without, offloaded in found:
            assert without[0][0] != without[0][-1]
            for one in offloaded:
                assert_same(one, without)


F32 = torch.float32


def also_exhaustive(steps):
    """These, and every other form of a step in the exhaustive tier."""
    others = [s for s in (*FORMS, autocast, arithmetic, own_sgd) if s not in steps]
    return (*steps, *(pytest.param(step, marks=pytest.mark.exhaustive) for step in others))


@pytest.mark.slow(reason="steps are compiled and run")
@pytest.mark.parametrize("offloads", ((ALL,), nightly((PARAMS,))), ids=str)
@pytest.mark.parametrize("step", only((arithmetic,), also_exhaustive((arithmetic, own_sgd))))
def test_losses_parameters_and_states_are_bitwise_those_without_offload(step, offloads):
    check([without_and_with([(step, {}, F32)], offloads)])


@pytest.mark.nightly
@pytest.mark.parametrize("step", only((clipped,), also_exhaustive((clipped, autocast))))
def test_on_two_ranks_too(step, ranks):
    check(ranks(2).run(without_and_with, [(step, {}, F32)], [PARAMS, ALL]))


@pytest.mark.nightly
@pytest.mark.parametrize("step", also_exhaustive((clipped,)))
def test_on_three_ranks_too(step, ranks):
    check(ranks(3).run(without_and_with, [(step, {}, F32)], [PARAMS, ALL]))


EXHAUSTIVE = pytest.mark.exhaustive


@pytest.mark.nightly
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"bucket": False}, marks=EXHAUSTIVE),
        pytest.param({"update_in_backward": False, "prefetch": False}, marks=EXHAUSTIVE),
        {"memory_budget": 100_000},
        pytest.param({"bucket_bytes": 256, "reduce_dtype": "bfloat16"}, marks=EXHAUSTIVE),
        pytest.param({"accumulate": "sharded"}, marks=EXHAUSTIVE),
        pytest.param({"accumulate": "local"}, marks=EXHAUSTIVE),
    ],
    ids=str,
)
def test_with_other_options_it_is_bitwise_the_same(options, ranks):
    check(ranks(2).run(without_and_with, [(plain, options, F32)], [PARAMS, ALL]))


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name",
    [
        "masters, int8 moments",
        *(pytest.param(n, marks=EXHAUSTIVE) for n in PRECISIONS if "," not in n),
    ],
)
def test_precision_options_are_bitwise_the_same(name):
    with mock.patch("zerofx.codegen.rewrite.storage.FEWEST_CODED", 64):
        check([without_and_with([(plain, PRECISIONS[name], torch.bfloat16)], [PARAMS, ALL])])


@pytest.mark.nightly
@EITHER
def test_a_bucket_is_one_compiled_kernel_there_too(offload):
    without, offloaded = with_kernels(3), with_kernels(3, **offload)
    assert_same(offloaded[:3], without[:3])
    assert offloaded[3] == without[3] and all(found for _, found in offloaded[3])


# Where shards are


@EITHER
def test_what_is_in_host_memory_and_what_moves_is_what_is_said(offload):
    gc.collect()
    before = REGISTRY.host.nbytes
    pair, compiled = built(), zero(**offload)
    run(compiled, pair, range(2))
    program = program_of(compiled)
    assert on_host(pair[0]) == {True}
    expected = "optimizer" in offload["offload"]
    assert {REGISTRY.host.holds(tensor) for tensor in tensors_of(pair[1])} == {expected}
    needs = program.runtime.host_needs
    shards = sum(shard.nbytes for shard in shards_of(pair[0]))
    assert needs["parameter shards"] == shards
    empty = sum(not tensor.numel() for tensor in tensors_of(pair[1]))
    empty += sum(not shard.numel() for shard in shards_of(pair[0]))
    assert REGISTRY.host.nbytes - before == pytest.approx(sum(needs.values()), abs=empty)
    text = zerofx.explain(compiled)
    assert f"parameters in host memory                   {shards / 1024:.2f} KiB" in text
    assert "kept per rank between steps                 0 B" in text
    for line in ("moved per step: to the host", "moved per step: to the device", "place_offload"):
        assert line in text
    targets = ", ".join(offload["offload"].split(","))
    assert f"offload {targets}" in program.rewritten.schedule, "ranks agree"
    moved, copies = moved_bytes(program.gm), program.function.copies
    assert copies.to_host_bytes == 2 * moved.to_host > 0
    assert copies.to_device_bytes == 2 * moved.to_device > 0
    parameters = pair[0].parameters()
    sizes = {p: shard.nbytes for p, shard in zip(parameters, shards_of(pair[0]), strict=True)}
    trained_bytes = sum(nbytes for p, nbytes in sizes.items() if p.requires_grad)
    assert moved.to_host == trained_bytes  # gradients, or new values: one of the two
    gathered = sum(sizes.values())
    again = 0 if "optimizer" in offload["offload"] else trained_bytes
    assert gathered + again <= moved.to_device <= 2 * gathered + again
    once_trained = REGISTRY.host.num_allocations, REGISTRY.host.nbytes
    run(compiled, pair, range(2, 5))
    assert (REGISTRY.host.num_allocations, REGISTRY.host.nbytes) == once_trained
    assert on_host(pair[0]) == {True}
    del pair, compiled, program, parameters, sizes, copies
    torch._dynamo.reset()
    gc.collect()
    assert REGISTRY.host.nbytes == before


# Memory


@pytest.mark.nightly
@EITHER
def test_the_devices_peak_falls_by_what_the_plan_says(offload):
    assert_falls_as_planned(measured(12), measured(12, **offload))


def measured_there(options):
    return measured(layers=32, **options)


@pytest.mark.nightly
@EITHER
def test_it_falls_on_two_ranks_too(offload, ranks):
    there = ranks(2)
    for pair in zip(there.run(measured_there, {}), there.run(measured_there, offload), strict=True):
        assert_falls_as_planned(*pair)


@pytest.mark.nightly
@pytest.mark.parametrize("room", (0, pytest.param(20_000, marks=EXHAUSTIVE)))
@EITHER
def test_a_memory_budget_has_room_for_what_travels(offload, room):
    least = None
    for budget in (1, None):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Deep()
        optimizer = torch.optim.AdamW(model.parameters())
        options = {"lowering": "eager", "hardware": "latency_s=1e-4 bytes_per_s=1e9", **offload}
        options["memory_budget"] = budget = budget or least + room
        compiled = torch.compile(squares, backend="zero", options=options)
        try:
            compiled(model, optimizer, torch.ones(8, 96))
        except StepError as error:
            least = int(re.search(r"this step allocates (\d+)", str(error)).group(1))
    program = program_of(compiled)
    assert max(live_bytes(program.gm.graph, 1, table=program.table)) <= budget


def test_no_room_on_the_host_is_an_error_with_the_numbers_before_the_first_step(monkeypatch):
    monkeypatch.setattr(HostMemory, "available_bytes", lambda self: 1000)
    pair = built()
    before = copy.deepcopy(pair[0].state_dict())
    with pytest.raises(StepError, match=r"needs \d+ bytes .*\d+ of parameter shards.* 1000 are av"):
        run(zero(**PARAMS), pair, range(1))
    assert_same(dict(pair[0].state_dict()), dict(before))
    assert REGISTRY.lookup(pair[0].head.weight) is None


@pytest.mark.nightly
def test_what_is_there_already_needs_no_more_room(monkeypatch):
    pair = built()
    run(zero(**PARAMS), pair, range(1))
    torch._dynamo.reset()
    monkeypatch.setattr(HostMemory, "available_bytes", lambda self: 0)
    run(zero(clipped, **PARAMS), pair, range(1))


# Other functions


def evaluate(model, x):
    with torch.no_grad():
        return model(x).sum()


def one_step(model, optimizer, x):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def with_evaluations(order, offload):
    """Train and evaluate in this order, evaluations compiled without the option."""
    torch._dynamo.reset()
    pair, x = built(), torch.linspace(-1, 1, 24).reshape(4, 6)
    train = zero(one_step, **offload)
    judge = zero(evaluate)
    found, places = [], []
    for what in order:
        found.append(train(*pair, x).item() if what == "train" else judge(pair[0], x).item())
        places.append(on_host(pair[0]))
    return found, pair[0].state_dict(), pair[1].state_dict(), places


@pytest.mark.nightly
@pytest.mark.parametrize("offload", [ALL, pytest.param(PARAMS, marks=EXHAUSTIVE)], ids=str)
def test_an_evaluation_without_the_option_takes_shards_from_the_host(offload):
    order = ("train", "judge", "train", "judge")
    found = with_evaluations(order, offload)
    assert_same(found[:3], with_evaluations(order, {})[:3])
    assert found[3] == [{True}] * 4


@pytest.mark.nightly
def test_one_that_came_first_has_them_moved_back(ranks):
    order = ("judge", "train", "judge", "train")
    expected = ranks(2).run(with_evaluations, order, {})
    found = ranks(2).run(with_evaluations, order, PARAMS)
    assert_same([each[:3] for each in found], [each[:3] for each in expected])
    for each in found:
        assert each[3] == [{False}, {True}, {False}, {True}]


def switch_over(options_of_steps):
    """The same objects are trained with and without offload, in turn."""
    torch._dynamo.reset()
    pair = built()
    losses, places = [], []
    for number, options in enumerate(options_of_steps):
        torch._dynamo.reset()
        losses += run(zero(**options), pair, [number])
        places.append(on_host(pair[0]))
    zerofx.unshard(*pair)
    held = any(REGISTRY.host.holds(p) for p in (*pair[0].parameters(), *tensors_of(pair[1])))
    losses += run(plain, pair, [9])
    return losses, dict(pair[0].state_dict()), pair[1].state_dict(), places, held


@pytest.mark.nightly
def test_shards_move_there_and_back_with_the_options_and_unshard_gives_them_whole(ranks):
    expected = ranks(2).run(switch_over, [{}, {}, {}])
    found = ranks(2).run(switch_over, [{}, ALL, {}])
    assert_same([each[:3] for each in found], [each[:3] for each in expected])
    for each in found:
        assert each[3:] == ([{False}, {True}, {False}], False)


@pytest.mark.nightly
@pytest.mark.parametrize("offload", [PARAMS, pytest.param(ALL, marks=EXHAUSTIVE)], ids=str)
def test_what_the_user_writes_between_steps_is_trained_on(offload, ranks):
    expected = ranks(2).run(write_between, 3, {})
    assert_same(ranks(2).run(write_between, 3, offload), expected)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "first, then",
    [(ALL, PARAMS), *(pytest.param(*both, marks=EXHAUSTIVE) for both in ((PARAMS, {}), ({}, ALL)))],
    ids=str,
)
def test_checkpoints_interchange(first, then):
    assert_same(save_and_resume(3, first, then), save_and_resume(3, {}, {}))


def converted(**options):
    """The model is made bfloat16 between steps, inside ``full_params``."""
    torch._dynamo.reset()
    pair, compiled = built(make=torch.optim.SGD), zero(**options)
    losses = run(compiled, pair, range(1))
    with zerofx.full_params(pair[0]):
        pair[0].to(torch.bfloat16)
    losses += run(compiled, pair, range(1, 3))
    return losses, pair[0].state_dict()


@pytest.mark.nightly
def test_a_model_that_changes_its_dtype_stays_where_it_is():
    assert_same(converted(**PARAMS), converted())


def test_a_step_that_fails_leaves_the_next_one_alone():
    pair, compiled = built(), zero(**PARAMS)
    run(compiled, pair, range(1))
    with mock.patch(
        "zerofx.runtime.optimizer.update.OptimizerRunner.run", side_effect=RuntimeError("no")
    ):
        with pytest.raises(RuntimeError, match="no"):
            run(compiled, pair, range(1))
    assert run(compiled, pair, range(1, 3))


@pytest.mark.nightly
def test_ranks_that_disagree_hear_of_it(ranks):
    with pytest.raises(Exception, match="offload params"):
        ranks(2).run(train_with, [PARAMS, {}])


# Options


def test_the_options_are_read_from_the_code_and_the_environment():
    assert choose(PARAMS, {}).offload == ("params",)
    for given in ("optimizer,params", "params, optimizer", ["params", "optimizer"]):
        assert choose({"offload": given}, {}).offload == ("optimizer", "params")
    assert choose({}, {"ZEROFX_OFFLOAD": "params"}).offload == ("params",)


@pytest.mark.parametrize(
    "options, words",
    [
        *(({"stage": stage, **PARAMS}, f"stage {stage} keeps whole") for stage in (1, 2)),
        ({"stage": 0, **PARAMS}, "stage 0 keeps whole"),
    ],
)
def test_what_makes_no_sense_with_it_is_refused_with_words(options, words):
    with pytest.raises(ValueError, match=words):
        choose(options, {})


@pytest.mark.nightly
def test_muon_updates_parameters_that_are_on_the_host():
    def losses(**options):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Tanh(), nn.Linear(6, 3, bias=False))
        optimizer = torch.optim.Muon(model.parameters(), lr=1e-2)
        return run(zero(**options), (model, optimizer), range(3)), model.state_dict()

    assert_same(losses(**PARAMS), losses())


# Streams: what is asked of CUDA, in which order.  No GPU has run it.


def test_stores_follow_the_device_and_host_writes_wait_for_copies(monkeypatch):
    cuda = Cuda()
    monkeypatch.setattr(copying, "is_accelerator", lambda device: True)
    monkeypatch.setattr(copying, "module_of", lambda device: cuda)
    memory = HostMemory()
    copies = Copies(memory)
    shards = list(memory.empty(8, F32).split([3, 5]))
    stored = copies.store_start([torch.ones(3), torch.zeros(5)], shards)
    assert [shard is given for shard, given in zip(copies.wait(stored), shards, strict=True)]
    assert torch.equal(torch.cat(shards), torch.tensor([1.0] * 3 + [0.0] * 5))
    down = cuda.asked[0].split()[1]
    assert cuda.asked[1:] == [
        f"{down} behind current",
        f"record event of {down}",
        f"host after event of {down}",
    ]
    num_asked = len(cuda.asked)
    copies.wait(copies.to_device_start(shards, torch.device("cpu"), mock.MagicMock()))
    up = cuda.asked[num_asked].split()[1]
    assert up != down and cuda.asked[-1] == f"current after event of {up}"
    num_asked = len(cuda.asked)
    memory.settle(shards[1])
    memory.settle(shards[0])  # of the same memory: it has been waited for
    assert cuda.asked[num_asked:] == [f"host after event of {up}"]


def test_shards_that_are_no_neighbours_are_stored_one_by_one():
    memory = HostMemory()
    shards = [memory.empty(3, F32), memory.empty(2, torch.bfloat16), memory.empty(0, F32)]
    pieces = [torch.arange(3.0), torch.tensor(2.0), torch.empty(0)]
    copies = Copies(memory)
    copies.wait(copies.store_start(pieces, shards))
    assert_same(shards[0], pieces[0])
    assert_same(shards[1], torch.full((2,), 2.0, dtype=torch.bfloat16))
