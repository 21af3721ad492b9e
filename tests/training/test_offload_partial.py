"""With a ``memory_budget``, states stay on the device as far as it has room for them."""

import re

import pytest
import torch

import tests.conftest  # noqa: F401  # the ranks need the backend's name too
import zerofx
from tests.kit.covering import only
from tests.kit.models import features
from tests.kit.ranks import ranks_fixture  # noqa: F401
from tests.kit.trainings import (
    FORMS,
    OFFLOAD,
    SCALERS,
    assert_same,
    built,
    clipped,
    plain,
    run,
    scaled,
    tensors_of,
    trained,
    zero,
)
from zerofx.errors import StepError
from zerofx.runtime.parameters.registry import REGISTRY

BUCKETS = {"bucket_bytes": 400}


@pytest.fixture(autouse=True)
def forget_compiled_code():
    torch._dynamo.reset()


def least_budget(step, stage):
    """What the step's programs allocate with all states on the host, as their refusals say."""
    budget = 1
    while True:
        torch._dynamo.reset()
        SCALERS[:] = [torch.amp.GradScaler("cpu")]
        compiled = zero(step, stage, memory_budget=budget, **OFFLOAD, **BUCKETS)
        try:
            run(compiled, built(), [0, 1])
            return budget
        except StepError as error:
            budget = int(re.search(r"allocates (\d+) on this rank", str(error))[1])


def num_ranks():
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def with_room(step, stage, options):
    """Without offload, and with room for none, some, and all of the states."""
    options = {"stage": stage, **BUCKETS, **options}
    least = least_budget(step, stage)
    found = [trained(step, options)]
    some = 1500 // num_ranks()
    for room in (0, some, 2**20):
        found.append(trained(step, {**options, **OFFLOAD, "memory_budget": least + room}))
    return found


def check(found):
    for without, *offloaded in found:
        for one in offloaded:
            assert_same(one[:3], without[:3])
        none, some, everything = (one[3] for one in offloaded)
        assert none[0] == none[1] and 0 < some[0] < some[1] and everything[0] == 0


OTHERS = [pytest.param(step, marks=pytest.mark.exhaustive) for step in FORMS if step is not clipped]


@pytest.mark.nightly
@pytest.mark.parametrize("stage", only((3,), (1, 2, 3)))
@pytest.mark.parametrize("step", (clipped, *OTHERS))
def test_what_stays_is_bitwise_what_leaves(step, stage):
    check([with_room(step, stage, {})])


@pytest.mark.nightly
@pytest.mark.parametrize("step, stage", ((clipped, 2), (scaled, 3)))
def test_on_two_ranks(step, stage, ranks):
    check(ranks(2).run(with_room, step, stage, {}))


def with_batches(rows, stage):
    """Train without offload, then with room for some states beside the largest batch.

    ``rows`` are those of each rank, call by call.
    """
    with pytest.raises(StepError, match="on this rank") as caught:
        largest = features(0, max(map(max, rows)))
        zero(plain, stage, memory_budget=1, **OFFLOAD, **BUCKETS)(*built(), *largest)
    least = int(re.search(r"allocates (\d+) on this rank", str(caught.value))[1])
    found = []
    for options in ({}, {**OFFLOAD, "memory_budget": least + 1500 // num_ranks()}):
        torch._dynamo.reset()
        pair, compiled = built(), zero(plain, stage, **BUCKETS, **options)
        for number, of_ranks in enumerate(rows):
            compiled(*pair, *features(number, of_ranks[torch.distributed.get_rank()]))
        there = [not REGISTRY.host.holds(tensor) for tensor in tensors_of(pair[1])]
        found.append((pair[0].state_dict(), pair[1].state_dict(), there))
    return found


@pytest.mark.nightly
@pytest.mark.parametrize("stage", only((2,), (1, 2, 3)))
def test_states_stay_alike_on_ranks_whose_batches_differ(stage, ranks):
    """The first batches leave one rank room for all states, the next ones the other rank."""
    one, other = ranks(2).run(with_batches, ((2, 400), (400, 3)), stage)
    for (*without, _), (*offloaded, there) in (one, other):
        assert_same(offloaded, without)
        assert there == one[1][2] and len(set(there)) == 2


@pytest.mark.nightly
def test_in_compiled_kernels():
    check([with_room(clipped, 3, {"lowering": "inductor"})])


@pytest.mark.nightly
@pytest.mark.parametrize("options", ({"master_weights": True}, {"moment_dtype": "int8"}), ids=str)
def test_with_numbers_kept_otherwise(options):
    check([with_room(plain, 3, options)])


@pytest.mark.nightly
def test_functions_with_different_room_share_an_optimizer():
    """States follow: to the host, back to the device, in part, and all of them again."""
    expected, pair = built(), built()
    losses = run(zero(plain, 3, **BUCKETS), expected, range(8))
    least = least_budget(plain, 3)
    found, held = [], []
    for turn, room in enumerate((0, 2**20, 1500, 0)):
        torch._dynamo.reset()
        compiled = zero(plain, 3, memory_budget=least + room, **OFFLOAD, **BUCKETS)
        found += run(compiled, pair, range(2 * turn, 2 * turn + 2))
        held.append(sum(map(REGISTRY.host.holds, tensors_of(pair[1]))))
    assert found == losses
    assert_same(pair[1].state_dict(), expected[1].state_dict())
    count = len(tensors_of(pair[1]))
    assert held[0] == held[3] == count and held[1] == 0 and 0 < held[2] < count


@pytest.mark.slow(reason="steps are compiled and run")
def test_explain_says_what_stays():
    pair = built()
    compiled = zero(plain, 3, memory_budget=least_budget(plain, 3) + 1500, **OFFLOAD, **BUCKETS)
    run(compiled, pair, [0])
    table = zerofx.explain(compiled)
    there = sum(t.nbytes for t in tensors_of(pair[1]) if not REGISTRY.host.holds(t))
    assert re.search(rf"optimizer states on the device +\S*{there / 1024:.2f} KiB", table), table
    assert "optimizer states in host memory" in table
