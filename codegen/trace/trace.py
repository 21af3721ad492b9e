"""Trace the update of one parameter from the optimizer's own Python ``step``.

The trace is an FX graph of aten operations and Python scalar arithmetic.  Hyperparameters and
Python numbers in the state are inputs of it, so a learning rate may change without a retrace,
and scalar arithmetic stays in doubles as in eager mode: the two agree bitwise.  Where the
optimizer branches on a number, the branch taken is kept as a guard over these inputs.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor, fx

from zerofx import compat
from zerofx.codegen.rewrite.elementwise import UpdateError, check_elementwise, fit_to_shards
from zerofx.codegen.trace.arguments import Arguments, own_attributes
from zerofx.codegen.trace.nested import fill, leaves
from zerofx.codegen.trace.step import ChangingIntegers, TracedStep
from zerofx.codegen.trace.symbolic import frame_line, innermost_line
from zerofx.ir.aliases import aliased_inputs, mutated_inputs
from zerofx.ir.parameters import ParameterInfo


@dataclass(frozen=True, eq=False)
class Update:
    """The traced update of one parameter, and as it is one of its kernels.

    ``guard`` says whether the branches taken while tracing hold for other scalars (None: they
    always do).  ``conversions`` are the lines that made a plain number of a hyperparameter,
    which is why another value of it needs another trace.  ``writes_gradient`` says that the step
    changes ``p.grad``, here a copy of it, or replaces or clears it.  ``shards`` says which of the
    graph's inputs hold one element per element of the parameter, ``inputs`` where all of them are
    found: ``state.exp_avg``.

    It takes the gradient in ``gradient_dtype``.  One that ``codegen.rewrite.storage`` has rewritten
    may have more inputs, which ``inputs`` does not name: ``scales`` are those of blocks' scales.
    ``of_any_sizes``: traced for another parameter whose memory ``is_usual``, on shards, it
    would be the same.
    """

    graph_module: fx.GraphModule
    shards: tuple[bool, ...]
    guard: Callable[[Sequence[float | int]], bool] | None
    state: tuple[tuple[str, Any], ...]
    group: tuple[tuple[str, Any], ...]
    clones_gradient: bool
    writes_gradient: bool
    conversions: tuple[str, ...]
    optimizer: str
    inputs: tuple[str, ...]
    gradient_dtype: torch.dtype
    scales: tuple[int, ...] = ()
    of_any_sizes: bool = False

    may_wait = False

    def ready(self, parameter: Tensor, gradient: Tensor, *others: Any) -> Callable[[], Any]:
        """Return what runs the graph operator by operator, and leaves the gradient as it is."""

        def run() -> Sequence[Any]:
            given = gradient.clone() if self.clones_gradient else gradient
            return self.graph_module.forward(parameter, given, *others)

        return run

    def filled(self, results: Sequence[Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The state and the group's changed entries that a run of the graph has returned."""
        state = {name: fill(template, results) for name, template in self.state}
        return state, {name: fill(template, results) for name, template in self.group}

    @cached_property
    def computation(self) -> tuple:
        """All that it does to elements and numbers: equal updates can run as one."""
        constants = tuple(id(buffer) for _, buffer in self.graph_module.named_buffers())
        inputs = self.graph_module.graph.find_nodes(op="placeholder")
        dtypes = tuple(getattr(node.meta.get("val"), "dtype", None) for node in inputs)
        templates = (repr(self.state), repr(self.group), self.clones_gradient)
        return (self.graph_module.code, self.shards, dtypes, constants, *templates)


