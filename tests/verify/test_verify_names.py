"""Numbers in operators: a parameter or a part that there is not, or that the node is not for."""

import pytest

from tests.kit.offloaded_programs import refused
from tests.kit.programs import mlp_step, nodes_of, rewritten
from zerofx.ir import ops


@pytest.fixture
def program():
    return rewritten(mlp_step(clip=True), stage=3, offload="params,optimizer", bucket=True)


def test_a_part_that_a_list_has_not_is_refused(program):
    store = nodes_of(program, ops.wait_shards)[0]
    part = next(iter(store.users))
    part.update_arg(1, 99)
    refused(program, rf"{part.name}.* takes part 99 of {store.name}, which has \d")


def test_a_parameter_that_there_is_not_is_refused(program):
    mask = nodes_of(program, ops.mask_padding)[0]
    mask.update_arg(1, 6)
    refused(program, "names parameter 6 of 6")


def test_another_parameter_of_the_same_shape_is_refused(program):
    first, second = nodes_of(program, ops.mask_padding)[0:3:2]
    assert first.args[0].meta["val"].shape == second.args[0].meta["val"].shape
    first.update_arg(1, second.args[1])
    refused(program, "for the shard of '2.weight', which it is not")


def test_a_shard_that_is_cut_for_another_parameter_is_refused():
    program = rewritten(mlp_step(), stage=1)
    cut = nodes_of(program, ops.take_shard)[0]
    cut.update_arg(1, cut.args[1] + 2)
    refused(program, "for all of .*, which it is not")
