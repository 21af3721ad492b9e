"""shard_optimizer: each rank updates its shard, and arithmetic on gradients stays right."""

import functools
import math

import pytest
import torch
from torch import nn

from tests.kit.covering import each_pair, only
from tests.kit.programs import (
    Captured,
    assert_program,
    assert_same_numerics,
    capture,
    clone,
    context_of,
    evaluation,
    execute,
    keeping_result,
    listing,
    mlp_step,
    nodes_of,
    rewritten,
    run_passes,
    smallest_step,
)
from zerofx import GraphError
from zerofx.ir import ops
from zerofx.ir.roles import role
from zerofx.passes.manager import run_pipeline
from zerofx.passes.pipeline import PIPELINE

aten = torch.ops.aten


def sharded(captured, world_size=None, **options):
    return rewritten(captured, world_size, until="shard_optimizer", **{"stage": 1, **options})


def scalar_collectives(captured):
    """The all-reduces of partial results."""
    starts = nodes_of(captured, ops.all_reduce_start)
    return [node for node in starts if role(node) == "reduce_scalar"]


def gradient_gathers(captured):
    """All-gathers of what is computed from gradients: those that no update feeds."""
    starts = nodes_of(captured, ops.all_gather_start)
    return [node for node in starts if node.args[0].target is not ops.update]


def reading_step(*reads, shape=(5, 3), world_size=2) -> Captured:
    """Returns ``read(gradient)`` of one parameter of this shape for each of ``reads``."""
    torch.manual_seed(0)
    w = nn.Parameter(torch.randn(shape))
    weights = torch.randn(shape)
    optimizer = torch.optim.SGD([w], lr=0.1)

    def step(x):
        # Every rank's gradient is another, with both signs and no zeros.
        (w * weights * x.sum()).sum().backward()
        results = [read(w.grad) for read in reads]
        optimizer.step()
        optimizer.zero_grad()
        return results

    return capture(step, torch.randn(4), world_size=world_size)


def test_updates_a_shard_and_gathers_the_parameter():
    assert_program(
        sharded(smallest_step()),
        """
        input: other [3, 4]
        w: parameter [4, 2]
        mm = mm(input, w)
        ...
        mm_1 = mm(t, expand)
        view = view(mm_1, [8])
        reduce_scatter_start = zerofx.reduce_scatter_start(view, 'mean', 2)
        wait = zerofx.wait(reduce_scatter_start)
        take_shard = zerofx.take_shard(w, 0, 4)
        update = zerofx.update(take_shard, wait, SGD, 0, None)
        all_gather_start = zerofx.all_gather_start(update, 2)
        wait_1 = zerofx.wait(all_gather_start)
        view_1 = view(wait_1, [4, 2])
        copy_ = copy_(w, view_1)
        zerofx.free(wait_1)
        return []
        """,
    )


def test_pads_the_gradient_and_unpads_the_parameter():
    assert_program(
        sharded(smallest_step(), world_size=3),
        """
        ...
        mm_1 = mm(t, expand)
        view = view(mm_1, [8])
        constant_pad_nd = constant_pad_nd(view, [0, 1], 0.0)
        reduce_scatter_start = zerofx.reduce_scatter_start(constant_pad_nd, 'mean', 3)
        wait = zerofx.wait(reduce_scatter_start)
        take_shard = zerofx.take_shard(w, 0, 3)
        update = zerofx.update(take_shard, wait, SGD, 0, None)
        all_gather_start = zerofx.all_gather_start(update, 3)
        wait_1 = zerofx.wait(all_gather_start)
        slice = slice(wait_1, 0, 0, 8)
        view_1 = view(slice, [4, 2])
        copy_ = copy_(w, view_1)
        zerofx.free(wait_1)
        return []
        """,
    )


def test_leaves_an_evaluation_alone():
    assert listing(sharded(evaluation())) == listing(evaluation())


