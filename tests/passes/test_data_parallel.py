"""data_parallel: every gradient becomes a mean over ranks, once, as early as backward has it."""

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
    evaluation,
    execute,
    listing,
    mlp_step,
    nodes_of,
    rewritten,
    run_passes,
    smallest_step,
)
from zerofx import StepError
from zerofx.ir import ops
from zerofx.ir.collectives import changing_numbers, schedule
from zerofx.ir.roles import Provenance


def averaged(captured, **options):
    """The program after data_parallel.  Stage 1 leaves the optimizer's step for later passes."""
    return rewritten(captured, until="data_parallel", **{"stage": 1, **options})


def reductions(captured):
    """Names of the parameters whose gradients are averaged, in order."""
    starts = nodes_of(captured, ops.all_reduce_start)
    return [captured.table[node.meta["zerofx"].parameter].name for node in starts]


@functools.cache
def accumulating_step(num_batches=3):
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batches):
        for i in range(num_batches):
            (model(batches[i]).pow(2).mean() / num_batches).backward()
        optimizer.step()
        optimizer.zero_grad()

    return capture(step, torch.randn(num_batches, 3, 4), world_size=2)


@functools.cache
def gated_step():
    torch.manual_seed(0)
    gate, up, down = (nn.Linear(4, 4, bias=False) for _ in range(3))
    optimizer = torch.optim.SGD([gate.weight, up.weight, down.weight], lr=0.1)

    def step(x):
        down(nn.functional.silu(gate(x)) * up(x)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return capture(step, torch.randn(3, 4), world_size=2)


def test_at_stage_0_nothing_parts_the_gradients_of_a_gated_product():
    """What Inductor computes in one kernel stays in one region, and goes where its input was."""
    program = rewritten(gated_step(), until="data_parallel", stage=0, lowering="inductor")
    targets = [node.target for node in program.graph.nodes]
    products = [i for i, target in enumerate(targets) if target is torch.ops.aten.mul.Tensor]
    assert len(products) == 4  # one of forward, one of the loss, and the gradients of both factors
    first, second, _ = (i for i, target in enumerate(targets) if target is ops.all_reduce_start)
    assert first > products[-1]
    assert second > targets.index(torch.ops.aten.silu_backward.default)
    assert not any(map(ops.is_ours, targets[: products[-1]]))
    assert_same_numerics(execute(gated_step()), execute(program))


def scaled_step(factor, lr=0.1):
    """Multiplies the gradient by ``factor(w, x, loss)`` before the update."""
    torch.manual_seed(0)
    w = nn.Parameter(torch.randn(4, 2))
    optimizer = torch.optim.SGD([w], lr=lr)

    def step(x):
        loss = (x @ w).pow(2).mean()
        loss.backward()
        with torch.no_grad():
            w.grad.mul_(factor(w, x, loss))
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return capture(step, torch.randn(3, 4), world_size=2)


def test_averages_a_gradient_where_backward_hands_it_over():
    assert_program(
        averaged(smallest_step()),
        """
        input: other [3, 4]
        w: parameter [4, 2]
        mm = mm(input, w)
        ...
        mm_1 = mm(t, expand)
        all_reduce_start = zerofx.all_reduce_start(mm_1, 'mean')
        wait = zerofx.wait(all_reduce_start)
        optimizer_step = zerofx.optimizer_step([w], [wait], SGD, None, [0])
        getitem = getitem(optimizer_step, 0)
        copy_ = copy_(w, getitem)
        return []
        """,
    )


def test_updates_the_whole_parameter_in_place_at_stage_0():
    assert_program(
        averaged(smallest_step(), stage=0),
        """
        input: other [3, 4]
        w: parameter [4, 2]
        ...
        all_reduce_start = zerofx.all_reduce_start(mm_1, 'mean')
        wait = zerofx.wait(all_reduce_start)
        update = zerofx.update(w, wait, SGD, 0, None)
        return []
        """,
    )


def test_inserted_nodes_say_what_they_are_for():
    program = averaged(smallest_step())
    (start,) = nodes_of(program, ops.all_reduce_start)
    (wait,) = nodes_of(program, ops.wait)
    expected = Provenance("reduce_gradient", 0, "data_parallel")
    assert start.meta["zerofx"] == wait.meta["zerofx"] == expected


def test_leaves_an_evaluation_alone():
    program = clone(evaluation())
    reports = run_passes(program, until="data_parallel", stage=0)
    assert listing(program) == listing(evaluation())
    assert reports["data_parallel"].counts["averaged"] == 0


def test_leaves_the_forward_and_backward_alone():
    program, before = averaged(mlp_step()), mlp_step()
    count = {name: listing(before).count(f"= {name}(") for name in ("addmm", "mm", "gelu", "sum")}
    assert count == {name: listing(program).count(f"= {name}(") for name in count}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_averages_each_gradient_exactly_once(stage):
    program = averaged(mlp_step(), stage=stage)
    assert sorted(reductions(program)) == sorted(info.name for info in program.table)
    assert not nodes_of(program, ops.gradient)
    assert {node.args[1] for node in nodes_of(program, ops.all_reduce_start)} == {"mean"}


def test_averages_a_tied_weight_once():
    embedding, head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
    head.weight = embedding.weight
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1)

    def step(tokens):
        head(embedding(tokens)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    captured = capture(step, torch.arange(5), world_size=2)
    program = averaged(captured)
    assert reductions(program) == ["embedding.weight"]
    assert_same_numerics(execute(captured), execute(program))


def test_does_not_reduce_for_a_frozen_parameter():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].weight.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)

    def step(x):
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    program = averaged(capture(step, torch.randn(2, 4)))
    assert sorted(reductions(program)) == ["0.bias", "1.bias", "1.weight"]


