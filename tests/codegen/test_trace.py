"""Tracing one update: what becomes an input, what is guarded, what is refused."""

import collections
import importlib.util
import math
import pathlib
import re
import types
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from zerofx import codegen, compat
from zerofx.codegen.rewrite.elementwise import UpdateError
from zerofx.codegen.trace.arguments import group_values, read_arguments
from zerofx.codegen.trace.trace import trace_update
from zerofx.ir.parameters import ParameterInfo
from zerofx.runtime.optimizer.setup import UpdateSettings
from zerofx.runtime.optimizer.update import OptimizerRunner


def applied(update, parameter, gradient, tensors, scalars):
    """Run an update; return the state and the group's entries that it gives."""
    return update.filled(update.ready(parameter, gradient, *tensors, *scalars)())


def optimizer_class(update, **defaults):
    """An optimizer whose step is ``update(self, group, p, state)`` for each parameter."""

    class Custom(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": 0.1, **defaults})

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    update(self, group, p, self.state[p])

    return Custom


def layout(p):
    fields = dict(shape=tuple(p.shape), stride=p.stride(), dtype=p.dtype, device=p.device)
    return ParameterInfo(index=0, name="w", requires_grad=True, world_size=1, **fields)


def trace(optimizer, *, sharded=True, state=None):
    (p,) = optimizer.param_groups[0]["params"]
    state = dict(optimizer.state.get(p, {})) if state is None else state
    shard_shape = (p.numel(),) if sharded else None
    return trace_update(
        optimizer,
        layout(p),
        group=read_arguments(
            group_values(optimizer.param_groups[0]), shard_shape=None, inputs=set()
        ),
        state=read_arguments(state, shard_shape=shard_shape, inputs=state),
        sharded=sharded,
    )


def trace_custom(update, *, shape=(4, 3), sharded=True, state=None, dtype=torch.float32):
    p = nn.Parameter(torch.ones(shape, dtype=dtype))
    return trace(optimizer_class(update)([p]), sharded=sharded, state=state)


def targets(update):
    return [str(n.target) for n in update.graph_module.graph.nodes if n.op == "call_function"]


def line_of(text):
    lines = pathlib.Path(__file__).read_text().splitlines()
    (number,) = [i for i, line in enumerate(lines, 1) if line.endswith(f"# {text}")]
    return f"{__file__}:{number}"


def run_steps(update, *, steps, sharded=True, shape=(4, 3), **defaults):
    """Run an optimizer's update on one rank; return the runner, the eager optimizer and its own."""
    p, own = nn.Parameter(torch.ones(shape)), nn.Parameter(torch.ones(shape))
    eager, optimizer = (optimizer_class(update, **defaults)([x]) for x in (p, own))
    runner = OptimizerRunner(
        optimizer, {0: (own, layout(own))}, UpdateSettings(rank=0, sharded=sharded)
    )
    data = own.detach().reshape(-1) if sharded else own.detach()
    for i in range(steps):
        p.grad = torch.randn(shape, generator=torch.Generator().manual_seed(i))
        runner.begin()
        runner.run(data, p.grad.clone().view(data.shape), 0)
        runner.end()
        eager.step()
        assert torch.equal(data.view(shape), p.detach()), f"step {i}"
    return runner, eager, optimizer


def test_hyperparameters_are_inputs_and_not_constants():
    p = nn.Parameter(torch.ones(4, 3))
    update = trace(torch.optim.SGD([p], lr=0.1234, foreach=False))
    assert "0.1234" not in update.graph_module.code


def test_whole_size_factories_are_sized_by_the_shard():
    def step(self, group, p, state):
        state["a"] = torch.zeros(p.shape)
        state["b"] = p.new_full(p.shape, 2.0)
        state["c"] = torch.empty(p.size()).fill_(3.0)
        state["d"] = torch.zeros_like(p, memory_format=torch.channels_last)

    update = trace_custom(step, shape=(2, 3, 4, 5))
    state, _ = applied(update, torch.zeros(7), torch.zeros(7), (), (0.1,))
    assert {name: tuple(value.shape) for name, value in state.items()} == dict.fromkeys(
        "abcd", (7,)
    )
    assert state["c"].tolist() == [3.0] * 7


def test_tracing_allocates_no_parameter_sized_memory():
    class Allocations(compat.scalars.DispatchMode):
        largest = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if type(result) is torch.Tensor and result.device.type != "meta":
                self.largest = max(self.largest, result.untyped_storage().nbytes())
            return result

    p = nn.Parameter(torch.ones(512, 512))
    optimizer = torch.optim.AdamW([p], foreach=False)
    with Allocations() as allocations:
        torch.zeros(9)
        trace(optimizer)
    assert 36 <= allocations.largest < 1024


def test_state_of_one_run_is_not_that_of_another():
    update = trace(torch.optim.AdamW([nn.Parameter(torch.ones(5))], foreach=False))
    scalars = (0.9, 0.999, 1e-8, 0.1, 0.01)
    first, _ = applied(update, torch.ones(5), torch.ones(5), (), scalars)
    second, _ = applied(update, torch.ones(5), torch.ones(5), (), scalars)
    assert all(first[name].data_ptr() != second[name].data_ptr() for name in first)


def test_guard_holds_for_the_branch_taken_and_fails_for_the_other():
    def step(self, group, p, state):
        p.add_(p.grad, alpha=-group["lr"] if group["lr"] > 0.05 else -1.0)

    guard = trace_custom(step).guard
    assert guard([0.06]) and guard([7.0]) and not guard([0.05])


def test_guard_that_meets_an_arithmetic_error_fails():
    def step(self, group, p, state):
        p.add_(p.grad, alpha=-1.0 if 1 / group["lr"] > 2 else -2.0)

    guard = trace_custom(step).guard
    assert guard([0.1]) and not guard([0.0])


def test_guard_goes_through_math_functions():
    def step(self, group, p, state):
        p.mul_(2.0 if math.log(group["lr"]) < -1 else 3.0)

    guard = trace_custom(step).guard
    assert guard([0.2]) and not guard([0.5]) and not guard([-1.0])


def test_math_functions_are_called_on_run_time_values():
    def step(self, group, p, state):
        p.mul_(math.exp(group["lr"]) + math.atan2(group["lr"], 2.0))

    update, data = trace_custom(step), torch.ones(3, dtype=torch.float64)
    applied(update, data, data, (), (0.5,))
    assert data[0].item() == math.exp(0.5) + math.atan2(0.5, 2.0)


def test_a_function_that_the_optimizer_keeps_may_call_math_too():
    def step(self, group, p, state):
        p.mul_(self.warm_up(group["lr"]))

    optimizer = optimizer_class(step)([nn.Parameter(torch.ones(3, dtype=torch.float64))])
    optimizer.warm_up = lambda rate: math.pow(rate, 0.25)
    optimizer.param_groups[0]["params"][0].grad = torch.ones(3, dtype=torch.float64)
    update, data = trace(optimizer), torch.ones(3, dtype=torch.float64)
    assert update.guard is None
    for rate in (0.5, 0.25):
        applied(update, data.fill_(1.0), data, (), (rate,))
        assert data[0].item() == math.pow(rate, 0.25)


def test_the_users_module_keeps_its_math():
    def step(self, group, p, state):
        p.mul_(math.sqrt(group["lr"]))

    trace_custom(step)
    assert step.__globals__["math"] is math and math.sqrt(4.0) == 2.0
    assert "float" not in step.__globals__


def test_float_keeps_a_hyperparameter_an_input():
    def step(self, group, p, state):
        assert isinstance(group["lr"], float) and isinstance(1.0, float)
        p.mul_(float(group["lr"]))

    assert trace_custom(step).guard is None


def test_branch_on_the_item_of_a_step_tensor_is_guarded():
    def step(self, group, p, state):
        if not state:
            state["step"] = torch.zeros(())
        state["step"] += 1
        p.add_(p.grad, alpha=-0.1 if state["step"].item() > 3 else -0.2)

    runner, *_ = run_steps(step, steps=8)
    assert runner.trace_count == 3


def test_item_of_a_rounded_tensor_is_read_at_run_time():
    def step(self, group, p, state):
        if not state:
            state["product"] = torch.tensor(0.1)
        state["product"] += 1
        state["product"] *= 0.3
        p.add_(p.grad, alpha=-state["product"].item())

    run_steps(step, steps=6)


def test_fractional_tensor_is_not_counted_in_double():
    def step(self, group, p, state):
        if not state:
            state["x"] = torch.tensor(0.1)
        state["x"] += 1
        # Large enough that a rounding of x to float32 shows.
        p.add_(p.grad, alpha=state["x"].item() * 1e8 % 1.0)

    run_steps(step, steps=6)


def test_tensor_made_of_a_hyperparameter_stays_an_input():
    def step(self, group, p, state):
        p.mul_(torch.tensor(group["lr"]))

    update, data = trace_custom(step), torch.ones(3)
    applied(update, data, data, (), (0.25,))
    assert update.guard is None and data.tolist() == [0.25] * 3


def test_branch_every_few_steps_takes_two_traces():
    def step(self, group, p, state):
        state["step"] = state.get("step", 0) + 1
        p.mul_(0.5 if state["step"] % 3 == 0 else 0.9)

    runner, *_ = run_steps(step, steps=9)
    assert runner.trace_count == 3


def test_integer_made_of_a_step_count_is_refused_with_its_line():
    def step(self, group, p, state):
        state["step"] = state.get("step", 0) + 1
        p.mul_([0.5, 0.25, 0.1][int(state["step"]) % 3])  # conversion

    with pytest.raises(UpdateError, match="changes at every step") as error:
        trace_custom(step, state={"step": 4})
    assert line_of("conversion") in str(error.value)


def test_integer_made_of_a_constant_state_is_allowed():
    def step(self, group, p, state):
        p.mul_([0.5, 0.25, 0.1][int(state["choice"])])

    assert trace_custom(step, state={"choice": 1}).guard([0.1, 1])


def test_hyperparameter_that_is_always_converted_warns():
    def step(self, group, p, state):
        p.mul_(1 + int(group["lr"]))

    p = nn.Parameter(torch.ones(3))
    optimizer = optimizer_class(step)([p])
    runner = OptimizerRunner(optimizer, {0: (p, layout(p))}, UpdateSettings(rank=0, sharded=True))
    with pytest.warns(UserWarning, match="traced 9 times for parameter 'w', because of .*test_tr"):
        for i in range(10):
            optimizer.param_groups[0]["lr"] = i + 0.5
            runner.begin()
            runner.run(p.detach(), torch.ones(3), 0)
            runner.end()


@pytest.mark.parametrize("sharded", [True, False])
def test_branch_on_a_tensor_is_refused_with_operation_and_line(sharded):
    def step(self, group, p, state):
        if (p.grad > 1).any():  # branch
            p.zero_()

    with pytest.raises(UpdateError, match="Custom chooses what to do .*aten.any") as error:
        trace_custom(step, sharded=sharded)
    assert line_of("branch") in str(error.value)


def test_branch_on_a_norm_is_refused():
    def step(self, group, p, state):
        if p.grad.norm() > 1:
            p.zero_()

    with pytest.raises(UpdateError, match="by the value of a tensor"):
        trace_custom(step, sharded=False)


def lamb(self, group, p, state):
    p.add_(p.grad, alpha=-group["lr"] * (p.norm() / p.grad.norm()).item())


def mean_free(self, group, p, state):
    p.sub_(p.grad - p.grad.mean(dim=0, keepdim=True))


def flattened(self, group, p, state):
    p.view(-1).sub_(p.grad.view(-1))


def noisy(self, group, p, state):
    p.add_(torch.randn_like(p), alpha=group["lr"])


def row_scaled(self, group, p, state):
    p.mul_(torch.full((p.shape[0], 1), 0.5))


def own_mask(self, group, p, state):
    p.mul_(self.mask)


def svd(self, group, p, state):
    u, _, v = torch.linalg.svd(p.grad, full_matrices=False)
    p.sub_(u @ v)


@pytest.mark.parametrize(
    ("step", "operation"),
    [
        (lamb, "norm"),
        (mean_free, "mean"),
        (flattened, "view"),
        (noisy, "randn_like"),
        (row_scaled, "mul_"),
        (svd, "svd"),
    ],
)
def test_update_that_is_not_elementwise_is_refused_on_shards(step, operation):
    with pytest.raises(UpdateError) as error:
        trace_custom(step)
    message = str(error.value)
    first = step.__code__.co_firstlineno
    line = int(re.search(re.escape(__file__) + r":(\d+)", message)[1])
    assert message.startswith("Custom cannot run on shards: `aten.") and operation in message
    assert first < line <= first + 2 and '"stage": 0' in message


def test_whole_tensor_held_by_the_optimizer_is_refused_on_shards():
    optimizer = optimizer_class(own_mask)([nn.Parameter(torch.ones(4, 3))])
    optimizer.mask = torch.ones(4, 3)
    with pytest.raises(UpdateError, match=r"another tensor, of shape \(4, 3\)"):
        trace(optimizer)


@pytest.mark.parametrize("step", [lamb, mean_free, flattened, row_scaled, svd])
def test_update_that_is_not_elementwise_runs_on_whole_parameters(step):
    run_steps(step, steps=2, sharded=False)


def test_muon_is_refused_on_shards_with_operation_and_line():
    optimizer = torch.optim.Muon([nn.Parameter(torch.ones(4, 3))])
    with pytest.raises(UpdateError, match=r"Muon cannot run on shards: `aten\.\w+.*_muon\.py:\d+"):
        trace(optimizer)


def test_foreach_operations_of_a_hand_written_step_are_elementwise():
    def step(self, group, p, state):
        if not state:
            state["m"] = torch.zeros_like(p)
        torch._foreach_mul_([state["m"]], 0.9)
        torch._foreach_add_([state["m"]], [p.grad])
        p.sub_(torch._foreach_sqrt(torch._foreach_abs([state["m"]]))[0])

    run_steps(step, steps=3)


def test_masked_assignment_is_elementwise():
    def step(self, group, p, state):
        grad = p.grad.clone()
        grad[grad.gt(0)] = group["lr"]
        p.sub_(grad.masked_fill_(grad.lt(-1), 0.0).abs_())

    run_steps(step, steps=3)


def test_step_without_no_grad_that_uses_data_is_traced():
    class Plain(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": 0.1})

        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    if p.requires_grad:
                        p.data.add_(p.grad.data, alpha=-group["lr"])

    update, data = trace(Plain([nn.Parameter(torch.ones(4))])), torch.ones(2)
    applied(update, data, torch.ones(2), (), (0.5,))
    assert data.tolist() == [0.5, 0.5]


def test_step_that_calls_its_parents_step_is_traced_without_hooks():
    class Twice(torch.optim.SGD):
        def step(self, closure=None):
            super().step()
            super().step()

    torch.optim.SGD([nn.Parameter(torch.ones(4))], lr=0.1)  # wraps the parent's step
    optimizer = Twice([nn.Parameter(torch.ones(4))], lr=0.1, foreach=False)
    optimizer.register_step_post_hook(lambda *_: pytest.fail("a hook ran while tracing"))
    update, data = trace(optimizer), torch.ones(4)
    assert not [name for name in targets(update) if "profiler" in name]
    read = read_arguments(group_values(optimizer.param_groups[0]), shard_shape=None, inputs=())
    applied(update, data, torch.ones(4), (), read.scalars)
    assert torch.allclose(data, torch.tensor(0.8))


def test_gradient_that_is_kept_in_the_state_is_cloned():
    def step(self, group, p, state):
        state["previous"] = p.grad

    gradient = torch.ones(3)
    state, _ = applied(trace_custom(step), torch.ones(3), gradient, (), (0.1,))
    assert state["previous"].data_ptr() != gradient.data_ptr()


def assigns_data(self, group, p, state):
    p.data = p.data - p.grad


def counts_on_itself(self, group, p, state):
    self.count = getattr(self, "count", 0) + 1


def keeps_state_elsewhere(self, group, p, state):
    self.state["global"]["step"] = 1


def changes_group_tensor(self, group, p, state):
    group["scale"] = torch.zeros(())


def keeps_one_memory_twice(self, group, p, state):
    state["fast"] = torch.zeros_like(p)
    state["slow"] = state["fast"]


def keeps_the_parameter(self, group, p, state):
    state["weights"] = p.data


def keeps_a_list(self, group, p, state):
    self.buffers[0].add_(p.grad)


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (keeps_one_memory_twice, "one memory as state `slow` and as `fast`.*clone"),
        (keeps_the_parameter, "one memory as state `weights` and as `p`"),
        (assigns_data, r"assigns `p.data`.*p.data.copy_"),
        (counts_on_itself, r"changes its attribute `count`"),
        (keeps_state_elsewhere, "state that belongs to no parameter"),
        (changes_group_tensor, "changes a tensor of its parameter group"),
    ],
)
def test_change_that_cannot_be_carried_over_is_refused(step, words):
    with pytest.raises(UpdateError, match=words):
        trace_custom(step)


