"""``offload_tier="nvme"``: optimizer states are in files, and nothing else changes.

Caches are so small that every state is really read and written at every step, but where a test
says otherwise.
"""

import copy
import gc
import os
import pickle
import re
import warnings
from collections import Counter
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tests.conftest  # noqa: F401  # the ranks need the backend's name too
import zerofx
from tests.kit.covering import exhaustive, first, nightly, only
from tests.kit.device_memory import squares
from tests.kit.files import files_of, open_in
from tests.kit.models import features
from tests.kit.persistent import persistent_bytes
from tests.kit.ranks import ranks_fixture  # noqa: F401
from tests.kit.trainings import (
    FORMS,
    OFFLOAD,
    PRECISIONS,
    SCALERS,
    assert_same,
    built,
    clipped,
    plain,
    program_of,
    run,
    save_and_resume,
    scaled,
    tensors_of,
    train_with,
    with_kernels,
    write_between,
    zero,
)
from zerofx.errors import FileTierError, StepError
from zerofx.runtime.optimizer.states import per_element
from zerofx.runtime.parameters.guarded import GuardedState
from zerofx.runtime.parameters.registry import REGISTRY
from zerofx.runtime.storage.disk.system import SystemCalls
from zerofx.runtime.storage.memory import HostMemory

SMALL_BUCKETS = {"bucket_bytes": 256}
PAGE = 4096
LARGE = 2**26


@pytest.fixture(autouse=True)
def forget_compiled_code():
    torch._dynamo.reset()
    gc.collect()


def files(directory, cache_bytes=LARGE, **options):
    return {
        **OFFLOAD,
        "offload_tier": "nvme",
        "offload_dir": directory,
        "offload_cache_bytes": cache_bytes,
        **options,
    }


def store_of(compiled):
    return program_of(compiled).runtime.files.tier.store


def trained(step, options, dtype=torch.float32, make=torch.optim.AdamW, steps=4):
    """Losses, parameters, states; and for each step what it has read from files and written."""
    torch._dynamo.reset()
    gc.collect()
    # Its scale overflows once: the third step is skipped.
    SCALERS[:] = [torch.amp.GradScaler("cpu", init_scale=2.0**126, growth_interval=2)]
    pair, compiled = built(dtype, make), zero(step, **options)
    losses, moved = [], []
    for number in range(steps):
        losses += run(compiled, pair, [number])
        if "offload_dir" in options:
            tier = program_of(compiled).runtime.files.tier
            flush(tier)
            moved.append((tier.store.transfers.bytes_read, tier.store.transfers.bytes_written))
            assert tier.cache.held_bytes <= options["offload_cache_bytes"]
            live = [p for p in pair[0].parameters() if p.requires_grad]
            values = [v for p in live for _, v in per_element(pair[1].state[p])]
            assert values and all(isinstance(value, GuardedState) for value in values)
    buckets = program_of(compiled).runtime.files.buckets if "offload_dir" in options else []
    sizes = [bucket.nbytes for bucket in buckets]
    return losses, pair[0].state_dict(), pair[1].state_dict(), moved, sizes


def flush(tier):
    """Wait until nothing moves, without changing what is where."""
    for operation in list(tier.store.transfers._open):
        operation.wait_for_its_end()


def both(step, options, directory, cache_bytes, dtype=torch.float32, make=torch.optim.AdamW):
    options = {**SMALL_BUCKETS, **options}
    without = trained(step, options, dtype, make)
    return without, trained(step, {**options, **files(directory, cache_bytes)}, dtype, make)


def check_every_byte_moves(found):
    for without, filed in found:
        assert_same(filed[:3], without[:3])
        assert without[0][0] != without[0][-1]
        *_, moved, sizes = filed
        assert len(sizes) > 2 and sum(sizes) > 0
        for (read, written), (more_read, more_written) in zip(moved[1:], moved[2:], strict=False):
            assert more_read - read == more_written - written == sum(sizes)


TWO_BUCKETS = 4 * PAGE  # of AdamW's two moments, each of which begins at a page