def test_sums_micro_batches_before_averaging():
    program = clone(accumulating_step())
    reports = run_passes(program, until="data_parallel", stage=1)
    assert sorted(reductions(program)) == ["bias", "weight"]
    assert reports["data_parallel"].counts == {"averaged": 2, "sums averaged once": 4}
    for start in nodes_of(program, ops.all_reduce_start):
        assert start.args[0].target is torch.ops.aten.add.Tensor
    assert_same_numerics(execute(accumulating_step()), execute(program), bitwise=False)


def test_accumulate_sharded_averages_each_micro_batch():
    program = averaged(accumulating_step(), accumulate="sharded")
    assert sorted(reductions(program)) == ["bias"] * 3 + ["weight"] * 3
    assert_same_numerics(execute(accumulating_step()), execute(program))


@pytest.mark.parametrize("accumulate", [None, "local", "sharded"])
def test_a_gradient_read_between_micro_batches_is_an_average_too(accumulate):
    torch.manual_seed(0)
    w = nn.Parameter(torch.randn(4, 2))
    optimizer = torch.optim.SGD([w], lr=0.1)

    def step(x, y):
        (x @ w).pow(2).mean().backward()
        seen = w.grad.norm()
        (y @ w).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return seen

    captured = capture(step, torch.randn(3, 4), torch.randn(3, 4), world_size=2)
    program = averaged(captured, accumulate=accumulate)
    assert_same_numerics(execute(captured), execute(program), bitwise=False)


def test_sums_of_two_parameters_gradients_are_not_one_gradient():
    torch.manual_seed(0)
    a, b = nn.Parameter(torch.randn(4, 2)), nn.Parameter(torch.randn(4, 2))
    optimizer = torch.optim.SGD([a, b], lr=0.1)

    def step(x):
        (x @ a * (x @ b)).mean().backward()
        total = (a.grad + b.grad).sum()
        optimizer.step()
        optimizer.zero_grad()
        return total

    captured = capture(step, torch.randn(3, 4), world_size=2)
    program = averaged(captured)
    assert sorted(reductions(program)) == ["a", "b"]
    assert_same_numerics(execute(captured), execute(program))


@pytest.mark.parametrize("accumulate", ["local", "sharded"])
def test_at_most_one_reduction_holds_its_input(accumulate):
    for captured in (mlp_step(), accumulating_step()):
        waited_for = 0
        for node in averaged(captured, accumulate=accumulate).graph.nodes:
            waited_for += node.target is ops.all_reduce_start
            assert waited_for <= 1
            waited_for -= node.target is ops.wait


def test_a_reduction_starts_right_after_its_gradient_and_overlaps_the_rest_of_backward():
    program = averaged(mlp_step())
    starts = nodes_of(program, ops.all_reduce_start)
    for start in starts:
        before = start.prev
        while before.target is ops.wait:  # the wait for the reduction before this one
            before = before.prev
        assert before is start.args[0]
    positions = {node: position for position, node in enumerate(program.graph.nodes)}
    for start in starts[:-1]:
        (wait,) = start.users
        assert positions[wait] > positions[start] + 1, f"{start.name} overlaps nothing"


def test_reduces_in_another_dtype_and_casts_back():
    program = averaged(smallest_step(), reduce_dtype=torch.bfloat16)
    assert_program(
        program,
        """
        ...
        mm_1 = mm(t, expand)
        _to_copy = _to_copy(mm_1, dtype=torch.bfloat16)
        all_reduce_start = zerofx.all_reduce_start(_to_copy, 'mean')
        wait = zerofx.wait(all_reduce_start)
        _to_copy_1 = _to_copy(wait, dtype=torch.float32)
        ...
        """,
    )
    exact, rounded = execute(averaged(smallest_step())), execute(program)
    torch.testing.assert_close(
        rounded.parameters["w"][0], exact.parameters["w"][0], rtol=1e-2, atol=1e-2
    )
    assert not torch.equal(rounded.parameters["w"][0], exact.parameters["w"][0])