class Count:
    """An object with a number in it, as a user may keep one in a state."""

    def __init__(self):
        self.n = 0


Moments = collections.namedtuple("Moments", "n total")


def counts_in_an_object(self, group, p, state):
    count = state.setdefault("count", Count())
    count.n += 1
    p.add_(p.grad, alpha=-1 / count.n)


def counts_in_an_object_in_a_list(self, group, p, state):
    count = state.setdefault("counts", [1.0, {"mine": Count()}])[1]["mine"]
    count.n += 1
    p.add_(p.grad, alpha=-1 / count.n)


def counts_in_an_ordered_dictionary(self, group, p, state):
    count = state.setdefault("count", collections.OrderedDict(n=0))
    count["n"] += 1
    p.add_(p.grad, alpha=-1 / count["n"])


def counts_in_a_set(self, group, p, state):
    seen = state.setdefault("seen", set())
    seen.add(len(seen))
    p.add_(p.grad, alpha=-1 / len(seen))


def keeps_a_named_tuple(self, group, p, state):
    before = state.get("moments", Moments(0, 0.0))
    state["moments"] = Moments(before.n + 1, before.total + p.grad)
    p.add_(state["moments"].total, alpha=-1 / state["moments"].n)


def keeps_a_tensor_of_tensors(self, group, p, state):
    p.add_(state.setdefault("two", TwoTensor(torch.ones_like(p), p.grad)).b)


