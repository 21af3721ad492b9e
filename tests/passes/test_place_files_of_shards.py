"""The pass ``place_files`` for shards and activations: read before a use, let go after it."""

import operator

import pytest

from tests.kit.covering import only
from tests.kit.offloaded_programs import FACTS, OFFLOADED, STEPS, refused
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
from zerofx.ir.graph import program_order, released_at, uses_of_files
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
    start = "shards_from_file_start"
    assert_program(
        rewritten(smallest_step(), stage=3, **{**PARAMS, **FILES, "bucket": False}),
        f"""
        input: other [3, 4]
        w: shard of parameter [4]
        {start} = zerofx.{start}([0], 16)
        wait_file = zerofx.wait_file({start})
        to_device_start = zerofx.to_device_start([w], [0], device(type='cpu'))
        wait_move = zerofx.wait_move(to_device_start)
        zerofx.shards_to_file(wait_file, [0], False)
        {start}_1 = zerofx.{start}([0], 16)
        ...
        wait_file_1 = zerofx.wait_file({start}_1)
        to_device_start_1 = zerofx.to_device_start([w], [0], device(type='cpu'))
        ...
        wait_move_1 = zerofx.wait_move(to_device_start_1)
        zerofx.shards_to_file(wait_file_1, [0], False)
        {start}_2 = zerofx.{start}([0], 16)
        ...
        update = zerofx.update(slice_1, wait_1, SGD, 0, None)
        wait_file_2 = zerofx.wait_file({start}_2)
        store_start = zerofx.store_start([update], [0], [w])
        wait_store = zerofx.wait_store(store_start)
        zerofx.shards_to_file(wait_file_2, [0], True)
        getitem = getitem(wait_store, 0)
        return []
        """,
    )


def test_an_update_has_its_shards_beside_its_states():
    assert_program(
        rewritten(smallest_step(), stage=3, **WITH_STATES, **FILES),
        """
        ...
        shards_from_file_start = zerofx.shards_from_file_start([0], 16)
        states_from_file_start = zerofx.states_from_file_start(SGD, [0], 32)
        ...
        zerofx.shards_to_file(wait_file, [0], False)
        shards_from_file_start_1 = zerofx.shards_from_file_start([0], 16)
        ...
        wait_1 = zerofx.wait(reduce_scatter_start)
        to_host_start = zerofx.to_host_start([wait_1], [0], 0)
        wait_file_1 = zerofx.wait_file(states_from_file_start)
        wait_file_2 = zerofx.wait_file(shards_from_file_start_1)
        update_kept_start = zerofx.update_kept_start([w], to_host_start, SGD, [0], None)
        wait_move_1 = zerofx.wait_move(to_host_start)
        wait_store = zerofx.wait_store(update_kept_start)
        zerofx.shards_to_file(wait_file_2, [0], True)
        zerofx.states_to_file(wait_file_1, SGD, [0])
        getitem = getitem(wait_store, 0)
        return []
        """,
    )


def test_an_activation_is_in_a_file_between_its_two_moves():
    program = rewritten(mlp_step(2), stage=0, **ACTIVATIONS, **FILES)
    assert_program(
        program,
        """
        ...
        offload_start_2 = zerofx.offload_start(addmm_1, 2)
        wait_move_1 = zerofx.wait_move(offload_start_1)
        value_to_file_1 = zerofx.value_to_file(wait_move_1)
        mean = mean(pow)
        wait_move_2 = zerofx.wait_move(offload_start_2)
        value_to_file_2 = zerofx.value_to_file(wait_move_2)
        value_from_file_start = zerofx.value_from_file_start(value_to_file_2)
        value_from_file_start_1 = zerofx.value_from_file_start(value_to_file_1)
        value_from_file_start_2 = zerofx.value_from_file_start(value_to_file)
        ...
        wait_file = zerofx.wait_file(value_from_file_start)
        reload_start = zerofx.reload_start(wait_file, device(type='cpu'))
        div = div(expand, 15)
        wait_move_3 = zerofx.wait_move(reload_start)
        zerofx.drop_value(wait_file)
        pow_1 = pow(wait_move_3, 1.0)
        ...
        """,
    )


def test_an_evaluation_reads_shards_and_changes_none():
    program = rewritten(evaluation(), stage=3, **PARAMS, **FILES)
    releases = nodes_of(program, ops.shards_to_file)
    assert releases and not any(release.args[2] for release in releases)
    without = rewritten(evaluation(), stage=3, **PARAMS)
    about_files = ("shards_from_file", "wait_file", "shards_to_file")
    rest = [
        line for line in listing(program).splitlines() if not any(a in line for a in about_files)
    ]
    assert rest == listing(without).splitlines()


@pytest.mark.parametrize(
    "offload", (PARAMS, WITH_STATES, ACTIVATIONS, ALL), ids=lambda o: o["offload"]
)
def test_in_host_memory_nothing_is_about_files(offload):
    program = rewritten(mlp_step(), stage=3, **offload)
    about_files = (*ops.FROM_FILE, *ops.TO_FILE, ops.wait_file, ops.drop_value)
    assert not nodes_of(program, *about_files)


