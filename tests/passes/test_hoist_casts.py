"""hoist_casts: under autocast the narrow dtype travels, cast once from the master shard."""

import functools

import pytest
import torch
from torch import nn

from tests.kit.covering import only
from tests.kit.programs import (
    assert_program,
    assert_same_numerics,
    capture,
    clone,
    context_of,
    evaluation,
    execute,
    gathers_of,
    listing,
    mlp_step,
    nodes_of,
    rewritten,
    run_passes,
    smallest_step,
)
from zerofx import GraphError
from zerofx.ir import ops
from zerofx.ir.roles import provenance, role
from zerofx.passes.manager import run_pipeline
from zerofx.passes.pipeline import PIPELINE

aten = torch.ops.aten


def hoisted(captured, **options):
    return rewritten(captured, until="hoist_casts", **options)


def casts_of(captured):
    """Casts that read a parameter."""
    return [
        node
        for node in nodes_of(captured, aten._to_copy.default)
        if node.args[0].op == "placeholder"
        and node.args[0].meta["zerofx_input"].kind == "parameter"
    ]


@functools.cache
def autocast_step(num_layers=2):
    torch.manual_seed(0)
    layers = [[nn.Linear(5, 5), nn.ReLU()] for _ in range(num_layers)]
    model = nn.Sequential(*sum(layers, []))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).float().pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return capture(step, torch.randn(3, 5), world_size=2)


def casting_step(cast_and_multiply):
    """``cast_and_multiply(x, w)`` makes the loss."""
    torch.manual_seed(0)
    w = nn.Parameter(torch.randn(5, 3))
    optimizer = torch.optim.SGD([w], lr=0.1)

    def step(x):
        cast_and_multiply(x, w).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return capture(step, torch.randn(4, 5), world_size=2)


def test_marks_a_cast_to_be_gathered_through():
    captured = casting_step(lambda x, w: x.bfloat16() @ w.bfloat16())
    program = hoisted(captured)
    assert listing(program) == listing(rewritten(captured, until="data_parallel"))
    (cast,) = casts_of(program)
    assert provenance(cast).role == "hoisted_cast"
    assert provenance(cast).parameter == 0
    assert provenance(cast).inserted_by == "hoist_casts"


def test_merges_casts_to_one_dtype():
    captured = casting_step(lambda x, w: x.bfloat16() @ w.bfloat16() + (w.bfloat16() * 2).sum(0))
    program = clone(captured)
    reports = run_passes(program, until="hoist_casts")
    assert len(casts_of(captured)) == 2
    assert len(casts_of(program)) == 1
    assert reports["hoist_casts"].counts == {"hoisted": 1, "merged": 1}
    assert_same_numerics(execute(captured), execute(program))


def test_keeps_casts_to_two_dtypes_apart():
    captured = casting_step(
        lambda x, w: (x.bfloat16() @ w.bfloat16()).float() + (x.half() @ w.half()).float()
    )
    program = clone(captured)
    reports = run_passes(program, until="hoist_casts")
    assert reports["hoist_casts"].counts == {"hoisted": 2, "merged": 0}
    assert_same_numerics(execute(captured), execute(rewritten(captured)))


def test_a_wider_cast_stays_behind_the_gather():
    captured = casting_step(lambda x, w: x.double() @ w.double())
    assert not [node for node in casts_of(hoisted(captured)) if role(node) == "hoisted_cast"]
    program = rewritten(captured)
    assert {n.meta["val"].dtype for n in nodes_of(program, ops.all_gather_start)} == {torch.float32}
    assert_same_numerics(execute(captured), execute(program))


def test_a_cast_that_changes_the_layout_is_not_hoisted():
    captured = casting_step(
        lambda x, w: (
            x.bfloat16() @ w[None, None].to(torch.bfloat16, memory_format=torch.channels_last)[0, 0]
        )
    )
    program = rewritten(captured)
    assert_same_numerics(execute(captured), execute(program))


def test_leaves_a_step_without_casts_alone():
    for captured in (smallest_step(), mlp_step(), evaluation()):
        assert listing(hoisted(captured)) == listing(rewritten(captured, until="data_parallel"))


