"""``offload_tier="nvme"`` for parameters' shards and activations: nothing else changes.

Caches are the smallest that are allowed, so that everything is really read and written, but where
a test says otherwise.
"""

import copy
import gc
import itertools
import os
import re
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tests.conftest  # noqa: F401  # the ranks need the backend's name too
import zerofx
from tests.kit.covering import exhaustive, only
from tests.kit.files import open_in
from tests.kit.models import features
from tests.kit.persistent import persistent_bytes
from tests.kit.ranks import ranks_fixture  # noqa: F401
from tests.kit.trainings import (
    FORMS,
    SCALERS,
    assert_same,
    built,
    clipped,
    moving_small_values,
    plain,
    program_of,
    run,
    save_and_resume,
    scaled,
    write_between,
    zero,
)
from tests.training.test_offload_params import arithmetic, autocast, own_sgd
from zerofx.errors import FileTierError, StepError
from zerofx.runtime.parameters.registry import REGISTRY
from zerofx.runtime.storage.bucket import Location
from zerofx.runtime.storage.disk.system import SystemCalls
from zerofx.runtime.storage.tier import FileTier

SMALL_BUCKETS = {"bucket_bytes": 256}
PARAMS, WITH_STATES, ALL = "params", "optimizer,params", "optimizer,params,activations"
LARGE = 2**26
EXHAUSTIVE = pytest.mark.exhaustive


@pytest.fixture(autouse=True)
def forget_compiled_code():
    torch._dynamo.reset()
    gc.collect()


@pytest.fixture(scope="module", autouse=True)
def small_values():
    with moving_small_values():
        yield


def files(directory, offload=WITH_STATES, cache_bytes=LARGE, **options):
    return {
        "offload": offload,
        "offload_tier": "nvme",
        "offload_dir": directory,
        "offload_cache_bytes": cache_bytes,
        **options,
    }


def with_least_cache(train, directory, offload, **options):
    """What ``train`` returns with the smallest cache that is not refused."""
    cache_bytes = 1
    while True:
        torch._dynamo.reset()
        gc.collect()
        try:
            return train(files(folder_in(directory), offload, cache_bytes, **options))
        except StepError as error:
            least = re.search(r"[Gg]ive at least (\d+)|in files: (\d+) bytes on", str(error))
            assert least and int(least[1] or least[2]) > cache_bytes, error
            cache_bytes = int(least[1] or least[2])


def folder_in(directory):
    """Another one each time, where the one before may still be open with other options."""
    folder = os.path.join(directory, str(next(NUMBERS)))
    os.makedirs(folder, exist_ok=True)  # by one of the ranks
    return folder


NUMBERS = itertools.count()


def kinds_of(compiled):
    return {bucket.what for bucket in program_of(compiled).runtime.files.buckets}


KINDS = {
    "params": "parameter shards",
    "optimizer": "optimizer states",
    "activations": "activations",
}


def trained(step, options, dtype=torch.float32, make=torch.optim.AdamW, steps=4):
    """Losses, parameters, states; and what has been read from files and written."""
    torch._dynamo.reset()
    gc.collect()
    SCALERS[:] = [torch.amp.GradScaler("cpu", init_scale=2.0**126, growth_interval=2)]
    with moving_small_values():
        pair, compiled = built(dtype, make), zero(step, **options)
        losses = run(compiled, pair, range(steps))
    moved = ()
    if "offload_dir" in options:
        tier = program_of(compiled).runtime.files.tier
        assert kinds_of(compiled) == {KINDS[target] for target in options["offload"].split(",")}
        assert tier.cache.held_bytes <= options["offload_cache_bytes"]
        moved = tier.store.transfers.bytes_read, tier.store.transfers.bytes_written
    return losses, pair[0].state_dict(), pair[1].state_dict(), moved


def compared(step, stage, offloads, directory, dtype=torch.float32, make=torch.optim.AdamW, **more):
    """Without offload, and with each of these."""
    options = {"stage": stage, **SMALL_BUCKETS, **more}
    without = trained(step, options, dtype, make)

    def train(filed):
        return trained(step, {**options, **filed}, dtype, make)

    return without, [with_least_cache(train, directory, offload) for offload in offloads]