def trace_update(
    optimizer: torch.optim.Optimizer,
    info: ParameterInfo,
    *,
    group: Arguments,
    state: Arguments,
    sharded: bool,
    attributes: Mapping[str, Any] | None = None,
) -> Update:
    """Trace the optimizer's step for one parameter with the group and state it has now.

    The parameter has its whole shape while tracing, but no memory.  With ``sharded`` the trace
    runs on flat shards of any length, of the parameter, its gradient and its moments.

    The step sees one parameter, so a group's number that it changes is taken to change once per
    step, not once per parameter.  ``attributes`` are the user's of the parameter.

    Raises: UpdateError if the update needs a tensor's value to choose what to do, changes what
    cannot be written back, or (with ``sharded``) is not elementwise.
    """
    name = type(optimizer).__name__
    if info.dtype.is_complex:
        raise UpdateError(
            f"parameter '{info.name}' is {info.dtype}, and zerofx does not update complex "
            "parameters. Keep its real and imaginary parts as a real parameter with a last "
            "dimension of 2 and use torch.view_as_complex in the forward pass."
        )
    env = compat.scalars.ScalarEnvironment()
    step = TracedStep(optimizer, env, group, state, attributes or {})
    with env.fake_tensors():
        parameter, gradient = _empty_like(info, info), _empty_like(info, info)
        tensors = [
            _empty_like(tensor, info if is_shard else tensor)
            for arguments in (group, state)
            for tensor, is_shard in zip(arguments.tensors, arguments.shards, strict=True)
        ]
        scalars = [env.scalar(value) for value in (*group.scalars, *state.scalars)]
        symbols = [compat.scalars.expression(scalar) for scalar in scalars]
        try:
            gm = compat.scalars.trace_operations(
                step, [parameter.requires_grad_(), gradient, *tensors, *scalars]
            )
        except compat.scalars.DATA_DEPENDENT_ERRORS as error:
            raise UpdateError(
                f"{name} chooses what to do by the value of a tensor, which "
                f"`{step.follower.last_read}` "
                f"computes, at {innermost_line(error)}: a traced update cannot branch on it. "
                "Write both outcomes with torch.where, or keep the number in the parameter group."
            ) from error
        except (UpdateError, ChangingIntegers):
            raise
        except Exception as error:
            said = str(error).rstrip(".")
            raise UpdateError(
                f"{name}.step cannot be traced for parameter '{info.name}': it raised "
                f"{type(error).__name__}: {said}. {_remedy(optimizer, info, state, said)}"
            ) from error
    _refuse_changing_conversions(env, name, step.changing)
    _tidy(gm)
    _refuse_written_attributes(gm, optimizer)
    _name_numbers(gm, step.follower.number_names)
    of_any_sizes = False
    if sharded and step.nested:
        raise UpdateError(
            f"{name} keeps tensors in a list or dictionary, as state `{step.nested[0]}`: "
            "state_dict() would hold one rank's shards of them. Keep each as a state of its own: "
            f"self.state[p]['{step.nested[0]}_0'] = tensor."
        )
    shards = (True, True, *group.shards, *state.shards)
    if sharded:
        # Placeholders of numbers follow those of tensors.
        paired = zip(gm.graph.find_nodes(op="placeholder"), shards, strict=False)
        whole = [node for node, is_shard in paired if is_shard]
        found = check_elementwise(gm, shape=info.shape, whole=whole, optimizer=name)
        of_any_sizes = is_usual(info) and not (step.asks_for_shapes or _has_sizes(gm))
        fit_to_shards(gm, shape=info.shape, whole=found)
    gm.recompile()
    of_tensors, of_scalars = zip(group.paths("group"), state.paths("state"), strict=True)
    return Update(
        graph_module=gm,
        shards=shards,
        guard=_compile_guard(env, symbols),
        state=step.new_state,
        group=step.new_group,
        clones_gradient=step.uses_up_gradient,
        writes_gradient=step.writes_gradient,
        conversions=tuple(frame_line(frame) for _, frame in env.conversions),
        optimizer=name,
        inputs=("param", "grad", *chain(*of_tensors), *chain(*of_scalars)),
        gradient_dtype=info.dtype,
        of_any_sizes=of_any_sizes,
    )


def is_usual(info: ParameterInfo) -> bool:
    """Return whether a parameter is contiguous and has more than one element."""
    strides = accumulate(reversed(info.shape[1:]), operator.mul, initial=1)
    return len(info.shape) > 0 and info.numel > 1 and info.stride == (*strides,)[::-1]


def _has_sizes(gm: fx.GraphModule) -> bool:
    """Return whether an operation is given numbers in a list: the sizes of one parameter."""
    return any(
        isinstance(argument, (list, tuple)) and any(isinstance(item, int) for item in argument)
        for node in gm.graph.nodes
        if node.op == "call_function"
        for argument in (*node.args, *node.kwargs.values())
    )


def _remedy(
    optimizer: torch.optim.Optimizer, info: ParameterInfo, state: Arguments, error: str
) -> str:
    """Return advice on an error that the optimizer itself raised."""
    for name, value in state.values.items():
        if isinstance(value, Tensor) and value.ndim and value.dtype != info.dtype:
            return (
                f"Its state '{name}' is {value.dtype} and the parameter {info.dtype}: set states "
                "with optimizer.load_state_dict, which casts them to the parameter's dtype."
            )
    if "missing" in error and "'closure'" in error:
        return (
            "It computes losses anew while it steps, and a compiled step has one forward and "
            "backward: use an optimizer that steps once for each backward()."
        )
    return "Its step is called without a closure, for one parameter at a time."