@pytest.mark.slow(reason="a step with files and one without, on two ranks")
@pytest.mark.parametrize("world_size", (nightly(1), 2))
@pytest.mark.parametrize("stage", only((3,), (1, 2, 3)))
@pytest.mark.parametrize("step", (exhaustive(plain), clipped))
def test_losses_parameters_and_states_are_bitwise_those_without_offload(
    step, stage, world_size, ranks, tmp_path
):
    arguments = (step, {"stage": stage}, tmp_path, TWO_BUCKETS)
    check_every_byte_moves(
        [both(*arguments)] if world_size == 1 else ranks(2).run(both, *arguments)
    )


@pytest.mark.nightly
@pytest.mark.parametrize("step", [one if one is scaled else exhaustive(one) for one in FORMS[2:]])
def test_every_form_of_a_step_is_bitwise_the_same(step, ranks, tmp_path):
    for without, filed in ranks(2).run(both, step, {}, tmp_path, TWO_BUCKETS):
        assert_same(filed[:3], without[:3])
        assert filed[3][-1][0] > filed[3][0][0]


def test_a_step_that_is_skipped_writes_nothing(tmp_path):
    pair, compiled = built(), zero(FORMS[-1], **SMALL_BUCKETS, **files(tmp_path, TWO_BUCKETS))
    SCALERS[:] = [torch.amp.GradScaler("cpu")]
    moved = []
    for number in range(5):
        x, y = features(number, 8)
        compiled(*pair, x if number < 2 else x * torch.inf, y)
        flush(program_of(compiled).runtime.files.tier)
        store = store_of(compiled)
        moved.append((store.transfers.bytes_read, store.transfers.bytes_written))
    nbytes = sum(bucket.nbytes for bucket in program_of(compiled).runtime.files.buckets)
    (read, written), (more_read, more_written) = moved[-2:]
    assert more_read - read == nbytes and more_written == written == 2 * nbytes
    assert pair[1].state_dict()["state"][0]["step"] == 2


@pytest.mark.nightly
@pytest.mark.parametrize("options", [{"bucket": False}, {"update_in_backward": False}], ids=str)
def test_with_other_options_it_is_bitwise_the_same(options, ranks, tmp_path):
    for without, filed in ranks(2).run(both, clipped, options, tmp_path, TWO_BUCKETS):
        assert_same(filed[:3], without[:3])


def momentum(parameters, lr):
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


def maxima(parameters, lr):
    return torch.optim.AdamW(parameters, lr=lr, amsgrad=True)


@pytest.mark.nightly
@pytest.mark.parametrize("stage", (exhaustive(1), 3))
def test_sgd_with_momentum_is_bitwise_the_same(stage, ranks, tmp_path):
    arguments = (clipped, {"stage": stage}, tmp_path, 2 * PAGE, torch.float32, momentum)
    check_every_byte_moves(ranks(2).run(both, *arguments))


@pytest.mark.nightly
@pytest.mark.parametrize(
    "make", [maxima, exhaustive(torch.optim.Adagrad), exhaustive(torch.optim.RMSprop)]
)
def test_other_optimizers_are_bitwise_the_same(make, tmp_path):
    without, filed = both(plain, {}, tmp_path, 6 * PAGE, make=make)
    assert_same(filed[:3], without[:3])


@pytest.mark.nightly
def test_an_optimizer_without_states_needs_no_files_room(tmp_path):
    pair, compiled = built(make=torch.optim.SGD), zero(**files(tmp_path))
    other = built(make=torch.optim.SGD)
    losses = run(compiled, pair, range(3))
    assert losses == run(plain, other, range(3))
    assert sum(bucket.nbytes for bucket in program_of(compiled).runtime.files.buckets) == 0
    assert sum(os.path.getsize(path) for path in open_in(tmp_path)) == 0


