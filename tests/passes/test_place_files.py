"""The pass ``place_files``: states are read before their update and let go after it."""

import operator

import pytest
import torch

from tests.kit.covering import each_pair, nightly
from tests.kit.offloaded_programs import (
    FACTS,
    OFFLOADED,
    STEPS,
    evict_states,
    fetch_states,
    refused,
    wait_of_fetch,
)
from tests.kit.programs import (
    assert_program,
    assert_same_numerics,
    capture,
    evaluation,
    execute,
    listing,
    mlp_step,
    nodes_of,
    rewritten,
    rewritten_by_rank,
    smallest_step,
)
from zerofx.cost.program import live_bytes
from zerofx.cost.timeline import predict
from zerofx.hardware import NOMINAL, of
from zerofx.ir import ops
from zerofx.ir.graph import program_order
from zerofx.ir.offload import uses_of_files
from zerofx.verify.verifier import verify

IN_FILES = {**OFFLOADED, "offload_tier": "nvme", "offload_dir": "scratch"}


def test_rewrites_the_smallest_program():
    program = rewritten(smallest_step(), stage=3, **IN_FILES)
    assert_program(
        program,
        """
        input: other [3, 4]
        w: shard of parameter [4]
        fetch_start = zerofx.fetch_start(None, 'states', [0], SGD, 32)
        ...
        wait_1 = zerofx.wait(reduce_scatter_start)
        copy_start = zerofx.copy_start([w], [0], 'host', 0)
        copy_start_1 = zerofx.copy_start([wait_1], [0], 'host', 1)
        wait_2 = zerofx.wait(fetch_start)
        update_start = zerofx.update_start(copy_start, copy_start_1, SGD, [0], None)
        wait_3 = zerofx.wait(copy_start)
        wait_4 = zerofx.wait(copy_start_1)
        wait_5 = zerofx.wait(update_start)
        zerofx.evict(wait_2, 'states', [0], SGD)
        copy_start_2 = zerofx.copy_start([wait_5], [0], 'cpu')
        ...
        return []
        """,
    )


def test_in_host_memory_nothing_is_read():
    program = rewritten(mlp_step(), stage=3, **OFFLOADED)
    assert nodes_of(program, fetch_states) == []


def test_leaves_a_program_without_updates_alone():
    program = rewritten(evaluation(), stage=3, **IN_FILES)
    assert listing(program) == listing(rewritten(evaluation(), stage=3, bucket=True))


@pytest.mark.parametrize(
    "name, stage, world_size",
    each_pair(
        STEPS,
        (1, 2, 3),
        (1, 2),
        default=[("smallest", 1, 1), ("layers", 2, 2), ("tied", 1, 2), ("twice", 2, 1)],
    ),
)
def test_computes_bitwise_what_it_did_and_every_update_has_its_states(name, stage, world_size):
    step = STEPS[name]()
    before = rewritten_by_rank(step, world_size, stage=stage, **OFFLOADED)
    after = rewritten_by_rank(step, world_size, stage=stage, **IN_FILES)
    assert nodes_of(after[0], fetch_states)
    assert_same_numerics(execute(before), execute(after))


@pytest.mark.parametrize("stage", (1, 2, 3))
def test_a_buckets_states_are_read_while_the_one_before_is_updated(stage):
    program = rewritten(mlp_step(), stage=stage, **IN_FILES)
    order = program_order(program.graph)
    starts = nodes_of(program, fetch_states)
    waits = nodes_of(program, wait_of_fetch)
    releases = nodes_of(program, evict_states)
    assert len(starts) == len(waits) == len(releases) > 1
    for following, release in zip(starts[1:], releases, strict=False):
        assert order[following] < order[release]
    # Two buckets' states are there at once, and never more.
    for third, release in zip(waits[2:], releases, strict=False):
        assert order[release] < order[third]
    buckets = {info.place.bucket for info in program.table}
    groups = [use.args[0].args[2:4] for use in uses_of_files(program.graph)]
    assert len(groups) == len(buckets)
    assert sorted(index for indices, _ in groups for index in indices) == list(
        range(len(program.table))
    )


def break_wait(program):
    (wait, *_) = nodes_of(program, wait_of_fetch)
    release = next(iter(wait.users))
    release.args = (wait.args[0], *release.args[1:])


def break_twice(program):
    release, *_ = nodes_of(program, evict_states)
    with program.graph.inserting_after(release):
        copy = program.graph.node_copy(release)
    copy.meta = dict(release.meta)