def test_a_reduce_dtype_that_is_the_gradients_own_adds_no_cast():
    same = averaged(smallest_step(), reduce_dtype=torch.float32)
    assert listing(same) == listing(averaged(smallest_step()))


@pytest.mark.parametrize(
    ("clip", "world_size"), each_pair([False, True], [1, 2, 3], default=[(False, 2), (True, 3)])
)
def test_computes_what_averaged_gradients_mean(world_size, clip):
    captured = clone(mlp_step(clip=clip), world_size)
    for stage in (0, 1):
        assert_same_numerics(execute(captured), execute(averaged(captured, stage=stage)))


def test_two_updates_of_one_parameter_are_both_in_place_at_stage_0():
    torch.manual_seed(0)
    w = nn.Parameter(torch.randn(4, 2))
    first, second = torch.optim.SGD([w], lr=0.1), torch.optim.Adam([w], lr=0.01)

    def step(x):
        (x @ w).pow(2).mean().backward()
        first.step()
        second.step()
        first.zero_grad()
        return w.sum()

    captured = capture(step, torch.randn(3, 4), world_size=2)
    program = averaged(captured, stage=0)
    assert len(nodes_of(program, ops.update)) == 2
    assert not nodes_of(program, torch.ops.aten.copy_.default)
    assert_same_numerics(execute(captured), execute(program))


VARYING = {
    "the loss": lambda w, x, loss: loss.detach(),
    "the batch": lambda w, x, loss: x.mean(),
    "a random draw": lambda w, x, loss: torch.rand_like(w),
    "an activation": lambda w, x, loss: (x @ w).mean(0),
}


@pytest.mark.parametrize("factor", VARYING.values(), ids=VARYING)
@pytest.mark.parametrize("stage", only((3,), [0, 3]))
def test_refuses_an_update_computed_from_the_ranks_own_values(factor, stage):
    with pytest.raises(
        StepError, match="the gradient of 'w' is computed from values that differ"
    ) as e:
        averaged(scaled_step(factor), stage=stage)
    assert "w.grad.mul_(factor(w, x, loss))" in str(e.value), "it does not show the user's line"
    assert "in pass 'data_parallel' of zerofx" in e.value.__notes__


UNIFORM = {
    "a number": lambda w, x, loss: 0.5,
    "the parameter": lambda w, x, loss: w.detach(),
    "the gradient": lambda w, x, loss: w.grad,
    "the gradient's norm": lambda w, x, loss: w.grad.norm(),
    "a constant tensor": lambda w, x, loss: torch.arange(2.0),
}


@pytest.mark.parametrize("factor", UNIFORM.values(), ids=UNIFORM)
def test_allows_an_update_computed_from_what_all_ranks_share(factor):
    captured = scaled_step(factor)
    assert_same_numerics(execute(captured), execute(averaged(captured)))


def test_refuses_a_write_to_a_parameter_from_the_ranks_own_values():
    w = nn.Parameter(torch.randn(4, 2))

    def step(x):
        with torch.no_grad():
            w.copy_(x)

    with pytest.raises(StepError, match="'w' is computed from values that differ between ranks"):
        averaged(capture(step, torch.randn(4, 2)))


def test_refuses_a_gradient_that_a_step_leaves_divided_by_its_batch():
    model = nn.Linear(4, 3)

    def backward(x, mask):
        model(x).square().mean().backward()
        for p in model.parameters():
            p.grad = p.grad / mask.sum()

    captured = capture(backward, torch.randn(2, 4), torch.ones(2), world_size=2)
    for accumulate in (None, "local"):
        with pytest.raises(
            StepError, match="(?s)the gradient of '.*' is computed from .* p.grad / mask"
        ):
            averaged(captured, accumulate=accumulate)