def counts_in_one_list_twice(self, group, p, state):
    if not state:
        state["a"] = state["b"] = [0]
    state["a"][0] += 1
    p.add_(p.grad, alpha=-1 / state["b"][0])


def counts_by_parameter(self, group, p, state):
    counts = state.setdefault("counts", {})
    counts[p] = counts.get(p, 0) + 1
    p.add_(p.grad, alpha=-1 / counts[p])


class Counted(dict):
    """A state of the user's own kind."""


def has_a_state_of_its_own_kind(self, group, p, state):
    state = self.state[p] = state if isinstance(state, Counted) else Counted(n=0)
    state["n"] += 1
    p.add_(p.grad, alpha=-1 / state["n"])


@pytest.mark.parametrize("sharded", (False, True))
@pytest.mark.parametrize(
    ("step", "words"),
    [
        (counts_in_an_object, "keeps an object of class Count as state `count`"),
        (counts_in_an_object_in_a_list, "an object of class Count as state `counts.1.mine`"),
        (counts_in_an_ordered_dictionary, "an object of class OrderedDict as state `count`"),
        (counts_in_a_set, "an object of class set as state `seen`"),
        (keeps_a_named_tuple, "an object of class Moments as state `moments`"),
        (keeps_a_tensor_of_tensors, "a tensor of class TwoTensor as state `two`"),
        (counts_in_one_list_twice, "a list that is in another place too as state `b`"),
        (counts_by_parameter, "a dictionary with a FakeTensor for a key as state `counts`"),
        (has_a_state_of_its_own_kind, r"an object of class Counted for its `self.state\[p\]`"),
    ],
)
def test_state_that_changes_where_a_trace_does_not_look_is_refused(step, words, sharded):
    with pytest.raises(UpdateError, match=f"{words}, .*states of their own, .*a tensor, a number"):
        trace_custom(step, sharded=sharded)


