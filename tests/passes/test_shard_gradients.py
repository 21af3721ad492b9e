"""shard_gradients: each gradient is scattered as soon as backward has it, and stays a shard."""

import functools

import pytest
import torch
from torch import nn

from tests.kit.covering import each_pair, only
from tests.kit.programs import (
    assert_program,
    assert_same_numerics,
    capture,
    clone,
    context_of,
    evaluation,
    execute,
    listing,
    mlp_step,
    nodes_of,
    rewritten,
    run_passes,
    smallest_step,
)
from zerofx import GraphError
from zerofx.ir import ops
from zerofx.ir.interface import input_role, placeholders, recorded
from zerofx.passes.manager import run_pipeline
from zerofx.passes.pipeline import PIPELINE


def sharded(captured, world_size=None, **options):
    return rewritten(captured, world_size, until="shard_gradients", **{"stage": 2, **options})


def producer_of(start):
    """The node that computes the gradient, in front of what flattens and pads it."""
    node = start.args[0]
    while node.meta.get("zerofx") and node.meta["zerofx"].role in ("flatten", "reduce_cast"):
        node = node.args[0]
    return node


@functools.cache
def leaves_gradients():
    """Backward only: the gradients go out as ``p.grad``."""
    torch.manual_seed(0)
    model = nn.Linear(5, 3)

    def accumulate(x):
        loss = model(x).pow(2).mean()
        loss.backward()
        return loss

    return capture(accumulate, torch.randn(4, 5), world_size=2)


def test_scatters_a_gradient_right_after_it_is_computed():
    assert_program(
        sharded(mlp_step(num_layers=2)),
        """
        ...
        mm_1 = mm(t_3, gelu)
        t_4 = t(mm_1)
        sum = sum(mul_1, [0], True)
        view = view(sum, [5])
        view_1 = view(view, [5])
        constant_pad_nd = constant_pad_nd(view_1, [0, 1], 0.0)
        reduce_scatter_start = zerofx.reduce_scatter_start(constant_pad_nd, 'mean', 2)
        t_5 = t(t_4)
        view_2 = view(t_5, [25])
        constant_pad_nd_1 = constant_pad_nd(view_2, [0, 1], 0.0)
        wait = zerofx.wait(reduce_scatter_start)
        reduce_scatter_start_1 = zerofx.reduce_scatter_start(constant_pad_nd_1, 'mean', 2)
        gelu_backward = gelu_backward(mm, addmm)
        ...
        wait_1 = zerofx.wait(reduce_scatter_start_1)
        ...
        """,
    )


@pytest.mark.parametrize("accumulate", only(("sharded",), ["local", "sharded"]))
def test_every_reduction_directly_follows_its_gradients_producer(accumulate):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batches):
        for i in range(2):
            model(batches[i]).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    captured = capture(step, torch.randn(2, 4, 5), world_size=2)
    program = sharded(captured, accumulate=accumulate)
    starts = nodes_of(program, ops.reduce_scatter_start)
    assert len(starts) == {"local": 4, "sharded": 8}[accumulate]
    for start in starts:
        node = start
        while node is not producer_of(start):
            node = node.prev
            belongs = node.meta.get("zerofx") and node.meta["zerofx"].role in (
                "flatten",
                "reduce_gradient",
            )
            assert belongs or node is producer_of(start), f"{node} delays {start}"
    assert_same_numerics(execute(captured), execute(program), bitwise=False)


def test_at_most_one_reduction_holds_its_input():
    """A whole local gradient is let go before the next one is given away."""
    for captured in (mlp_step(), mlp_step(clip=True), leaves_gradients()):
        waited_for = 0
        for node in sharded(captured).graph.nodes:
            waited_for += node.target is ops.reduce_scatter_start
            assert waited_for <= 1
            waited_for -= node.target is ops.wait and (
                node.args[0].target is ops.reduce_scatter_start
            )


def test_every_reduction_but_the_last_overlaps_with_backward():
    program = sharded(mlp_step())
    order = {node: position for position, node in enumerate(program.graph.nodes)}
    starts = nodes_of(program, ops.reduce_scatter_start)
    assert len(starts) == 6
    for start in starts[:-1]:
        (wait,) = start.users
        assert order[wait] > order[start] + 1


def test_leaves_an_evaluation_alone():
    assert listing(sharded(evaluation())) == listing(evaluation())


def test_requires_sharded_updates():
    program = clone(smallest_step())
    passes = [step for step in PIPELINE if step.name in ("data_parallel", "shard_gradients")]
    with pytest.raises(GraphError, match="'shard_gradients' requires sharded_updates"):
        run_pipeline(program.gm, context_of(program, stage=2), passes)


