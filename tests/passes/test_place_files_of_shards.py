"""The pass ``place_files`` for shards and activations: read before a use, let go after it."""

import operator

import pytest

from tests.kit.covering import nightly, only
from tests.kit.offloaded_programs import (
    FACTS,
    OFFLOADED,
    STEPS,
    bucket_to_device,
    drop_value,
    evict_shards,
    fetch_shards,
    fetch_value,
    refused,
    value_to_device,
    wait_of_fetch,
)
from tests.kit.programs import (
    assert_program,
    assert_same_numerics,
    evaluation,
    execute,
    listing,
    mlp_step,
    nodes_of,
    rewritten,
    rewritten_by_rank,
    smallest_step,
)
from tests.training.test_activations import SLOW
from zerofx.ir import ops
from zerofx.ir.graph import program_order
from zerofx.ir.offload import changes_files, released_at, uses_of_files
from zerofx.verify.verifier import verify

FILES = {"offload_tier": "nvme", "offload_dir": "scratch"}
PARAMS = {**OFFLOADED, "offload": "params"}
WITH_STATES = {**OFFLOADED, "offload": "optimizer,params"}
ACTIVATIONS = {**OFFLOADED, "offload": "activations", "hardware": SLOW}
ALL = {**OFFLOADED, "offload": "optimizer,params,activations", "hardware": SLOW}


def of(cases):
    return pytest.mark.parametrize("offload", cases, ids=operator.itemgetter("offload"))


@pytest.fixture(autouse=True)
def small_values(monkeypatch):
    monkeypatch.setattr("zerofx.passes.offload.offload_activations.SMALLEST_BYTES", 1)


def test_shards_are_there_for_every_move_that_is_about_them():
    assert_program(
        rewritten(smallest_step(), stage=3, **{**PARAMS, **FILES, "bucket": False}),
        """
        input: other [3, 4]
        w: shard of parameter [4]
        fetch_start = zerofx.fetch_start(None, 'shards', [0], None, 16)
        wait = zerofx.wait(fetch_start)
        copy_start = zerofx.copy_start([w], [0], 'cpu')
        wait_1 = zerofx.wait(copy_start)
        zerofx.evict(wait, 'shards', [0], None, False)
        fetch_start_1 = zerofx.fetch_start(None, 'shards', [0], None, 16)
        ...
        wait_3 = zerofx.wait(fetch_start_1)
        copy_start_1 = zerofx.copy_start([w], [0], 'cpu')
        ...
        wait_5 = zerofx.wait(copy_start_1)
        zerofx.evict(wait_3, 'shards', [0], None, False)
        fetch_start_2 = zerofx.fetch_start(None, 'shards', [0], None, 16)
        ...
        update = zerofx.update(slice_1, wait_4, SGD, 0, None)
        wait_6 = zerofx.wait(fetch_start_2)
        copy_start_2 = zerofx.copy_start([update], [0], [w])
        wait_7 = zerofx.wait(copy_start_2)
        zerofx.evict(wait_6, 'shards', [0], None, True)
        getitem = getitem(wait_7, 0)
        return []
        """,
    )


def test_an_update_has_its_shards_beside_its_states():
    assert_program(
        rewritten(smallest_step(), stage=3, **WITH_STATES, **FILES),
        """
        ...
        fetch_start = zerofx.fetch_start(None, 'shards', [0], None, 16)
        fetch_start_1 = zerofx.fetch_start(None, 'states', [0], SGD, 32)
        ...
        zerofx.evict(wait, 'shards', [0], None, False)
        fetch_start_2 = zerofx.fetch_start(None, 'shards', [0], None, 16)
        ...
        wait_3 = zerofx.wait(reduce_scatter_start)
        copy_start_1 = zerofx.copy_start([wait_3], [0], 'host', 0)
        wait_4 = zerofx.wait(fetch_start_1)
        wait_5 = zerofx.wait(fetch_start_2)
        update_start = zerofx.update_start([w], copy_start_1, SGD, [0], None)
        wait_6 = zerofx.wait(copy_start_1)
        wait_7 = zerofx.wait(update_start)
        zerofx.evict(wait_5, 'shards', [0], None, True)
        zerofx.evict(wait_4, 'states', [0], SGD)
        getitem = getitem(wait_7, 0)
        return []
        """,
    )