def break_others(program):
    release, *_ = nodes_of(program, evict_states)
    release.update_arg(2, [release.args[2][0] + 1])


def break_early(program):
    release, *_ = nodes_of(program, evict_states)
    first = min(nodes_of(program, ops.update_start))
    first.prepend(release)


def break_order(program):
    one, other, *_ = nodes_of(program, fetch_states)
    one.prepend(other)


def break_uncovered(program):
    starts = nodes_of(program, fetch_states)
    wait = next(iter(starts[-1].users))
    for node in (*wait.users, wait, starts[-1]):
        program.graph.erase_node(node)


BROKEN = {
    break_wait: "must have one .*wait.* and no other reader",
    break_twice: "must have one .*evict.* and no other reader",
    break_others: "lets go of other states",
    break_early: "is about states of .* that are in files then",
    break_order: "out of the order in which they are read",
    break_uncovered: "is about states of .* that are in files then",
}


@pytest.mark.parametrize("break_it", BROKEN, ids=operator.attrgetter("__name__"))
def test_the_verifier_refuses_what_is_not_read_or_not_let_go(break_it):
    program = rewritten(mlp_step(), stage=3, **IN_FILES)
    verify(program.gm, program.table, FACTS)
    break_it(program)
    refused(program, BROKEN[break_it])


def test_files_have_a_lane_and_states_count_for_nothing_on_the_device():
    program = rewritten(mlp_step(), stage=3, **IN_FILES)
    without = rewritten(mlp_step(), stage=3, **OFFLOADED)
    assert max(live_bytes(program.graph, 2)) == max(live_bytes(without.graph, 2))
    slow = of({"latency_s": 1e-4, "bytes_per_s": 2.5e10, "file_bytes_per_s": 1e3})
    assert "file_bytes_per_s=1000" in str(slow) and "file_bytes_per_s" not in str(NOMINAL)
    timeline = predict(program.graph, slow, program.table, 2)
    nbytes = sum(8 * -(-info.numel // 2) for info in program.table)
    states = [start.args[4] for start in nodes_of(program, fetch_states)]
    assert sum(states) == nbytes
    lane = nodes_of(program, fetch_states, evict_states)
    seconds = [timeline.transfers[node].seconds for node in lane]
    assert sum(seconds) == pytest.approx(2 * nbytes / 1e3)
    # A disk this slow is all that counts: what is behind the last read is waited for by nobody.
    last = max(i for i, node in enumerate(lane) if fetch_states(node))
    assert last < len(lane) - 1
    assert timeline.exposed_s == pytest.approx(sum(seconds[: last + 1]), rel=0.01)


def test_reads_are_as_early_as_host_memory_has_room_for():
    """All at the start if all fit; else a bucket's when enough before it has been let go of."""
    states = [use.args[0].args[4] for use in uses_of_files(files_of(None).graph)]
    assert len(states) > 4

    def before_any_release(cache_bytes):
        program = files_of(cache_bytes)
        order = program_order(program.graph)
        first = order[nodes_of(program, evict_states)[0]]
        starts = nodes_of(program, fetch_states)
        assert [start.args[2:4] for start in starts] == [
            use.args[0].args[2:4] for use in uses_of_files(program.graph)
        ]
        return sum(order[start] < first for start in starts)

    assert before_any_release(sum(states)) == len(states)
    assert before_any_release(sum(states[:3])) == 3
    assert before_any_release(max(states)) == 2  # which are in use at once
    assert before_any_release(None) == 4  # of buckets that are about as large


def files_of(cache_bytes):
    return rewritten(mlp_step(5), stage=3, **IN_FILES, offload_cache_bytes=cache_bytes)


@pytest.mark.parametrize(
    "options, per_element",
    [
        nightly({}, 4),
        nightly({"master_weights": True}, 12),
        ({"moment_dtype": "bfloat16", "master_weights": True}, 8),
    ],
)
def test_plans_take_states_for_adamws_by_the_precision_options(options, per_element):
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 5).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters())

    def step(x):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    captured = capture(step, torch.ones(3, 5, dtype=torch.bfloat16), world_size=2)
    program = rewritten(captured, stage=3, **IN_FILES, **options)
    states = [start.args[4] for start in nodes_of(program, fetch_states)]
    assert sum(states) == per_element * sum(-(-info.numel // 2) for info in program.table)