def _empty_like(one: Tensor | ParameterInfo, layout: Tensor | ParameterInfo) -> Tensor:
    """An uninitialised tensor with the dtype and device of one and the layout of another."""
    stride = layout.stride() if isinstance(layout, Tensor) else layout.stride
    return torch.empty_strided(layout.shape, stride, dtype=one.dtype, device=one.device)


def _refuse_written_attributes(gm: fx.GraphModule, optimizer: torch.optim.Optimizer) -> None:
    """Refuse writes to tensors of the optimizer's own, which every parameter would repeat."""
    constants = {node for node in gm.graph.nodes if node.op == "get_attr"}
    for node in gm.graph.nodes:
        if node.op != "call_function" or not constants.intersection(node.all_input_nodes):
            continue
        if constants.intersection(mutated_inputs(node)):
            owned = own_attributes(optimizer).items()
            names = [
                f"`{name}`"
                for name, value in owned
                if any(isinstance(leaf, Tensor) for leaf in leaves(value))
            ]
            raise UpdateError(
                f"{type(optimizer).__name__}.step changes its attribute {' or '.join(names)}, "
                "which a traced update cannot carry from one step to the next: keep it in "
                "`self.state[p]`, or in the parameter group."
            )
        if constants.intersection(aliased_inputs(node)):
            constants.add(node)


def _tidy(gm: fx.GraphModule) -> None:
    """Call ``math`` functions directly, and drop the profiler's marks of a nested step."""
    for node in reversed(list(gm.graph.nodes)):
        if node.op != "call_function":
            continue
        node.target = getattr(node.target, "function", node.target)
        if getattr(node.target, "namespace", "") == "profiler":
            gm.graph.erase_node(node)


def _name_numbers(gm: fx.GraphModule, names: Mapping[Any, str]) -> None:
    """Keep what the optimizer calls a number next to the node that computes it."""
    for node in gm.graph.nodes:
        number = node.meta.get("val")
        if isinstance(number, compat.scalars.SYMBOLIC_SCALARS):
            name = names.get(compat.scalars.expression(number))
            if name is not None:
                node.meta.setdefault("source_name", name)


def _refuse_changing_conversions(
    env: compat.scalars.ScalarEnvironment, optimizer: str, changing: set[Any]
) -> None:
    """Refuse a plain number made of a step count: every step would need a trace of its own."""
    for symbol, _, arguments in env.derived:
        if any(changing & getattr(argument, "free_symbols", set()) for argument in arguments):
            changing = changing | {symbol}
    for expression, frame in env.conversions:
        if changing & expression.free_symbols:
            raise UpdateError(
                f"{optimizer} makes a plain Python number of one that changes at every step, at "
                f"{frame_line(frame)}, so every step would be traced anew. Keep it symbolic: use "
                "functions of `math`, `** 0.5` or torch operations, not int() or numpy."
            )


def _compile_guard(
    env: compat.scalars.ScalarEnvironment, symbols: Sequence[Any]
) -> Callable[[Sequence[float | int]], bool] | None:
    """A Python predicate over the scalar inputs: whether the branches taken hold for them."""
    guards = compat.scalars.guard_sources(env)
    if not guards:
        return None
    functions = {f"function_{i}": derived[1] for i, derived in enumerate(env.derived)}
    lines = ["def guard(scalars):", f"    {', '.join(s.name for s in symbols)}, = scalars"]
    for i, (symbol, _, arguments) in enumerate(env.derived):
        sources = ", ".join(map(compat.scalars.python_source, arguments))
        lines.append(f"    {symbol.name} = function_{i}({sources})")
    lines.append(f"    return {' and '.join(f'({guard})' for guard in guards)}")
    names = {"math": math, "torch": torch, **functions}
    exec("\n".join(lines), names)  # noqa: S102 - source printed from our own expressions
    check = names["guard"]

    def holds(scalars: Sequence[float | int]) -> bool:
        try:
            return bool(check(scalars))
        except (ArithmeticError, ValueError):
            return False  # eager mode meets the same error, at the user's line

    return holds