def test_leaves_a_gradient_that_no_optimizer_uses_whole():
    w = nn.Parameter(torch.randn(4, 2))

    def step(x):
        (x @ w).sum().backward()
        norm = w.grad.norm()
        w.grad = None
        return norm

    captured = capture(step, torch.randn(3, 4), world_size=2)
    program = sharded(captured)
    assert not nodes_of(program, ops.reduce_scatter_start)
    assert listing(program) == listing(rewritten(captured, until="data_parallel", stage=1))


def test_requires_averaged_gradients():
    (alone,) = [step for step in PIPELINE if step.name == "shard_optimizer"]
    program = clone(smallest_step())
    with pytest.raises(GraphError, match="'shard_optimizer' requires averaged_gradients"):
        run_pipeline(program.gm, context_of(program), [alone])
    assert listing(program) == listing(smallest_step())


def test_reduces_each_gradient_once_and_updates_it_once():
    program = sharded(mlp_step())
    names = {info.index for info in program.table}
    for target in (ops.reduce_scatter_start, ops.update):
        found = [node.meta["zerofx"].parameter for node in nodes_of(program, target)]
        assert sorted(found) == sorted(names)
    assert not nodes_of(program, ops.all_reduce_start, ops.optimizer_step)


@pytest.mark.nightly
def test_a_tied_weight_is_updated_once():
    torch.manual_seed(0)
    embedding, head = nn.Embedding(7, 3), nn.Linear(3, 7, bias=False)
    head.weight = embedding.weight
    optimizer = torch.optim.Adam(embedding.parameters(), lr=0.1)

    def step(tokens):
        head(embedding(tokens)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    captured = capture(step, torch.arange(5), world_size=2)
    program = sharded(captured)
    assert len(nodes_of(program, ops.update)) == 1
    assert_same_numerics(execute(captured), execute(program))


@pytest.mark.parametrize("world_size", only((3,), [2, 3, 4]))
def test_a_channels_last_weight_is_flattened_in_storage_order(world_size):
    torch.manual_seed(0)
    model = nn.Conv2d(2, 3, 2, bias=False).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        model(x).pow(2).mean().backward()
        total = model.weight.grad.norm() + (model.weight.grad * model.weight).sum()
        optimizer.step()
        optimizer.zero_grad()
        return total

    captured = clone(capture(step, torch.randn(2, 2, 4, 4)), world_size)
    program = sharded(captured)
    assert len(nodes_of(program, aten.permute.default)) >= 2
    assert_same_numerics(execute(captured), execute(program), bitwise=False)


def test_an_update_is_bitwise_the_whole_one_where_nothing_is_summed_across_shards():
    for world_size in (1, 2, 3, 4):
        captured = clone(mlp_step(), world_size)
        assert_same_numerics(execute(captured), execute(sharded(captured)))


@pytest.mark.parametrize("num_layers", only((4,), [1, 4]))
def test_clipping_by_the_global_norm_costs_one_small_collective(num_layers):
    program = clone(mlp_step(num_layers, clip=True))
    reports = run_passes(program, until="shard_optimizer", stage=1)
    (collective,) = scalar_collectives(program)
    assert collective.args[1] == "sum"
    assert list(collective.meta["val"].shape) == [2 * num_layers]
    assert reports["shard_optimizer"].counts["collectives for norms"] == 1
    assert not gradient_gathers(program)


@pytest.mark.parametrize(
    ("num_layers", "world_size"), each_pair([1, 2], [1, 2, 3, 4], default=[(2, 2), (2, 3)])
)
def test_clipping_by_the_global_norm_is_right_on_shards(world_size, num_layers):
    captured = clone(mlp_step(num_layers, clip=True), world_size)
    assert_same_numerics(execute(captured), execute(sharded(captured)), bitwise=False)


def clipped_by_value():
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x):
        model(x).pow(2).mean().backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()

    return capture(step, torch.randn(4, 5), world_size=4)


def test_clipping_by_value_needs_no_collective():
    captured = clipped_by_value()
    program = sharded(captured)
    assert not nodes_of(program, ops.all_reduce_start)
    assert not gradient_gathers(program)
    assert_same_numerics(execute(captured), execute(program))