def test_does_nothing_below_stage_3_where_parameters_stay_whole():
    program = clone(autocast_step())
    reports = run_passes(program, stage=2)
    assert "needs 3" in reports["hoist_casts"].skipped
    gathered = {node.meta["val"].dtype for node in nodes_of(program, ops.all_gather_start)}
    assert gathered == {torch.float32}


def test_requires_averaged_gradients():
    program = clone(smallest_step())
    (alone,) = [step for step in PIPELINE if step.name == "hoist_casts"]
    with pytest.raises(GraphError, match="'hoist_casts' requires averaged_gradients"):
        run_pipeline(program.gm, context_of(program), [alone])


def test_the_narrow_dtype_is_gathered_and_the_master_shard_updated():
    program = rewritten(autocast_step())
    for start in nodes_of(program, ops.all_gather_start):
        assert start.meta["val"].dtype is torch.bfloat16
        assert start.args[0].target is aten._to_copy.default
        assert start.args[0].args[0].op == "placeholder"
    for update in nodes_of(program, ops.update):
        assert update.args[0].op == "placeholder"
        assert update.meta["val"].dtype is torch.float32


def test_casts_the_shard_and_gathers_it():
    captured = casting_step(lambda x, w: x.bfloat16() @ w.bfloat16())
    assert_program(
        rewritten(captured),
        """
        input: other [4, 5]
        w: shard of parameter [8]
        _to_copy = _to_copy(input, dtype=torch.bfloat16)
        _to_copy_1 = _to_copy(w, dtype=torch.bfloat16)
        all_gather_start = zerofx.all_gather_start(_to_copy_1, 2)
        wait = zerofx.wait(all_gather_start)
        slice = slice(wait, 0, 0, 15)
        view = view(slice, [5, 3])
        mm = mm(_to_copy, view)
        zerofx.free(wait)
        ...
        update = zerofx.update(w, wait_1, SGD, 0, None)
        return []
        """,
    )


def test_turned_off_the_parameters_own_dtype_is_gathered():
    program = rewritten(autocast_step(), hoist_casts=False)
    gathered = {node.meta["val"].dtype for node in nodes_of(program, ops.all_gather_start)}
    assert gathered == {torch.float32}
    assert_same_numerics(execute(autocast_step()), execute(program))


def test_halves_the_gathered_bytes():
    def gathered_bytes(program):
        starts = nodes_of(program, ops.all_gather_start)
        return sum(node.meta["val"].numel() * node.meta["val"].element_size() for node in starts)

    wide = gathered_bytes(rewritten(autocast_step(), hoist_casts=False))
    assert 2 * gathered_bytes(rewritten(autocast_step())) == wide


@pytest.mark.parametrize("world_size", only((2,), [1, 2, 3]))
def test_is_bitwise_the_program_before_it(world_size):
    captured = clone(autocast_step(3), world_size)
    before = execute(rewritten(captured, until="data_parallel"))
    assert_same_numerics(before, execute(hoisted(captured)))
    assert_same_numerics(before, execute(rewritten(captured)))


def test_a_parameter_read_in_two_dtypes_is_gathered_in_each():
    captured = casting_step(lambda x, w: (x.bfloat16() @ w.bfloat16()).float() + x @ w)
    program = rewritten(captured)
    dtypes = [node.meta["val"].dtype for node in gathers_of(program, "w")]
    assert sorted(map(str, dtypes)) == ["torch.bfloat16", "torch.float32"]
    assert_same_numerics(execute(captured), execute(program))


def test_a_tied_weight_is_cast_and_gathered_narrow_at_both_ends():
    torch.manual_seed(0)
    embedding, middle = nn.Embedding(7, 4), nn.Linear(4, 4)
    optimizer = torch.optim.SGD([*embedding.parameters(), *middle.parameters()], lr=0.1)

    def step(tokens):
        with torch.autocast("cpu", torch.bfloat16):
            hidden = middle(embedding(tokens))
            loss = nn.functional.linear(hidden, embedding.weight).float().pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    captured = capture(step, torch.arange(6), world_size=2)
    program = rewritten(captured)
    # The embedding itself is looked up in float32: only the head's product is autocast.
    dtypes = {node.meta["val"].dtype for node in gathers_of(program, "embedding.weight")}
    assert torch.bfloat16 in dtypes
    assert_same_numerics(execute(captured), execute(program))