@pytest.mark.nightly
@pytest.mark.parametrize("name", only(("masters, int8 moments",), PRECISIONS))
def test_precision_options_are_bitwise_the_same(name, tmp_path):
    with mock.patch("zerofx.codegen.rewrite.storage.FEWEST_CODED", 64):
        without, filed = both(plain, PRECISIONS[name], tmp_path, 14 * PAGE, torch.bfloat16)
    assert_same(filed[:3], without[:3])
    *_, moved, sizes = filed
    assert sum(sizes) > 0


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["masters, int8 moments", exhaustive("rounded")])
def test_precision_options_are_bitwise_the_same_on_two_ranks(name, ranks, tmp_path):
    arguments = (clipped, PRECISIONS[name], tmp_path, 6 * PAGE, torch.bfloat16)
    for without, filed in ranks(2).run(both, *arguments):
        assert_same(filed[:3], without[:3])
        assert filed[3][-1][1] > 0


def relaid(name):
    """How often states turned out to be of another layout than what was reserved for them."""
    return mock.patch(
        "zerofx.runtime.storage.tier.FileTier._lay_out_anew",
        side_effect=AssertionError(f"{name}: the layout that was reserved is not the one kept"),
    )


@pytest.mark.parametrize("name", only(("plain",), ["plain", *PRECISIONS]))
def test_room_is_reserved_for_just_what_will_be_kept(name, tmp_path):
    options = {**SMALL_BUCKETS, **PRECISIONS.get(name, {}), **files(tmp_path)}
    dtype = torch.bfloat16 if name in PRECISIONS else torch.float32
    with mock.patch("zerofx.codegen.rewrite.storage.FEWEST_CODED", 64), relaid(name):
        pair, compiled = built(dtype), zero(**options)
        run(compiled, pair, range(3))
    states = sum(value.numel() * value.itemsize for value in tensors_of(pair[1]))
    assert sum(bucket.nbytes for bucket in program_of(compiled).runtime.files.buckets) == states > 0


@pytest.mark.nightly
def test_where_there_is_room_in_host_memory_nothing_is_read_or_written(ranks, tmp_path):
    for without, filed in ranks(2).run(both, clipped, {}, tmp_path, LARGE):
        assert_same(filed[:3], without[:3])
        assert filed[3] == [(0, 0)] * 4 and sum(filed[4]) > 0


@pytest.mark.nightly
def test_several_directories_each_get_their_part(tmp_path):
    directories = [tmp_path / "one", tmp_path / "two"]
    for directory in directories:
        directory.mkdir()
    pair = built()
    compiled = zero(clipped, **SMALL_BUCKETS, **files(directories, TWO_BUCKETS))
    losses = run(compiled, pair, range(3))
    used = Counter()
    for path in files_of(store_of(compiled)):
        used[os.path.dirname(os.readlink(path))] += os.path.getsize(path)
    assert len(used) == 2 and all(used.values())
    assert losses == run(zero(clipped, **SMALL_BUCKETS), built(), range(3))