def check(results):
    for without, found in results:
        assert without[0][0] != without[0][-1]
        for filed in found:
            assert_same(filed[:3], without[:3])
            assert min(filed[3]) > 0


TARGETS = {
    0: ["activations"],
    1: ["activations", "optimizer,activations"],
    2: ["activations", "optimizer,activations"],
    3: [PARAMS, "activations", WITH_STATES, "params,activations", "optimizer,activations", ALL],
}
CASES = [
    pytest.param(stage, offload, marks=() if offload in usual else EXHAUSTIVE)
    for stage, usual in {0: [], 1: [], 2: ["optimizer,activations"], 3: [PARAMS, ALL]}.items()
    for offload in TARGETS[stage]
]


@pytest.mark.slow(reason="a step with everything in files and one without")
@pytest.mark.parametrize("step", (exhaustive(plain), clipped))
@pytest.mark.parametrize("stage, offload", only(((3, ALL),), [(0, "activations"), *CASES]))
def test_everything_is_bitwise_as_without_offload(step, stage, offload, tmp_path):
    check([compared(step, stage, [offload], tmp_path)])


@pytest.mark.nightly
@pytest.mark.parametrize("step", (exhaustive(plain), clipped))
@pytest.mark.parametrize("stage, offload", [exhaustive(0, "activations"), *CASES])
def test_on_two_ranks_too(step, stage, offload, ranks, tmp_path):
    check(ranks(2).run(compared, step, stage, [offload], tmp_path))


OTHER_FORMS = [*FORMS[2:], autocast, arithmetic, own_sgd]


@pytest.mark.nightly
@pytest.mark.parametrize("step", [s if s is scaled else exhaustive(s) for s in OTHER_FORMS])
def test_every_form_of_a_step_is_bitwise_the_same(step, tmp_path):
    without, found = compared(step, 3, [ALL], tmp_path)
    for filed in found:
        assert_same(filed[:3], without[:3])
        assert min(filed[3]) > 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("step", OTHER_FORMS)
def test_every_form_of_a_step_is_bitwise_the_same_on_two_ranks(step, ranks, tmp_path):
    for without, found in ranks(2).run(compared, step, 3, [PARAMS, ALL], tmp_path):
        for filed in found:
            assert_same(filed[:3], without[:3])


@pytest.mark.nightly
@pytest.mark.parametrize(
    "options",
    [
        {"bucket": False},
        exhaustive({"update_in_backward": False, "prefetch": False}),
        exhaustive({"master_weights": True}),
        exhaustive({"accumulate": "sharded"}),
    ],
    ids=str,
)
def test_with_other_options_it_is_bitwise_the_same(options, ranks, tmp_path):
    dtype = torch.bfloat16 if "master_weights" in options else torch.float32
    check(ranks(2).run(with_options, options, tmp_path, dtype))


def with_options(options, directory, dtype):
    return compared(clipped, 3, [ALL], directory, dtype, **options)


# What a user does between steps


@pytest.mark.nightly
def test_what_the_user_writes_between_steps_is_trained_on(ranks, tmp_path):
    """full_params, load_state_dict of both, and unshard."""
    expected = ranks(2).run(write_between, 3, SMALL_BUCKETS)
    options = {**SMALL_BUCKETS, **files(tmp_path, ALL, 2**16)}
    assert_same(ranks(2).run(write_between, 3, options), expected)


@pytest.mark.nightly
@pytest.mark.parametrize("is_first", (True, exhaustive(False)))
def test_checkpoints_interchange_with_runs_without_offload(is_first, tmp_path):
    filed = {**SMALL_BUCKETS, **files(tmp_path, WITH_STATES, 2**15)}
    first, then = (filed, SMALL_BUCKETS) if is_first else (SMALL_BUCKETS, filed)
    expected = save_and_resume(3, SMALL_BUCKETS, SMALL_BUCKETS)
    assert_same(save_and_resume(3, first, then), expected)