def test_norms_that_are_read_apart_are_reduced_apart():
    torch.manual_seed(0)
    a, b = nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(5))
    optimizer = torch.optim.SGD([a, b], lr=0.1)

    def step(x):
        (a * x).sum().mul((b * x).sum()).backward()
        with torch.no_grad():
            a.grad.div_(a.grad.norm())
            b.grad.div_(b.grad.norm() * a.grad.sum())
        optimizer.step()
        optimizer.zero_grad()

    captured = capture(step, torch.randn(5), world_size=4)
    program = sharded(captured)
    assert 2 <= len(scalar_collectives(program)) <= 3
    assert_same_numerics(execute(captured), execute(program), bitwise=False)


REDUCTIONS = {
    "norm 2": (lambda g: g.norm(), "sum"),
    "norm 1": (lambda g: g.norm(1), "sum"),
    "norm 3": (lambda g: g.norm(3), "sum"),
    "norm 0.5": (lambda g: torch.linalg.vector_norm(g, 0.5), "sum"),
    "norm inf": (lambda g: g.norm(math.inf), "max"),
    "norm -inf": (lambda g: g.norm(-math.inf), "min"),
    "norm over all dims": (lambda g: torch.linalg.vector_norm(g, 2, dim=(0, 1)), "sum"),
    "norm kept": (lambda g: torch.linalg.vector_norm(g, 2, keepdim=True), "sum"),
    "foreach norm": (lambda g: torch._foreach_norm([g])[0], "sum"),
    "sum": (lambda g: g.sum(), "sum"),
    "sum over all dims": (lambda g: g.sum(dim=(0, -1)), "sum"),
    "sum kept": (lambda g: g.sum(dim=(0, 1), keepdim=True), "sum"),
    "sum in double": (lambda g: g.sum(dtype=torch.float64), "sum"),
    "mean": (lambda g: g.mean(), "sum"),
    "max": (lambda g: g.max(), "max"),
    "amax": (lambda g: g.amax(), "max"),
    "min": (lambda g: g.min(), "min"),
    "amin": (lambda g: g.amin(dim=(0, 1)), "min"),
    "max of negatives": (lambda g: (-g.abs()).max(), "max"),
    "min of positives": (lambda g: g.abs().min(), "min"),
    "any, false": (lambda g: (g > 1e6).any(), "max"),
    "any, true": (lambda g: (g > 0).any(), "max"),
    "all, true": (lambda g: g.isfinite().all(), "min"),
    "all, false": (lambda g: (g > 0).all(), "min"),
    "any, of numbers below zero": (lambda g: g.clamp(max=0).any(), "max"),
    "all, of numbers below zero": (lambda g: g.clamp(max=0).all(), "min"),
    "count": (lambda g: (g > 0).sum(), "sum"),
    "sum of cubes of a clamp": (lambda g: g.clamp(-1, 1).pow(3).sum(), "sum"),
    "sum of what padding does not keep zero": (lambda g: g.exp().sum(), "sum"),
    "mean of what padding does not keep zero": (lambda g: (g + 1).mean(), "sum"),
    "norm of a reshape": (lambda g: g.view(-1).norm(), "sum"),
}


@functools.cache
def captured_reductions(shape: tuple[int, ...]) -> Captured:
    """One trace for all of them; each test keeps its own."""
    reads = [read for read, _ in REDUCTIONS.values()]
    reads = reads if len(shape) == 2 else [REDUCTIONS[name][0] for name in PADDING_MATTERS]
    return reading_step(*reads, shape=shape, world_size=4)


PADDING_MATTERS = ("norm 2", "norm -inf", "mean", "max", "min", "all, true", "count")


@pytest.mark.parametrize(
    "name", only(("norm 2", "norm inf", "norm -inf", "foreach norm", "sum", "mean"), REDUCTIONS)
)
def test_reduces_shards_locally_and_then_once_over_the_ranks(name):
    """15 elements: on 2 and 4 ranks the last shard has padding."""
    captured = keeping_result(captured_reductions((5, 3)), list(REDUCTIONS).index(name))
    for world_size in (1, 2, 4):
        before = clone(captured, world_size)
        program = sharded(before)
        (collective,) = scalar_collectives(program)
        assert collective.args[1] == REDUCTIONS[name][1]
        assert not gradient_gathers(program)
        assert_same_numerics(execute(before), execute(program), bitwise=False)