class Lazy(torch.optim.Optimizer):
    """Has another state from its third step on."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr, "count": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "mean" not in state:
                    state["mean"] = torch.zeros_like(p)
                state["mean"].mul_(0.9).add_(p.grad)
                if group["count"] > 2:
                    if "square" not in state:
                        state["square"] = torch.zeros_like(p)
                    state["square"].mul_(0.9).addcmul_(p.grad, p.grad)
                p.sub_(group["lr"] * state["mean"])


@pytest.mark.nightly
def test_a_state_that_an_optimizer_makes_later_is_laid_out_anew(tmp_path):
    without = trained(plain, SMALL_BUCKETS, make=Lazy)
    filed = trained(plain, {**SMALL_BUCKETS, **files(tmp_path, 4 * PAGE)}, make=Lazy)
    assert_same(filed[:3], without[:3])
    assert "square" in filed[2]["state"][0]
    assert filed[3][-1][0] > filed[3][1][0]


@pytest.mark.nightly
def test_states_that_have_outgrown_the_cache_are_refused_with_what_they_take(tmp_path):
    pair = built(make=Lazy)
    compiled = zero(plain, **SMALL_BUCKETS, **files(tmp_path, 2 * PAGE))
    with pytest.raises(StepError, match=f"Give at least {4 * PAGE}"):
        run(compiled, pair, range(6))
    values = [v for p in pair[0].parameters() for _, v in per_element(pair[1].state[p])]
    assert len(values) > len(list(pair[0].parameters()))
    before = copy.deepcopy((pair[0].state_dict(), pair[1].state_dict()))
    with pytest.raises(StepError, match=f"Give at least {4 * PAGE}"):
        run(compiled, pair, range(6))
    assert_same((pair[0].state_dict(), pair[1].state_dict()), before)


# Kernels


@pytest.mark.nightly
def test_a_bucket_is_one_kernel_there_too_which_takes_states_where_they_lie(tmp_path):
    # Where states that are no neighbours would be copied to.
    with mock.patch("zerofx.runtime.optimizer.piece.prefer_huge_pages", side_effect=AssertionError):
        without, filed = with_kernels(3), with_kernels(3, **files(tmp_path))
    assert_same(filed[:3], without[:3])
    assert filed[3] == without[3] and all(found for _, found in filed[3])


# Several functions, programs and optimizers


def only_body(model, optimizer, x, y):
    """Updates a part of the parameters: groups are others than a whole step's."""
    loss = model.body(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def turns(options, steps_of):
    torch._dynamo.reset()
    gc.collect()
    pair = built()
    compiled = {step: zero(step, **options) for step in dict.fromkeys(steps_of)}
    losses = []
    for number, step in enumerate(steps_of):
        losses += run(compiled[step], pair, [number])
    return losses, pair[0].state_dict(), pair[1].state_dict()


@pytest.mark.nightly
@pytest.mark.parametrize("cache_bytes", (TWO_BUCKETS, exhaustive(LARGE)))
def test_functions_over_one_model_use_the_same_states(cache_bytes, ranks, tmp_path):
    steps = [plain, only_body, clipped, only_body, plain, plain, clipped]
    expected = ranks(2).run(turns, SMALL_BUCKETS, steps)
    options = {**SMALL_BUCKETS, **files(tmp_path, cache_bytes)}
    assert_same(ranks(2).run(turns, options, steps), expected)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "order", first(1, [pytest.param((only_body, plain)), pytest.param((plain, only_body))])
)
def test_groups_that_overlap_take_states_from_each_other(order, tmp_path):
    """All in one bucket, of which one function updates only a part."""
    steps = [order[0], order[1], order[0], order[0], order[1]]
    assert_same(turns(files(tmp_path), steps), turns({}, steps))


def two_optimizers(options):
    torch._dynamo.reset()
    gc.collect()
    torch.manual_seed(0)
    model = built()[0]
    body = torch.optim.AdamW(model.body.parameters(), lr=1e-2)
    rest = torch.optim.SGD(
        [*model.twice.parameters(), *model.head.parameters()], lr=1e-2, momentum=0.9
    )

    def step(model, optimizers, x, y):
        loss = F.mse_loss(model(x), y)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    losses = run(zero(step, **options), (model, (body, rest)), range(4))
    return losses, model.state_dict(), body.state_dict(), rest.state_dict()


@pytest.mark.nightly
def test_several_optimizers_each_have_their_states(ranks, tmp_path):
    expected = ranks(2).run(two_optimizers, SMALL_BUCKETS)
    options = {**SMALL_BUCKETS, **files(tmp_path, TWO_BUCKETS)}
    assert_same(ranks(2).run(two_optimizers, options), expected)


def update_twice(model, optimizer, x, y):
    for _ in range(2):
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss


@pytest.mark.nightly
def test_a_bucket_may_be_used_twice_in_a_step(tmp_path):
    without, filed = both(update_twice, {}, tmp_path, TWO_BUCKETS)
    assert_same(filed[:3], without[:3])
    compiled_twice = Counter(filed[4])
    assert len(filed[4]) % 2 == 0 and compiled_twice


# State dicts, and functions without files


@pytest.mark.nightly
@pytest.mark.parametrize("is_first", (True, exhaustive(False)))
def test_checkpoints_interchange_with_runs_without_offload(is_first, ranks, tmp_path):
    expected = ranks(2).run(save_and_resume, 3, SMALL_BUCKETS, SMALL_BUCKETS)
    filed = {**SMALL_BUCKETS, **files(tmp_path, TWO_BUCKETS)}
    first, then = (filed, SMALL_BUCKETS) if is_first else (SMALL_BUCKETS, filed)
    assert_same(ranks(2).run(save_and_resume, 3, first, then), expected)