def evaluate(model, x):
    return model(x).sum()


def in_turn(order, options_of):
    """Functions of these names, each with its options, over one model."""
    torch._dynamo.reset()
    gc.collect()
    pair, x = built(), torch.linspace(-1, 1, 24).reshape(4, 6)
    steps = {"train": plain, "clip": clipped}
    compiled = {
        name: zero(steps[name] if name in steps else torch.no_grad()(evaluate), **options)
        for name, options in options_of.items()
    }
    found = []
    with moving_small_values():
        for number, name in enumerate(order):
            if name in steps:
                found += run(compiled[name], pair, [number])
            elif name == "infer":
                with torch.inference_mode():
                    found.append(compiled[name](pair[0], x).item())
            else:
                found.append(compiled[name](pair[0], x).item())
    return found, pair[0].state_dict(), pair[1].state_dict()


def check_in_turn(order, options_of, run=in_turn):
    without = {name: SMALL_BUCKETS for name in options_of}
    with_files = {name: {**SMALL_BUCKETS, **options} for name, options in options_of.items()}
    found, expected = run(order, with_files), run(order, without)
    assert_same(found, expected)


JUDGED_FIRST = ("judge", "train", "judge", "train", "judge", "train")
TRAINED_FIRST = ("train", "judge", "judge", "train", "judge", "train")
INFERRED_FIRST = ("infer", "train", "infer", "train", "infer", "train")
EVALUATIONS = [
    (JUDGED_FIRST, False),
    (TRAINED_FIRST, False),
    (INFERRED_FIRST, True),
    exhaustive(JUDGED_FIRST, True),
    exhaustive(TRAINED_FIRST, True),
    exhaustive(INFERRED_FIRST, False),
]


@pytest.mark.nightly
@pytest.mark.parametrize("order, has_option", EVALUATIONS)
def test_an_evaluation_beside_it_reads_the_same_values(order, has_option, tmp_path):
    filed = files(tmp_path, WITH_STATES, 2**15)
    (other,) = {*order} - {"train"}
    check_in_turn(order, {"train": filed, other: filed if has_option else {}})


TIERS = [{}, {"offload": PARAMS}, {"offload": WITH_STATES}]


@pytest.mark.nightly
@pytest.mark.parametrize("other", [TIERS[1], *map(exhaustive, (TIERS[0], TIERS[2]))], ids=str)
def test_functions_with_other_tiers_alternate_over_one_model(other, tmp_path):
    order = ("train", "clip", "clip", "train", "train", "clip")
    check_in_turn(order, {"train": files(tmp_path, ALL), "clip": other})


@pytest.mark.nightly
def test_functions_with_other_directories_alternate_over_one_model(tmp_path):
    order = ("train", "clip", "clip", "train", "train", "clip")
    one, other = (files(folder_in(tmp_path), PARAMS) for _ in range(2))
    check_in_turn(order, {"train": one, "clip": other})


def sized(rows_of, options, stage=3):
    """Batches of so many rows, which Dynamo takes for dynamic from the second size on."""
    torch._dynamo.reset()
    gc.collect()
    pair, compiled = built(), zero(stage=stage, **SMALL_BUCKETS, **options)
    losses = [compiled(*pair, *features(n, rows)).item() for n, rows in enumerate(rows_of)]
    filed = program_of(compiled).function.copies.slots.values()
    sizes = [bucket.nbytes for bucket in filed]
    return losses, pair[0].state_dict(), pair[1].state_dict(), sizes


@pytest.mark.nightly
@pytest.mark.parametrize("stage, offload", [(0, "activations"), (3, ALL)])
def test_batches_that_grow_and_shrink_are_bitwise_the_same(stage, offload, tmp_path):
    rows = (8, 4, 6, 40, 400, 8, 900, 4)
    found = sized(rows, files(tmp_path, offload, 2**20), stage)
    assert_same(found[:3], sized(rows, {}, stage)[:3])
    assert max(found[3]) >= 900 * 6 * 4, "it has grown"