def test_an_object_that_appears_later_is_refused_when_it_does():
    def step(self, group, p, state):
        state["step"] = state.get("step", 0) + 1
        if state["step"] > 2:
            counts_in_an_object(self, group, p, state)

    with pytest.raises(UpdateError, match="an object of class Count as state `count`"):
        run_steps(step, steps=3)


def test_an_object_that_was_loaded_is_refused_though_the_step_drops_it():
    def step(self, group, p, state):
        p.add_(p.grad, alpha=-1 / state.pop("count").n)

    with pytest.raises(UpdateError, match="an object of class Count as state `count`"):
        trace_custom(step, state={"count": Count()})


def counts_in_a_dictionary(self, group, p, state):
    count = state.setdefault("count", {"n": 0, "names": ("a", None)})
    count["n"] += 1
    p.add_(p.grad, alpha=-1 / count["n"])


def counts_by_length(self, group, p, state):
    seen = state.setdefault("seen", [])
    seen.append(1.5)
    p.add_(p.grad, alpha=-1 / len(seen))


def keeps_what_a_branch_found(self, group, p, state):
    state["step"] = state.get("step", 0) + 1
    p.add_(p.grad, alpha=-0.1 if state.get("late") else -1)
    state["late"] = state["step"] > 2


def keeps_a_dtype_a_shape_and_a_complex_number(self, group, p, state):
    state.setdefault("dtype", p.dtype)
    state.setdefault("shape", p.shape)
    state["turn"] = state.get("turn", 1) * 1j
    p.add_(p.grad.to(state["dtype"]), alpha=state["turn"].real + len(state["shape"]))