def switch_over(stage, options_of_steps):
    """The same objects are trained in every way, in turn."""
    torch._dynamo.reset()
    gc.collect()
    pair = built()
    losses, kinds = [], []
    for number, options in enumerate(options_of_steps):
        torch._dynamo.reset()
        losses += run(zero(stage=stage, **SMALL_BUCKETS, **options), pair, [number])
        kinds.append({where(value) for value in tensors_of(pair[1])})
    zerofx.unshard(*pair)
    losses += run(plain, pair, [9])
    return losses, dict(pair[0].state_dict()), pair[1].state_dict(), kinds


def where(value):
    if isinstance(value, GuardedState):
        return "file"
    return "host" if REGISTRY.host.holds(value) else "device"


@pytest.mark.nightly
@pytest.mark.parametrize("stage", (exhaustive(1), 3))
def test_states_move_with_the_options_and_unshard_gives_them_whole(stage, ranks, tmp_path):
    filed = files(tmp_path, TWO_BUCKETS)
    expected = ranks(2).run(switch_over, stage, [{}] * 6)
    found = ranks(2).run(switch_over, stage, [{}, filed, OFFLOAD, filed, {}, filed])
    assert_same([each[:3] for each in found], [each[:3] for each in expected])
    kinds = [{"device"}, {"file"}, {"host"}, {"file"}, {"device"}, {"file"}]
    assert [each[3] for each in found] == [kinds] * 2


@pytest.mark.nightly
def test_what_the_user_writes_between_steps_is_trained_on(ranks, tmp_path):
    expected = ranks(2).run(write_between, 3, SMALL_BUCKETS)
    options = {**SMALL_BUCKETS, **files(tmp_path, TWO_BUCKETS)}
    assert_same(ranks(2).run(write_between, 3, options), expected)


def test_a_state_that_the_user_replaces_is_the_one_that_is_used(tmp_path):
    def replaced(step):
        pair = built()
        run(step, pair, range(2))
        state = pair[1].state[pair[0].head.weight]
        state["exp_avg"] = torch.full(state["exp_avg"].shape, 0.5)
        state["step"] += 3
        return run(step, pair, range(2, 5)), pair[1].state_dict()

    assert_same(replaced(zero(**SMALL_BUCKETS, **files(tmp_path, TWO_BUCKETS))), replaced(plain))


# What a user reads between steps


READS = {
    "add": lambda value: value + 1,
    "sum": lambda value: value.sum(),
    "item": lambda value: value[0],
    "clone": lambda value: value.clone(),
    "detach": lambda value: value.detach(),
    "tolist": lambda value: value.tolist(),
    "numpy": lambda value: value.numpy(),
    "to": lambda value: value.to(torch.float64),
    "mul_": lambda value: value.mul_(0.5),
    "zero_": lambda value: value.zero_(),
    "copy_": lambda value: value.copy_(torch.zeros(value.shape)),
    "is source": lambda value: torch.zeros(value.shape).copy_(value),
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "view": lambda value: value.view(-1),
    "equal": lambda value: torch.equal(value, value),
    "foreach": lambda value: torch._foreach_mul([value], 2.0),
    "foreach zero": lambda value: torch._foreach_zero_([value]),
}


@pytest.fixture(scope="module", name="between")
def trained_pair(tmp_path_factory):
    torch._dynamo.reset()
    pair, compiled = built(), zero(**SMALL_BUCKETS, **files(tmp_path_factory.mktemp("files")))
    run(compiled, pair, range(2))
    return pair, compiled


@pytest.mark.parametrize("name", READS)
def test_a_state_is_refused_with_words_between_steps(name, between):
    (model, optimizer), _ = between
    state = optimizer.state[model.head.weight]
    assert (state["exp_avg"].shape, state["exp_avg"].dtype) == (
        (36,),
        torch.float32,
    )  # with padding
    assert "GuardedState" in repr(state["exp_avg"])
    with pytest.raises(RuntimeError, match=r"'exp_avg' of 'AdamW of .*optimizer\.state_dict\(\)"):
        READS[name](state["exp_avg"])
    assert state["step"].item() >= 2, "what is one number is there"