@pytest.mark.parametrize("name", PADDING_MATTERS)
@pytest.mark.parametrize("numel", only((2,), [1, 2, 5]))
def test_a_rank_that_owns_only_padding_does_not_count(name, numel):
    captured = keeping_result(captured_reductions((numel,)), PADDING_MATTERS.index(name))
    assert captured.table[0].place.extent > numel
    assert_same_numerics(execute(captured), execute(sharded(captured)), bitwise=False)


def test_many_reductions_before_one_reader_travel_together():
    def read(g):
        return torch.stack([g.norm(), g.sum(), g.mean(), g.norm(1), g.max(), g.amax(), g.min()])

    captured = reading_step(read)
    program = sharded(captured)
    assert sorted(node.args[1] for node in scalar_collectives(program)) == ["max", "min", "sum"]
    assert_same_numerics(execute(captured), execute(program), bitwise=False)


def test_counts_are_summed_exactly():
    """A float32 holds whole numbers up to 16,777,216 only; parameters are larger than that."""
    program = sharded(reading_step(lambda g: (g == 0).sum()))
    (collective,) = scalar_collectives(program)
    assert collective.meta["val"].dtype in (torch.int64, torch.float64)


def test_a_sum_asked_for_in_double_is_one():
    program = sharded(reading_step(lambda g: g.sum(dtype=torch.float64)))
    (collective,) = scalar_collectives(program)
    assert collective.meta["val"].dtype is torch.float64


NOT_ON_SHARDS = {
    "a product with its transpose": lambda g: g.t() @ g,
    "a product": lambda g: g @ torch.ones(3, 2),
    "a transpose": lambda g: g.t().contiguous(),
    "broadcasting a row": lambda g: g * torch.arange(3.0),
    "broadcasting a column": lambda g: g - g.mean(1, keepdim=True),
    "an outer product": lambda g: g.view(-1)[:, None] * torch.arange(2.0),
    "a running sum": lambda g: g.cumsum(0),
    "one row": lambda g: g[0].clone(),
    "one element": lambda g: g[-1, -1].clone(),
    "a slice": lambda g: g[1:3, ::2].clone(),
    "a sort": lambda g: g.sort(0)[0],
    "the largest k": lambda g: g.flatten().topk(3)[0],
    "a quantile": lambda g: g.flatten().median(),
    "norms of rows": lambda g: g.norm(dim=1),
    "sums of columns": lambda g: g.sum(0),
    "a standard deviation": lambda g: g.std(),
    "a position": lambda g: g.argmax(),
    "a softmax": lambda g: g.softmax(1),
    "a roll": lambda g: g.roll(1, 0),
    "a flip": lambda g: g.flip(0),
    "a mask": lambda g: g.tril(),
    "a concatenation": lambda g: torch.cat([g, g]),
    "parts": lambda g: g.chunk(2)[1].clone(),
    "a norm of zeroth order": lambda g: torch.linalg.vector_norm(g, 0),
    "a norm of negative order": lambda g: torch.linalg.vector_norm(g, -1),
    "a product of all": lambda g: g.prod(),
    "the whole": lambda g: g.clone(),
    "a transpose, elementwise": lambda g: g.t() + g.t(),
    "an elementwise result's transpose": lambda g: (g * 2).t().contiguous(),
    "an elementwise result's product": lambda g: (g * 2 + 1) @ torch.ones(3, 2),
    "the norm of a transpose": lambda g: g.t().norm(),
    "the norm of a slice": lambda g: g[1:].norm(),
    "an elementwise result's column sums": lambda g: g.square().sum(0),
}


@functools.cache
def captured_whole_reads() -> Captured:
    return reading_step(*NOT_ON_SHARDS.values())


@pytest.mark.parametrize(
    "name",
    only(
        ("a product with its transpose", "broadcasting a row", "a running sum", "one row"),
        NOT_ON_SHARDS,
    ),
)
def test_what_cannot_run_on_shards_is_computed_from_the_whole(name):
    captured = keeping_result(captured_whole_reads(), list(NOT_ON_SHARDS).index(name))
    for world_size in (2, 4):
        before = clone(captured, world_size)
        program = sharded(before)
        assert len(gradient_gathers(program)) == 1
        assert_same_numerics(execute(before), execute(program), bitwise=False)