@pytest.mark.parametrize(
    "step",
    (
        counts_in_a_dictionary,
        counts_by_length,
        keeps_what_a_branch_found,
        keeps_a_dtype_a_shape_and_a_complex_number,
    ),
)
def test_plain_states_are_carried_from_step_to_step(step):
    _, eager, optimizer = run_steps(step, steps=6)
    (mine,), (theirs,) = optimizer.state.values(), eager.state.values()
    assert mine == theirs
    assert list(map(type, mine.values())) == list(map(type, theirs.values()))


def test_list_of_tensors_that_a_step_changes_is_named():
    optimizer = optimizer_class(keeps_a_list)([nn.Parameter(torch.ones(4, 3))])
    optimizer.buffers = [torch.zeros(4, 3)]
    with pytest.raises(UpdateError, match="changes its attribute `buffers`"):
        trace(optimizer)


def own_list(self):
    for p in self.own:
        if p.grad is not None:
            p.sub_(p.grad)


def own_dictionary(self):
    for p in self.param_groups[0]["params"]:
        p.sub_(p.grad, alpha=self.own[p])


def own_ids(self):
    for p in self.param_groups[0]["params"]:
        p.sub_(p.grad, alpha=0.1 if id(p) in self.own else 1.0)


def own_attribute(self):
    for p in self.param_groups[0]["params"]:
        p.sub_(p.grad, alpha=0.1 if id(p) in self.own.those else 1.0)