@pytest.mark.nightly
def test_a_batch_that_is_too_large_for_the_cache_is_refused_and_smaller_ones_go_on(tmp_path):
    expected = sized((8, 4, 6, 8), {})
    pair, compiled = built(), zero(**SMALL_BUCKETS, **files(tmp_path, ALL, 5 * 8192))
    losses = [
        compiled(*pair, *features(number, rows)).item() for number, rows in enumerate((8, 4, 6))
    ]
    words = r"takes \d+ bytes on this rank.* Give at least \d+, or a smaller batch"
    with pytest.raises(StepError, match=words):
        compiled(*pair, *features(3, 4000))
    losses.append(compiled(*pair, *features(3, 8)).item())
    assert losses == expected[0]
    assert_same([part.state_dict() for part in pair], list(expected[1:3]))


class Disk(SystemCalls):
    free = None

    def free_bytes(self, directory):
        return super().free_bytes(directory) if self.free is None else self.free


@pytest.fixture
def disk(monkeypatch):
    monkeypatch.setattr(REGISTRY.files, "system", Disk())
    return REGISTRY.files.system


@pytest.mark.nightly
def test_a_batch_that_is_too_large_for_the_disk_is_refused_and_smaller_ones_go_on(tmp_path, disk):
    expected = sized((8, 4, 6, 8), {})[0]
    pair, compiled = built(), zero(**SMALL_BUCKETS, **files(tmp_path, ALL))
    losses = [
        compiled(*pair, *features(number, rows)).item() for number, rows in enumerate((8, 4, 6))
    ]
    disk.free = 100
    with pytest.raises(StepError, match=r"activations need \d+ bytes in files.* 100 are free"):
        compiled(*pair, *features(3, 4000))
    losses.append(compiled(*pair, *features(3, 8)).item())
    assert losses == expected


@pytest.mark.nightly
def test_a_bucket_is_read_once_for_all_of_its_whole_parameters(tmp_path):
    pair, compiled = built(), zero(plain, stage=3, **files(tmp_path))
    run(compiled, pair, range(1))
    expected, real = copy.deepcopy(pair[0].state_dict()), FileTier.read
    buckets = [one for one in program_of(compiled).runtime.files.buckets if one.has_any()]
    num_shards = len({bucket.name for bucket in buckets if bucket.what == KINDS["params"]})
    with mock.patch.object(FileTier, "read", autospec=True, side_effect=real) as read:
        with zerofx.full_params(pair[0]):
            assert_same(pair[0].state_dict(), expected)
    assert 0 < read.call_count == num_shards < len(list(pair[0].parameters()))


@pytest.mark.nightly
def test_shards_that_find_no_room_to_come_back_to_are_not_lost(tmp_path, disk):
    expected, pair = built(), built()
    steps = [zero(**SMALL_BUCKETS), zero(clipped, **SMALL_BUCKETS)]
    losses = [run(steps[n], expected, [number])[0] for number, n in enumerate((0, 1, 1, 0))]
    torch._dynamo.reset()
    filed = zero(**SMALL_BUCKETS, **files(tmp_path, PARAMS))
    beside = zero(clipped, **SMALL_BUCKETS, offload=PARAMS)
    found = run(filed, pair, [0]) + run(beside, pair, [1])
    disk.free = 100
    with pytest.raises(StepError, match=r"parameter shards need \d+ bytes in files.* 100 are free"):
        run(filed, pair, [2])
    found += run(beside, pair, [2])
    disk.free = None
    assert found + run(filed, pair, [3]) == losses


@pytest.mark.nightly
def test_no_room_is_refused_with_the_numbers_and_nothing_has_changed(tmp_path, disk):
    disk.free = 5000
    pair = built()
    before = {name: value.clone() for name, value in pair[0].state_dict().items()}
    words = r"parameter shards need \d+ bytes in files: no room .* 5000 are free"
    with pytest.raises(FileTierError, match=words):
        run(zero(**files(tmp_path, PARAMS)), pair, [0])
    with pytest.raises(FileTierError, match="does not exist"):
        run(zero(clipped, **files(tmp_path / "missing", PARAMS)), pair, [0])
    assert_same(dict(pair[0].state_dict()), before)
    assert REGISTRY.lookup(pair[0].head.weight) is None