def check_numerics(step, world_size, stage, options):
    before = rewritten_by_rank(step, world_size, stage=stage, **options)
    after = rewritten_by_rank(step, world_size, stage=stage, **options, **FILES)
    assert nodes_of(after[0], ops.wait_file)
    assert_same_numerics(execute(before), execute(after))


@pytest.mark.parametrize("world_size", only((2,), (1, 2)))
@of((PARAMS, WITH_STATES, ALL))
@pytest.mark.parametrize("name", STEPS)
def test_computes_bitwise_what_it_did_with_shards_there_when_used(name, offload, world_size):
    check_numerics(STEPS[name](), world_size, 3, offload)


@pytest.mark.parametrize("world_size", only((2,), (1, 2)))
@pytest.mark.parametrize("stage", only((0, 3), (0, 1, 2, 3)))
@pytest.mark.parametrize("name", ("layers", "clipped", "tied"))
def test_computes_bitwise_what_it_did_with_activations_in_files(name, stage, world_size):
    check_numerics(STEPS[name](), world_size, stage, ACTIVATIONS)


@of((PARAMS, ALL))
def test_a_read_starts_when_what_may_have_changed_it_has_been_let_go_of(offload):
    """And in the order of the waits: the cache goes by that."""
    program = rewritten(mlp_step(), stage=3, **offload, **FILES)
    order = program_order(program.graph)
    uses = [use for use in uses_of_files(program.graph) if use.target is ops.wait_file]
    assert len(uses) > 4
    starts = [order[use.args[0]] for use in uses]
    assert starts == sorted(starts)
    let_go: dict[int, int] = {}
    for use in uses:
        (start,) = use.args
        assert order[start] < order[use] < order[released_at(use)]
        if start.target is ops.shards_from_file_start:
            for index in start.args[0]:
                before = let_go.get(index, -1)
                assert before < order[start] or before > order[use]  # or is in use still
                let_go[index] = order[released_at(use)]
    assert let_go


# Planted faults


def first(program, target):
    return nodes_of(program, target)[0]


def read_shards_nobody_uses(program):
    start = first(program, ops.shards_from_file_start)
    for node in (start, first(program, ops.shards_to_file)):
        position = node.args.index([index for index in node.args if isinstance(index, list)][0])
        arguments = list(node.args)
        arguments[position] = [*arguments[position], 5]
        node.args = tuple(arguments)


def let_go_of_other_shards(program):
    release = first(program, ops.shards_to_file)
    release.args = (release.args[0], [release.args[1][0] + 1], release.args[2])


def let_go_of_shards_early(program):
    first(program, ops.wait_file).append(first(program, ops.shards_to_file))


def read_shards_late(program):
    wait = first(program, ops.wait_file)
    first(program, ops.to_device_start).append(wait)


def keep_a_change_from_the_file(program):
    for release in nodes_of(program, ops.shards_to_file):
        if release.args[2]:
            release.args = (*release.args[:2], False)


def let_go_of_shards_twice(program):
    release = first(program, ops.shards_to_file)
    with program.graph.inserting_after(release):
        copy = program.graph.node_copy(release)
    copy.meta = dict(release.meta)


def never_let_go_of_shards(program):
    program.graph.erase_node(first(program, ops.shards_to_file))


def bring_back_what_is_not_there(program):
    reload = first(program, ops.reload_start)
    reload.args = (reload.args[0].args[0].args[0], *reload.args[1:])


def drop_early(program):
    first(program, ops.reload_start).append(first(program, ops.drop_value))


def never_drop(program):
    program.graph.erase_node(first(program, ops.drop_value))


def read_a_value_twice(program):
    start = first(program, ops.value_from_file_start)
    with program.graph.inserting_after(start):
        copy = program.graph.node_copy(start)
    copy.meta = dict(start.meta)


def drop_what_nobody_asked_for(program):
    drop = first(program, ops.drop_value)
    drop.args = (drop.args[0].args[0],)


FAULTS = {
    read_shards_nobody_uses: "has the shard of .* read, and nobody uses it",
    let_go_of_other_shards: "lets go of other shards than .* reads",
    let_go_of_shards_early: "is about the shard of .*, which is in a file then",
    read_shards_late: "is about the shard of .*, which is in a file then",
    keep_a_change_from_the_file: "changes the shard of .*, and no file gets to hold that",
    let_go_of_shards_twice: "shards that are there must have one .*shards_to_file",
    never_let_go_of_shards: "shards that are there must have one .*shards_to_file.* not nobody",
    bring_back_what_is_not_there: "must have one .*value_from_file_start|brought back",
    drop_early: "drops what .* still copies",
    never_drop: "is to be brought back to the device once and dropped",
    read_a_value_twice: "a value in a file must have one .*value_from_file_start",
    drop_what_nobody_asked_for: "must have one .*wait_file|what nobody has asked for",
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