def own_optimizer(self):
    self.own.step()


def own_module(self):
    for p in self.own.parameters():
        if p.grad is not None:
            p.sub_(p.grad)


@pytest.mark.parametrize(
    ("step", "make"),
    [
        (own_list, lambda p: [p]),
        (own_list, lambda p: {p}),
        (own_dictionary, lambda p: {p: 0.1}),
        (own_ids, lambda p: {id(p)}),
        (own_ids, lambda p: frozenset([id(p)])),
        (own_attribute, lambda p: types.SimpleNamespace(those={id(p)})),
        (own_dictionary, lambda p: collections.OrderedDict({p: 0.1})),
        (own_dictionary, lambda p: weakref.WeakKeyDictionary({p: 0.1})),
        (own_optimizer, lambda p: torch.optim.SGD([p])),
        (own_module, lambda p: nn.ParameterList([p])),
    ],
)
def test_parameters_that_a_step_finds_elsewhere_are_refused(step, make):
    p = nn.Parameter(torch.ones(4, 3))
    optimizer = torch.optim.Optimizer([p], {})
    Custom = type("Custom", (torch.optim.Optimizer,), {"step": torch.no_grad()(step)})
    optimizer.__class__ = Custom
    optimizer.own = make(p)
    with pytest.raises(UpdateError, match="Custom.step looks into its attribute `own`"):
        trace(optimizer)