def test_a_square_gradients_transpose_is_not_taken_for_a_shard():
    captured = reading_step(lambda g: (g * g.t()).sum() + (g + g.t()).norm(), shape=(3, 3))
    program = sharded(captured)
    assert_same_numerics(execute(captured), execute(program), bitwise=False)


@functools.cache
def uneven_reads():
    def read(g):
        doubled = g * 2
        return doubled.norm(), doubled.cumsum(0), (doubled + g).sum(), g.t().contiguous()

    return reading_step(read, world_size=4)


def test_a_value_is_used_as_a_shard_and_whole_in_one_program():
    captured = uneven_reads()
    program = sharded(captured)
    assert len(scalar_collectives(program)) == 1
    assert_same_numerics(execute(captured), execute(program), bitwise=False)


def test_what_was_gathered_for_one_reader_is_freed_after_it():
    program = sharded(uneven_reads())
    for wait in nodes_of(program, ops.wait):
        if wait.args[0].target is ops.all_gather_start:
            assert len([user for user in wait.users if user.target is ops.free]) == 1


def test_two_gradients_of_one_shape_are_combined_on_shards():
    torch.manual_seed(0)
    a, b = nn.Parameter(torch.randn(5, 3)), nn.Parameter(torch.randn(5, 3))
    optimizer = torch.optim.SGD([a, b], lr=0.1)

    def step(x):
        (x @ a * (x @ b)).mean().backward()
        cosine = (a.grad * b.grad).sum() / (a.grad.norm() * b.grad.norm())
        optimizer.step()
        optimizer.zero_grad()
        return cosine

    captured = capture(step, torch.randn(4, 5), world_size=2)
    program = sharded(captured)
    assert not gradient_gathers(program)
    assert_same_numerics(execute(captured), execute(program), bitwise=False)


def test_gradients_of_different_layouts_are_not_combined_on_shards():
    torch.manual_seed(0)
    a = nn.Parameter(torch.randn(4, 4))
    b = nn.Parameter(torch.randn(4, 4).t())
    optimizer = torch.optim.SGD([a, b], lr=0.1)

    def step(x):
        (x @ a * (x @ b)).mean().backward()
        total = (a.grad * b.grad).sum()
        optimizer.step()
        optimizer.zero_grad()
        return total

    captured = capture(step, torch.randn(4, 4), world_size=2)
    assert_same_numerics(execute(captured), execute(sharded(captured)), bitwise=False)


def test_a_gradient_plus_decay_stays_on_the_shard():
    torch.manual_seed(0)
    w = nn.Parameter(torch.randn(5, 3))
    optimizer = torch.optim.SGD([w], lr=0.1)

    def step(x):
        (x @ w).pow(2).mean().backward()
        with torch.no_grad():
            w.grad.add_(w, alpha=0.1)
        optimizer.step()
        optimizer.zero_grad()

    captured = capture(step, torch.randn(4, 5), world_size=2)
    program = sharded(captured)
    assert not gradient_gathers(program)
    assert len(nodes_of(program, ops.take_shard)) == 2
    assert_same_numerics(execute(captured), execute(program))


@functools.cache
def gradients_times_own_values() -> Captured:
    torch.manual_seed(0)
    w = nn.Parameter(torch.randn(5, 3))
    optimizer = torch.optim.SGD([w], lr=0.1)

    def step(x):
        loss = (x @ w).pow(2).mean()
        loss.backward()
        own = x.mean()
        seen = w.grad * own, (w.grad * own).sum(), w.grad * (x[0] @ w), w.grad * torch.rand(())
        optimizer.step()
        optimizer.zero_grad()
        return seen

    return capture(step, torch.randn(4, 5), world_size=2)