def averaging_step(of, in_place):
    """Divides gradients by a 0-dim tensor, which the step itself moves towards ``of(loss)``."""
    model = nn.Linear(4, 1)
    model.scale = torch.tensor(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p.grad.div_(model.scale)
        optimizer.step()
        optimizer.zero_grad()
        if in_place:
            model.scale.lerp_(of(loss.detach()), 0.1)
        else:
            model.scale = 0.9 * model.scale + 0.1 * of(loss.detach())

    return capture(step, torch.randn(3, 4), world_size=2)


@pytest.mark.parametrize("in_place", only((True,), [True, False]))
def test_refuses_an_update_scaled_by_what_the_step_itself_makes_of_its_batch(in_place):
    """A 0-dim tensor is the same on all ranks only until they leave there what differs."""
    with pytest.raises(StepError, match="is computed from values that differ between ranks"):
        averaged(averaging_step(lambda loss: loss, in_place))
    averaged(averaging_step(lambda loss: torch.tensor(0.5), in_place))


SCALE = torch.tensor(1.0)


def test_refuses_an_update_scaled_by_a_global_that_the_step_assigns():
    w = nn.Parameter(torch.randn(4, 2))
    optimizer = torch.optim.SGD([w], lr=0.1)

    def step(x):
        global SCALE
        loss = (x @ w).square().mean()
        loss.backward()
        w.grad.div_(SCALE)
        optimizer.step()
        SCALE = SCALE.lerp(loss.detach(), 0.1)

    with pytest.raises(StepError, match="is computed from values that differ between ranks"):
        averaged(capture(step, torch.randn(3, 4), world_size=2))


def test_refuses_an_update_computed_from_a_buffer():
    model = nn.BatchNorm1d(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        model(x).sum().backward()
        with torch.no_grad():
            model.weight.grad.add_(model.running_mean)
        optimizer.step()
        optimizer.zero_grad()

    with pytest.raises(StepError, match="the gradient of 'weight' is computed from values"):
        averaged(capture(step, torch.randn(3, 4)))


def test_a_mask_of_gradients_is_a_frozen_parameter():
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    model.register_buffer("mask", (torch.rand(2, 4) > 0.5).float())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        model(x).pow(2).mean().backward()
        model.weight.grad.mul_(model.mask)
        optimizer.step()
        optimizer.zero_grad()

    with pytest.raises(StepError, match=r"mask.* nn.Parameter\(mask, requires_grad=False\)"):
        averaged(capture(step, torch.randn(3, 4), world_size=2))
    mask = model.mask
    del model.mask
    model.mask = nn.Parameter(mask, requires_grad=False)  # as it says
    captured = capture(step, torch.randn(3, 4), world_size=2)
    for stage in (0, 3):
        assert_same_numerics(execute(captured), execute(rewritten(captured, stage=stage)))


def test_a_gradient_scalers_found_inf_is_the_same_on_every_rank():
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    def step(x):
        scaler.scale(model(x).pow(2).mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    captured = capture(step, torch.randn(3, 4), world_size=2)
    assert_same_numerics(execute(captured), execute(averaged(captured, stage=0)))


def trains_by_hand(x, weight):
    (x @ weight).square().mean().backward()
    with torch.no_grad():
        weight -= 0.1 * weight.grad
        weight.grad = None


def test_a_plain_tensor_that_is_trained_by_hand_is_refused_where_there_are_other_ranks():
    weight = torch.randn(4, 3, requires_grad=True)

    def step(x):
        trains_by_hand(x, weight)

    average = weight.detach().clone().requires_grad_()

    def averages(x):
        (x @ weight).square().mean().backward()
        with torch.no_grad():
            average.lerp_(weight, 0.1)

    capture(averages, torch.randn(2, 4), world_size=2)
    with pytest.raises(StepError, match="trains 'weight', which is not an nn.Parameter.*Wrap"):
        capture(step, torch.randn(2, 4), world_size=2)
    capture(step, torch.randn(2, 4), world_size=1)


def test_what_a_step_is_called_with_may_be_trained_by_each_rank():
    capture(trains_by_hand, torch.randn(2, 4), torch.randn(4, 3, requires_grad=True), world_size=2)


@pytest.mark.parametrize("options", [{}, {"stage": 1}, {"lowering": "inductor"}], ids=str)
def test_ranks_compare_the_numbers_that_lead_to_updates(options):
    program = rewritten(with_numbers(), **{"stage": 3, **options})
    text = "\n".join(schedule(program.gm, program.table, 3))
    for number in ("0.125", "0.375", "0.875"):
        assert f"of averaged gradients and {number}" in text
    assert "0.625" not in text


@functools.cache
def with_numbers():
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        model(x).square().mean().backward()
        with torch.no_grad():
            for p in model.parameters():
                p.grad.add_(p, alpha=0.125)
                p.grad.lerp_(p, 0.375)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.875)
        optimizer.step()
        optimizer.zero_grad()
        return norm * 0.625

    return capture(step, torch.randn(2, 4), world_size=2)


def test_ranks_compare_a_number_that_changes_from_call_to_call_as_it_is_then():
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x, number):
        model(x).square().mean().backward()
        with torch.no_grad():
            for p in model.parameters():
                p.grad.div_(number)
        optimizer.step()
        optimizer.zero_grad()

    with torch._dynamo.config.patch(assume_static_by_default=False):
        captured = capture(step, torch.randn(2, 4), 57, world_size=2)
    program = rewritten(captured, stage=3)
    assert any("gradients and 57" in line for line in changing_numbers(program.gm.graph))
    assert not any("and 57" in line for line in schedule(program.gm, program.table, 3))