def test_what_is_in_files_does_not_count_as_kept(between):
    (_, optimizer), _ = between
    steps = sum(
        value.nbytes for s in optimizer.state.values() for value in s.values() if not value.dim()
    )
    assert persistent_bytes([optimizer])["optimizer_states"] == steps > 0


def adds_a_state(model, optimizer, x, y):
    loss = plain(model, optimizer, x, y)
    return loss + optimizer.state[model.head.weight]["exp_avg"].sum()


@pytest.mark.slow(reason="steps are compiled and run")
def test_a_step_that_reads_a_state_itself_is_refused_and_nothing_has_changed(tmp_path):
    pair, compiled = built(), zero(**files(tmp_path))
    losses = run(compiled, pair, range(2))
    words = r"'sum' needs the values of state 'exp_avg' of 'AdamW of .*zerofx\.unshard\(model"
    with pytest.raises(torch._dynamo.exc.Unsupported, match=words):
        run(zero(adds_a_state, **files(tmp_path)), pair, range(2))
    losses += run(compiled, pair, range(2, 4))
    expected = built()
    assert losses == run(plain, expected, range(4))
    assert_same(*([part.state_dict() for part in parts] for parts in (pair, expected)))


def test_a_stub_that_has_been_replaced_is_refused(tmp_path):
    pair, compiled = built(), zero(**SMALL_BUCKETS, **files(tmp_path))
    run(compiled, pair, range(2))
    state = pair[1].state[pair[0].head.weight]
    old = dict(state)
    pair[1].load_state_dict(pair[1].state_dict())
    run(compiled, pair, range(2, 3))
    pair[1].state[pair[0].head.weight].update(old)
    with pytest.raises(FileTierError, match="has been replaced since this tensor stood for it"):
        pair[1].state_dict()
    with pytest.raises(FileTierError, match="has been replaced since"):
        run(compiled, pair, range(3, 4))


# Memory


class Deep(nn.Module):
    def __init__(self, width=64, layers=12):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))

    def forward(self, x):
        return self.layers(x)


@pytest.mark.nightly
def test_host_memory_never_holds_all_states(tmp_path):
    torch.manual_seed(0)
    model = Deep()
    optimizer = torch.optim.AdamW(model.parameters())
    gc.collect()
    before = REGISTRY.host.nbytes
    REGISTRY.host.peak_nbytes = before
    bound = 4 * 10 * PAGE
    compiled = zero(squares, bucket_bytes=20_000, **files(tmp_path, bound))
    x = torch.ones(4, 64)
    for _ in range(2):
        compiled(model, optimizer, x)
    runtime = program_of(compiled).runtime
    states = sum(bucket.nbytes for bucket in runtime.files.buckets)
    staging = runtime.host_needs["staging buffers"]
    assert states > 2 * bound
    assert runtime.files.tier.cache.held_bytes <= bound
    assert 0 < REGISTRY.host.peak_nbytes - before <= bound + staging
    count = REGISTRY.host.num_allocations
    for _ in range(3):
        compiled(model, optimizer, x)
    assert REGISTRY.host.num_allocations == count, "nothing is allocated once it has trained"


@pytest.mark.nightly
def test_the_cache_has_a_bound_of_its_own_if_none_is_given(tmp_path, monkeypatch):
    monkeypatch.setattr(HostMemory, "available_bytes", lambda self: 10**9)
    compiled = zero(**files(tmp_path, None))
    run(compiled, built(), range(1))
    assert program_of(compiled).runtime.files.tier.cache.memory_bytes == 5 * 10**8
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    torch._dynamo.reset()
    (tmp_path / "other").mkdir()
    run(compiled := zero(clipped, **files(tmp_path / "other", None)), built(), range(1))
    assert program_of(compiled).runtime.files.tier.cache.memory_bytes == 5 * 10**8 // 4