def test_only_where_reductions_stand_differs_from_stage_1():
    one = rewritten(mlp_step(clip=True), until="shard_optimizer", stage=1)
    two = sharded(mlp_step(clip=True))

    def operators(program):
        return sorted(str(node.target) for node in program.graph.nodes)

    assert operators(one) == operators(two)
    assert listing(one) != listing(two)


@pytest.mark.parametrize(
    ("clip", "world_size"), each_pair([False, True], [1, 2, 3], default=[(False, 2), (True, 3)])
)
def test_computes_bitwise_what_stage_1_computes(world_size, clip):
    captured = clone(mlp_step(clip=clip), world_size)
    one = rewritten(captured, until="shard_optimizer", stage=1)
    assert_same_numerics(execute(one), execute(sharded(captured)))


def test_a_gradient_that_leaves_the_program_leaves_as_a_shard():
    captured = leaves_gradients()
    program = sharded(captured)
    slots = recorded(program.graph).gradients
    assert sorted(slots.values()) == [0, 1]
    results = program.graph.output_node().args[0]
    for position, index in slots.items():
        assert results[position].target is ops.wait
        assert list(results[position].meta["val"].shape) == [program.table[index].shard_numel]
    assert not nodes_of(program, ops.all_gather_start)
    assert_same_numerics(execute(captured), execute(program))


def test_a_gradient_that_leaves_the_program_leaves_whole_at_stage_1():
    program = rewritten(leaves_gradients(), stage=1)
    results = program.graph.output_node().args[0]
    for position, index in recorded(program.graph).gradients.items():
        assert tuple(results[position].meta["val"].shape) == program.table[index].shape


def test_a_gradient_is_returned_whole_though_it_is_kept_as_a_shard():
    """``return p.grad`` is a result like any other; ``p.grad`` itself stays a shard."""
    torch.manual_seed(0)
    w = nn.Parameter(torch.randn(5, 3))

    def step(x):
        (x @ w).pow(2).mean().backward()
        return w.grad * 2, w.grad.norm()

    captured = capture(step, torch.randn(4, 5), world_size=2)
    program = sharded(captured)
    assert len(nodes_of(program, ops.all_gather_start)) == 1
    assert_same_numerics(execute(captured), execute(program), bitwise=False)


def test_a_zeroed_gradient_leaves_the_program():
    """``zero_grad(set_to_none=False)``."""
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        model(x).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    captured = capture(step, torch.randn(4, 5), world_size=2)
    program = sharded(captured)
    assert len(recorded(program.graph).gradients) == 2
    assert not nodes_of(program, ops.all_gather_start) or all(
        node.args[0].target is ops.update for node in nodes_of(program, ops.all_gather_start)
    )
    assert_same_numerics(execute(captured), execute(program))


def accumulated_before(step_of, num_gradients=2):
    """A step that starts with gradients of an earlier call in ``p.grad``."""
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    captured = capture(step_of(model, optimizer), torch.randn(4, 5), world_size=2)
    assert len(placeholders(captured.graph, "gradient")) == num_gradients
    return captured


def update_only(model, optimizer):
    def step(x):
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        return model.weight.detach().sum()

    return step


def accumulate_more(model, optimizer):
    def step(x):
        loss = model(x).pow(2).mean()
        loss.backward()
        return loss

    return step


def accumulate_and_update(model, optimizer):
    def step(x):
        model(x).pow(2).mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()

    return step


@pytest.mark.parametrize(
    ("step_of", "stage"),
    each_pair(
        [update_only, accumulate_more, accumulate_and_update],
        [0, 1, 2, 3],
        default=[(accumulate_and_update, 2), (update_only, 3)],
    ),
)
def test_gradients_of_an_earlier_call_come_in(step_of, stage):
    captured = accumulated_before(step_of)
    program = rewritten(captured, stage=stage)
    sharded_inputs = [input_role(n).sharded for n in placeholders(program.graph, "gradient")]
    assert sharded_inputs == [stage >= 2] * 2
    assert_same_numerics(execute(captured), execute(program), bitwise=False)


def test_a_gradient_input_is_not_reduced_again():
    program = sharded(accumulated_before(update_only))
    assert not nodes_of(program, ops.reduce_scatter_start)
    for update in nodes_of(program, ops.update):
        assert update.args[1].meta["val"].dim() == 1


def test_counts_what_it_did():
    program = clone(mlp_step())
    reports = run_passes(program, stage=2)
    assert reports["shard_gradients"].counts["reduce-scatters"] == 6