def test_parameters_in_an_attribute_that_a_step_does_not_read_are_no_matter():
    def step(self, group, p, state):
        p.sub_(p.grad, alpha=group["lr"] * self.own["factor"])

    p = nn.Parameter(torch.ones(4, 3))
    optimizer = optimizer_class(step)([p])
    optimizer.own = {"factor": 2.0, "names": {p: "w"}}
    trace(optimizer)
    assert optimizer.own == {"factor": 2.0, "names": {p: "w"}}


def test_step_of_no_module_is_traced():
    names = {"torch": torch}
    exec(  # as a notebook's or a configuration's code may be
        "def step(self):\n"
        "    for p in self.param_groups[0]['params']:\n"
        "        p.data.sub_(p.grad)\n",
        names,
    )
    assert names["step"].__module__ is None
    Custom = type("Custom", (torch.optim.Optimizer,), {"step": names["step"]})
    trace(Custom([nn.Parameter(torch.ones(4))], {}))


def test_complex_parameter_is_refused_with_a_remedy():
    p = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    with pytest.raises(UpdateError, match="'w' is torch.complex64.*view_as_complex"):
        trace(torch.optim.SGD([p], foreach=False))


def test_error_of_the_users_step_is_quoted_and_chained():
    def step(self, group, p, state):
        raise KeyError("momentum")

    with pytest.raises(UpdateError, match="Custom.step.*parameter 'w'.*KeyError: 'momentum'") as e:
        trace_custom(step)
    assert isinstance(e.value.__cause__, KeyError)


def test_nodes_carry_the_optimizers_source_line():
    def step(self, group, p, state):
        p.mul_(0.5)  # source

    (node,) = [n for n in trace_custom(step).graph_module.graph.nodes if "mul" in str(n.target)]
    file, line = line_of("source").rsplit(":", 1)
    assert f'File "{file}", line {line}' in node.meta["stack_trace"]


def test_no_warnings_while_tracing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trace(torch.optim.AdamW([nn.Parameter(torch.ones(4))], foreach=False))


def test_package_refuses_to_be_imported_as_codegen():
    spec = importlib.util.spec_from_file_location("codegen", codegen.__file__)
    with pytest.raises(ImportError, match="import zerofx.codegen"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