@pytest.mark.nightly
def test_two_of_the_largest_buckets_fit_if_none_is_given(tmp_path, monkeypatch):
    monkeypatch.setattr(HostMemory, "available_bytes", lambda self: 50_000)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    compiled = zero(**SMALL_BUCKETS, **files(tmp_path, None))
    run(compiled, built(), range(1))
    assert program_of(compiled).runtime.files.tier.cache.memory_bytes == TWO_BUCKETS


def test_files_go_with_the_last_that_uses_them(tmp_path):
    pair, compiled = built(), zero(**files(tmp_path))
    run(compiled, pair, range(2))
    assert open_in(tmp_path)
    del compiled
    torch._dynamo.reset()
    gc.collect()
    assert open_in(tmp_path), "the optimizer still counts on its states"
    saved = pair[1].state_dict()
    del pair
    gc.collect()
    assert open_in(tmp_path) == os.listdir(tmp_path) == []
    assert saved["state"][0]["exp_avg"].shape == (11, 6)


@pytest.mark.nightly
def test_a_function_outlives_models_and_their_room_is_used_again(tmp_path):
    compiled, found = zero(**SMALL_BUCKETS, **files(tmp_path, TWO_BUCKETS)), []
    for _ in range(3):
        pair = built()
        run(compiled, pair, range(2))
        found.append(len(open_in(tmp_path)))
        del pair
        gc.collect()
    assert found[0] == found[1] == found[2] > 0, "files of the one before are gone"


def test_explain_says_what_is_in_files(tmp_path):
    pair, compiled = built(), zero(**SMALL_BUCKETS, **files(tmp_path, TWO_BUCKETS))
    run(compiled, pair, range(2))
    text = zerofx.explain(compiled)
    assert "offload_tier nvme" in program_of(compiled).rewritten.schedule, "ranks agree"
    runtime = program_of(compiled).runtime
    nbytes = sum(bucket.nbytes for bucket in runtime.files.buckets)
    for line in (
        rf"optimizer states in files +{nbytes / 1024:.2f} KiB in {re.escape(str(tmp_path))}",
        rf"their largest bucket +{max(b.nbytes for b in runtime.files.buckets)} B",
        rf"read per step, at most +{nbytes / 1024:.2f} KiB",
        rf"written per step, at most +{nbytes / 1024:.2f} KiB",
        r"of that in host memory +16.00 KiB of at most 16.00 KiB",
        r"optimizer states in host memory +0 B",
        r"place_files +on",
    ):
        assert re.search(line, text), (line, text)


# Bad input: before the first step, with nothing changed


class NoRoom(SystemCalls):
    def free_bytes(self, directory):
        return 5000


@pytest.fixture
def on_system(monkeypatch):
    def use(system):
        monkeypatch.setattr(REGISTRY.files, "system", system)
        return system

    return use


def refused(error, words, options, pair=None):
    pair = pair or built()
    before = copy.deepcopy(dict(pair[0].state_dict()))
    with pytest.raises(error, match=words):
        run(zero(**options), pair, range(1))
    assert_same(dict(pair[0].state_dict()), before)
    assert not pair[1].state and REGISTRY.lookup(pair[0].head.weight) is None


@pytest.mark.nightly
def test_a_number_of_ranks_here_that_is_none_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "two")
    refused(StepError, r"LOCAL_WORLD_SIZE is 'two', .* a number from 1 on", files(tmp_path))


def test_no_room_on_the_disk_is_refused_with_the_numbers(tmp_path, on_system):
    on_system(NoRoom())
    refused(
        FileTierError,
        r"this rank's optimizer states need 24576 bytes in files: no room .* need 24576 bytes"
        r" there, 5000 are free",
        files(tmp_path),
    )
    gc.collect()
    torch._dynamo.reset()
    gc.collect()
    assert open_in(tmp_path) == os.listdir(tmp_path) == []


@pytest.mark.nightly
def test_a_directory_that_does_not_exist_is_refused(tmp_path):
    refused(FileTierError, "does not exist", files(tmp_path / "missing"))


@pytest.mark.nightly
def test_what_is_no_directory_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    refused(FileTierError, "is not a directory", files(tmp_path / "file"))