@pytest.mark.nightly
def test_a_cache_too_small_is_refused_and_the_least_it_names_is_enough(tmp_path):
    with pytest.raises(StepError, match="offload_cache_bytes=5000 is less than two of the largest"):
        run(zero(**SMALL_BUCKETS, **files(tmp_path, ALL, 5000)), built(), [0])

    def train(options):
        pair, compiled = built(), zero(clipped, **SMALL_BUCKETS, **options)
        losses = run(compiled, pair, range(3))
        return losses, program_of(compiled).runtime.files.tier.cache.held_bytes, options

    losses, cached_bytes, options = with_least_cache(train, tmp_path, ALL)
    assert cached_bytes <= options["offload_cache_bytes"]
    torch._dynamo.reset()
    assert losses == run(zero(clipped, **SMALL_BUCKETS), built(), range(3))


# Memory and disk


class Deep(nn.Module):
    def __init__(self, width=64, layers=8):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.gain = nn.Parameter(torch.ones(width, dtype=torch.bfloat16))
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.tied = self.layers[0].weight
        self.layers[1].requires_grad_(False)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return F.linear(x, self.tied) * self.gain.float() * self.scale


def deep(options, steps=3):
    torch._dynamo.reset()
    gc.collect()
    torch.manual_seed(0)
    model = Deep()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    compiled = zero(step, **options)
    x = torch.ones(4, 64)
    return [compiled(x).item() for _ in range(steps)], model, optimizer, compiled


def states_of_deep(options):
    losses, model, optimizer, _ = deep(options)
    return losses, model.state_dict(), optimizer.state_dict()


@pytest.mark.nightly
@pytest.mark.parametrize("options", [{}, exhaustive({"bucket": False})], ids=str)
def test_tied_frozen_and_single_parameters_of_several_dtypes(options, ranks, tmp_path):
    expected = ranks(2).run(states_of_deep, options)
    filed = {**options, **files(tmp_path, WITH_STATES)}
    assert_same(ranks(2).run(states_of_deep, filed), expected)


@pytest.mark.nightly
def test_between_steps_host_memory_holds_the_caches_bound_and_no_more(tmp_path):
    gc.collect()
    before, kept = REGISTRY.host.nbytes, persistent_bytes()["parameters"]
    bound = 6 * 20 * 1024
    _, model, _, compiled = deep({"bucket_bytes": 20_000, **files(tmp_path, PARAMS, bound)})
    runtime = program_of(compiled).runtime
    staging = runtime.host_needs.get("staging buffers", 0)
    shards = sum(bucket.nbytes for bucket in set(runtime.files.buckets))
    assert shards > bound, "it cannot hold all of them"
    assert 0 < REGISTRY.host.nbytes - before <= bound + staging
    assert persistent_bytes()["parameters"] == kept, "of other tests' models"
    bounds = [REGISTRY.lookup(parameter) for parameter in model.parameters()]
    assert all(
        b is not None and b.location is Location.FILE and not b.shard.numel() for b in bounds
    )


def descriptors():
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.nightly
def test_disk_and_descriptors_are_given_back_with_models_and_functions(tmp_path):
    options = {**SMALL_BUCKETS, **files(tmp_path, WITH_STATES, 2**15)}
    pair, other, compiled = built(), built(), zero(**options)
    losses = run(compiled, pair, range(2))
    assert losses == run(compiled, other, range(2)), "two models share the directory"
    size = len(open_in(tmp_path))
    del other
    gc.collect()
    losses += run(compiled, pair, range(2, 3))
    assert len(open_in(tmp_path)) < size
    meanwhile = descriptors()
    torch._dynamo.reset()
    del pair, compiled
    gc.collect()
    assert os.listdir(tmp_path) == [] and descriptors() < meanwhile
    assert losses == run(zero(**SMALL_BUCKETS), built(), range(3))