@pytest.mark.parametrize("position", range(4), ids=["scaled", "reduced", "row", "random"])
def test_a_gradient_times_the_ranks_own_values_is_computed_from_the_whole(position):
    """Only reported, so it is allowed: each rank sees its own number, as in plain DDP."""
    captured = keeping_result(gradients_times_own_values(), position)
    assert_same_numerics(execute(captured), execute(sharded(captured)), bitwise=False)


def test_updated_values_read_after_the_step_are_gathered_from_the_updated_shard():
    torch.manual_seed(0)
    w = nn.Parameter(torch.randn(5, 3))
    optimizer = torch.optim.SGD([w], lr=0.1)

    def step(x):
        (x @ w).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return w.norm(), (x @ w).sum()

    captured = capture(step, torch.randn(4, 5), world_size=2)
    program = sharded(captured)
    assert_same_numerics(execute(captured), execute(program), bitwise=False)


def test_a_second_optimizer_continues_from_the_first_ones_result():
    torch.manual_seed(0)
    w = nn.Parameter(torch.randn(5, 3))
    first, second = torch.optim.SGD([w], lr=0.1), torch.optim.Adam([w], lr=0.01)

    def step(x):
        (x @ w).pow(2).mean().backward()
        first.step()
        second.step()
        first.zero_grad()

    captured = capture(step, torch.randn(4, 5), world_size=2)
    program = sharded(captured)
    assert len(nodes_of(program, ops.update)) == 2
    assert_same_numerics(execute(captured), execute(program))


@pytest.mark.parametrize("accumulate", only(("local",), ["local", "sharded"]))
def test_micro_batches_are_reduced_as_often_as_asked(accumulate):
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batches):
        for i in range(3):
            model(batches[i]).pow(2).mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()

    captured = capture(step, torch.randn(3, 4, 5), world_size=2)
    program = sharded(captured, accumulate=accumulate)
    expected = {"local": 2, "sharded": 6}[accumulate]
    assert len(nodes_of(program, ops.reduce_scatter_start)) == expected
    assert len(scalar_collectives(program)) == 1
    assert_same_numerics(execute(captured), execute(program), bitwise=False)


def test_a_narrow_reduction_stays_narrow_when_scattered():
    program = sharded(smallest_step(), reduce_dtype=torch.bfloat16)
    (start,) = nodes_of(program, ops.reduce_scatter_start)
    (update,) = nodes_of(program, ops.update)
    assert start.meta["val"].dtype is torch.bfloat16
    assert update.args[1].meta["val"].dtype is torch.float32
    exact, rounded = execute(sharded(smallest_step())), execute(program)
    torch.testing.assert_close(
        rounded.parameters["w"][0], exact.parameters["w"][0], rtol=1e-2, atol=1e-2
    )


def test_a_flattened_gradient_takes_a_flattened_parameter():
    torch.manual_seed(0)
    w = nn.Parameter(torch.randn(5, 3))
    optimizer = torch.optim.SGD([w], lr=0.1)

    def step(x):
        (x @ w).pow(2).mean().backward()
        flat = w.grad.view(-1)
        flat.add_(w.detach().view(-1), alpha=0.1)
        flat.mul_(torch.ones(3, 5).t().flatten())
        optimizer.step()
        optimizer.zero_grad()

    captured = capture(step, torch.randn(4, 5), world_size=2)
    assert not gradient_gathers(sharded(captured))
    for stage in (1, 3):
        assert_same_numerics(execute(captured), execute(rewritten(captured, stage=stage)))


def channels_last() -> nn.Module:
    return nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)


def transposed() -> nn.Module:
    model = nn.Linear(5, 3)
    model.weight = nn.Parameter(torch.randn(5, 3).t())
    return model


@pytest.mark.nightly
@pytest.mark.parametrize("make", [channels_last, transposed])
def test_a_gradient_is_flattened_in_the_order_of_its_dimensions(make):
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        model(x).pow(2).mean().backward()
        flat = torch.cat([p.grad.flatten() for p in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
        return flat

    captured = capture(step, torch.randn((2, 2, 4, 4) if make is channels_last else (4, 5)))
    for stage in (1, 3):
        program = rewritten(captured, stage=stage)
        assert_same_numerics(execute(captured), execute(program), bitwise=False)