class ReadOnly(SystemCalls):
    def make_file(self, directory):
        raise OSError(30, "Read-only file system")


@pytest.mark.nightly
def test_a_directory_that_cannot_be_written_is_refused(tmp_path, on_system):
    on_system(ReadOnly())
    refused(FileTierError, "mounted read-only: remount it for writing", files(tmp_path))


class InMemory(SystemCalls):
    def file_system(self, directory):
        return "tmpfs"


@pytest.mark.nightly
def test_files_in_memory_are_warned_of(tmp_path, on_system):
    on_system(InMemory())
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        run(zero(**files(tmp_path)), built(), range(1))
    assert any("is in memory (tmpfs)" in str(warning.message) for warning in seen)


def test_a_cache_for_less_than_two_of_the_largest_buckets_is_refused(tmp_path):
    refused(
        StepError,
        r"offload_cache_bytes=16383 is less than two .* takes 8192 bytes .* Give at least 16384",
        files(tmp_path, TWO_BUCKETS - 1),
    )


def test_no_room_for_the_cache_is_refused_with_the_numbers(tmp_path, monkeypatch):
    monkeypatch.setattr(HostMemory, "available_bytes", lambda self: 1000)
    refused(
        StepError, r"24576 of a cache of optimizer states.* 1000 are available", files(tmp_path)
    )


@pytest.mark.slow(reason="two functions train over one model")
@pytest.mark.parametrize(
    "options", ({"cache_bytes": 2 * LARGE}, nightly({"offload_checksums": True})), ids=str
)
def test_functions_that_disagree_about_the_cache_are_refused(options, tmp_path):
    pair = built()
    compiled = zero(**files(tmp_path, LARGE))
    run(compiled, pair, range(1))
    with pytest.raises(StepError, match="Give all of them the same"):
        run(zero(clipped, **files(tmp_path, **options)), pair, range(1))


@pytest.mark.nightly
def test_ranks_that_disagree_about_the_tier_hear_of_it(ranks, tmp_path):
    with pytest.raises(Exception, match="offload_tier (nvme|cpu)"):
        ranks(2).run(train_with, [OFFLOAD, files(tmp_path)])


def train_in(directories):
    torch._dynamo.reset()
    return run(zero(**files(directories[torch.distributed.get_rank()])), built(), range(1))


@pytest.mark.nightly
def test_a_rank_whose_directory_is_missing_is_named_to_the_others(ranks, tmp_path):
    with pytest.raises(Exception, match="does not exist"):
        ranks(2).run(train_in, [tmp_path, tmp_path / "missing"])


@pytest.mark.nightly
def test_states_that_are_there_already_are_not_lost_where_there_is_no_room(tmp_path, on_system):
    pair = built()
    run(zero(), pair, range(2))
    before = copy.deepcopy(pair[1].state_dict())
    on_system(NoRoom())
    with pytest.raises(FileTierError, match="this rank's optimizer states need 24576 bytes"):
        run(zero(clipped, **files(tmp_path)), pair, range(1))
    assert_same(pair[1].state_dict(), before)


def test_only_what_is_per_element_is_in_files():
    state = {"step": torch.tensor(1.0), "exp_avg": torch.ones(3), "name": "x"}
    assert [name for name, _ in per_element(state)] == ["exp_avg"]


@pytest.mark.nightly
def test_batches_of_other_shapes_use_the_same_buckets(tmp_path):
    other, without = built(), zero(**SMALL_BUCKETS)
    pair, compiled = built(), zero(**SMALL_BUCKETS, **files(tmp_path, TWO_BUCKETS))
    losses = []
    for function, objects in ((without, other), (compiled, pair)):
        losses.append([])
        for number, rows in enumerate((8, 4, 6, 8, 4)):
            losses[-1].append(function(*objects, *features(number, rows)).item())
    assert losses[0] == losses[1]
    names = {
        bucket.name
        for p in program_of(compiled).function.programs
        for bucket in p.runtime.files.buckets
    }
    assert len(names) == len(program_of(compiled).runtime.files.buckets)