def test_an_activation_is_in_a_file_between_its_two_moves():
    program = rewritten(mlp_step(2), stage=0, **ACTIVATIONS, **FILES)
    assert_program(
        program,
        """
        ...
        copy_start_2 = zerofx.copy_start([addmm_1], [], 'host', 2)
        wait_1 = zerofx.wait(copy_start_1)
        evict_1 = zerofx.evict(wait_1, 'value')
        mean = mean(pow)
        wait_2 = zerofx.wait(copy_start_2)
        evict_2 = zerofx.evict(wait_2, 'value')
        fetch_start = zerofx.fetch_start(evict_2, 'value')
        fetch_start_1 = zerofx.fetch_start(evict_1, 'value')
        fetch_start_2 = zerofx.fetch_start(evict, 'value')
        ...
        wait_3 = zerofx.wait(fetch_start)
        copy_start_3 = zerofx.copy_start([wait_3], [], 'cpu')
        div = div(expand, 15)
        wait_4 = zerofx.wait(copy_start_3)
        zerofx.evict(wait_3, 'value', changed=False)
        pow_1 = pow(wait_4, 1.0)
        ...
        """,
    )


def test_an_evaluation_reads_shards_and_changes_none():
    program = rewritten(evaluation(), stage=3, **PARAMS, **FILES)
    releases = nodes_of(program, evict_shards)
    assert releases and not any(map(changes_files, releases))
    without = rewritten(evaluation(), stage=3, **PARAMS)
    for node in reversed(nodes_of(program, fetch_shards, wait_of_fetch, evict_shards)):
        program.graph.erase_node(node)
    assert listing(program) == listing(without)


@pytest.mark.parametrize(
    "offload", (PARAMS, WITH_STATES, ACTIVATIONS, ALL), ids=lambda o: o["offload"]
)
def test_in_host_memory_nothing_is_about_files(offload):
    program = rewritten(mlp_step(), stage=3, **offload)
    about_files = (ops.fetch_start, ops.evict, wait_of_fetch)
    assert not nodes_of(program, *about_files)


def check_numerics(step, world_size, stage, options):
    before = rewritten_by_rank(step, world_size, stage=stage, **options)
    after = rewritten_by_rank(step, world_size, stage=stage, **options, **FILES)
    assert nodes_of(after[0], wait_of_fetch)
    assert_same_numerics(execute(before), execute(after))


@pytest.mark.parametrize("world_size", only((2,), (1, 2)))
@of([nightly(PARAMS), WITH_STATES, ALL])
@pytest.mark.parametrize("name", only(("layers",), STEPS))
def test_computes_bitwise_what_it_did_with_shards_there_when_used(name, offload, world_size):
    check_numerics(STEPS[name](), world_size, 3, offload)


@pytest.mark.parametrize("world_size", only((2,), (1, 2)))
@pytest.mark.parametrize("stage", only((3,), (0, 1, 2, 3)))
@pytest.mark.parametrize("name", only(("layers",), ("layers", "clipped", "tied")))
def test_computes_bitwise_what_it_did_with_activations_in_files(name, stage, world_size):
    check_numerics(STEPS[name](), world_size, stage, ACTIVATIONS)


@of((PARAMS, ALL))
def test_a_read_starts_when_what_may_have_changed_it_has_been_let_go_of(offload):
    """And in the order of the waits: the cache goes by that."""
    program = rewritten(mlp_step(), stage=3, **offload, **FILES)
    order = program_order(program.graph)
    uses = [use for use in uses_of_files(program.graph) if wait_of_fetch(use)]
    assert len(uses) > 4
    starts = [order[use.args[0]] for use in uses]
    assert starts == sorted(starts)
    let_go: dict[int, int] = {}
    for use in uses:
        (start,) = use.args
        assert order[start] < order[use] < order[released_at(use)]
        if fetch_shards(start):
            for index in start.args[2]:
                before = let_go.get(index, -1)
                assert before < order[start] or before > order[use]  # or is in use still
                let_go[index] = order[released_at(use)]
    assert let_go


# Planted faults


def first(program, target):
    return nodes_of(program, target)[0]


def read_shards_nobody_uses(program):
    start = first(program, fetch_shards)
    for node in (start, first(program, evict_shards)):
        position = node.args.index([index for index in node.args if isinstance(index, list)][0])
        arguments = list(node.args)
        arguments[position] = [*arguments[position], 5]
        node.args = tuple(arguments)


def let_go_of_other_shards(program):
    release = first(program, evict_shards)
    release.update_arg(2, [release.args[2][0] + 1])


def let_go_of_shards_early(program):
    first(program, wait_of_fetch).append(first(program, evict_shards))


def read_shards_late(program):
    wait = first(program, wait_of_fetch)
    first(program, bucket_to_device).append(wait)


def keep_a_change_from_the_file(program):
    for release in nodes_of(program, evict_shards):
        if changes_files(release):
            release.update_arg(4, False)


def let_go_of_shards_twice(program):
    release = first(program, evict_shards)
    with program.graph.inserting_after(release):
        copy = program.graph.node_copy(release)
    copy.meta = dict(release.meta)


def never_let_go_of_shards(program):
    program.graph.erase_node(first(program, evict_shards))


def bring_back_what_is_not_there(program):
    reload = first(program, value_to_device)
    reload.update_arg(0, [reload.args[0][0].args[0].args[0]])


def drop_early(program):
    first(program, value_to_device).append(first(program, drop_value))


def never_drop(program):
    program.graph.erase_node(first(program, drop_value))


def read_a_value_twice(program):
    start = first(program, fetch_value)
    with program.graph.inserting_after(start):
        copy = program.graph.node_copy(start)
    copy.meta = dict(start.meta)


def drop_what_nobody_asked_for(program):
    drop = first(program, drop_value)
    drop.update_arg(0, drop.args[0].args[0])


FAULTS = {
    read_shards_nobody_uses: "has shards of .* read, and nobody uses them",
    let_go_of_other_shards: "lets go of other shards than .* reads",
    let_go_of_shards_early: "is about shards of .* that are in files then",
    read_shards_late: "is about shards of .* that are in files then",
    keep_a_change_from_the_file: "changes shards of .*, and no file gets to hold that",
    let_go_of_shards_twice: "shards that are there must have one .*evict",
    never_let_go_of_shards: "shards that are there must have one .*evict.* not nobody",
    bring_back_what_is_not_there: "must have one .*fetch_start|brought back",
    drop_early: "drops what .* still copies",
    never_drop: "is to be brought back to the device once and dropped",
    read_a_value_twice: "must have one .*(fetch_start|wait)",
    drop_what_nobody_asked_for: "must have one .*wait|what nobody has asked for",
}


@pytest.mark.parametrize("plant", FAULTS, ids=operator.attrgetter("__name__"))
def test_the_verifier_refuses_what_is_not_there_when_it_is_used(plant):
    about_values = plant in list(FAULTS)[7:]
    options = {"stage": 0, **ACTIVATIONS} if about_values else {"stage": 3, **PARAMS}
    program = rewritten(mlp_step(), **options, **FILES)
    facts = FACTS - {"sharded_updates"} if about_values else FACTS
    verify(program.gm, program.table, facts)
    plant(program)
    refused(program, FAULTS[plant], facts)
