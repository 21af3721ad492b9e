"""Trace the update of one parameter from the optimizer's own Python ``step``.

The trace is an FX graph of aten operations and Python scalar arithmetic.  Hyperparameters and
Python numbers in the state are inputs of it, so a learning rate may change without a retrace,
and scalar arithmetic stays in doubles as in eager mode: the two agree bitwise.  Where the
optimizer branches on a number, the branch taken is kept as a guard over these inputs.
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor, fx, nn

from zerofx import compat
from zerofx.codegen.rewrite.elementwise import UpdateError, check_elementwise, fit_to_shards
from zerofx.codegen.trace.arguments import Arguments, not_carried, own_attributes
from zerofx.codegen.trace.symbolic import (
    Follower,
    TensorsOfNumbers,
    class_with_symbolic_math,
    frame_line,
    innermost_line,
)
from zerofx.ir.aliases import aliased_inputs, mutated_inputs
from zerofx.ir.parameters import ParameterInfo


@dataclass(frozen=True)
class Update:
    """The traced update of one parameter; call it to update in place.

    ``guard`` says whether the branches taken while tracing hold for other scalars (None: they
    always do).  ``conversions`` are the lines that made a plain number of a hyperparameter,
    which is why another value of it needs another trace.  ``writes_gradient`` says that the step
    changes ``p.grad``: here, a copy of it.  ``shards`` says which of the graph's inputs hold one
    element per element of the parameter, ``inputs`` where all of them are found: ``state.exp_avg``.

    It takes the gradient in ``gradient_dtype``.  One that ``codegen.rewrite.storage`` has rewritten
    may have more inputs, which ``inputs`` does not name: ``offset`` is that of the first element's
    number, ``scales`` are those of blocks' scales.  ``coefficients`` are those that
    ``zerofx.codegen.rewrite.gradient_work`` adds: 0-dim tensors, which stay where they are.
    ``gives_squares`` says that the graph's last result is what ``codegen.rewrite.gradient_norm``
    adds.  ``of_any_sizes``: traced for another parameter whose memory ``is_usual``, on shards, it
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
    offset: int | None = None
    scales: tuple[int, ...] = ()
    coefficients: tuple[int, ...] = ()
    gives_squares: bool = False
    of_any_sizes: bool = False

    def __call__(
        self,
        parameter: Tensor,
        gradient: Tensor,
        tensors: Sequence[Tensor],
        scalars: Sequence,
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Update ``parameter`` in place; return its new state and the group's changed entries."""
        return self.filled(self.run(parameter, gradient, *tensors, *scalars))

    def run(self, parameter: Tensor, gradient: Tensor, *others: Any) -> Sequence[Any]:
        """Run the graph operator by operator, and leave the gradient as it is."""
        if self.clones_gradient:
            gradient = gradient.clone()
        return self.graph_module(parameter, gradient, *others)

    def filled(self, results: Sequence[Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The state and the group's changed entries that a run of the graph has returned."""
        state = {name: _fill(template, results) for name, template in self.state}
        return state, {name: _fill(template, results) for name, template in self.group}

    @cached_property
    def computation(self) -> tuple:
        """All that it does to elements and numbers: equal updates can run as one."""
        constants = tuple(id(buffer) for _, buffer in self.graph_module.named_buffers())
        templates = (repr(self.state), repr(self.group), self.clones_gradient)
        return (self.graph_module.code, self.shards, constants, *templates)


class ChangingIntegers(Exception):  # noqa: N818 - a request to trace again, not an error
    """The step changes these integers of the group, so they must be inputs."""

    def __init__(self, names: set[str]) -> None:
        self.names = names


def trace_update(
    optimizer: torch.optim.Optimizer,
    info: ParameterInfo,
    *,
    group: Arguments,
    state: Arguments,
    sharded: bool,
) -> Update:
    """Trace the optimizer's step for one parameter with the group and state it has now.

    The parameter has its whole shape while tracing, but no memory.  With ``sharded`` the trace
    runs on flat shards of any length, of the parameter, its gradient and its moments.

    The step sees one parameter, so a group's number that it changes is taken to change once per
    step, not once per parameter.

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
    env = compat.ScalarEnvironment()
    shadow_step = _ShadowStep(optimizer, env, group, state)
    with env.fake_tensors():
        parameter, gradient = _empty_like(info, info), _empty_like(info, info)
        tensors = [
            _empty_like(tensor, info if is_shard else tensor)
            for arguments in (group, state)
            for tensor, is_shard in zip(arguments.tensors, arguments.shards, strict=True)
        ]
        scalars = [env.scalar(value) for value in (*group.scalars, *state.scalars)]
        symbols = [compat.expression(scalar) for scalar in scalars]
        try:
            gm = compat.trace_operations(
                shadow_step, [parameter.requires_grad_(), gradient, *tensors, *scalars]
            )
        except compat.DATA_DEPENDENT_ERRORS as error:
            raise UpdateError(
                f"{name} chooses what to do by the value of a tensor, which "
                f"`{shadow_step.follower.last_read}` "
                f"computes, at {innermost_line(error)}: a traced update cannot branch on it. "
                "Write both outcomes with torch.where, or keep the number in the parameter group."
            ) from error
        except (UpdateError, ChangingIntegers):
            raise
        except Exception as error:
            raise UpdateError(
                f"{name}.step cannot be traced for parameter '{info.name}': it raised "
                f"{type(error).__name__}: {error}. {_remedy(info, state)}"
            ) from error
    _refuse_changing_conversions(env, name, shadow_step.changing)
    _tidy(gm)
    _refuse_written_attributes(gm, optimizer)
    _name_numbers(gm, shadow_step.follower.number_names)
    of_any_sizes = False
    if sharded and shadow_step.nested:
        raise UpdateError(
            f"{name} keeps tensors in a list or dictionary, as state `{shadow_step.nested[0]}`: "
            "state_dict() would hold one rank's shards of them. Keep each as a state of its own: "
            f"self.state[p]['{shadow_step.nested[0]}_0'] = tensor."
        )
    if sharded:
        placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
        shards = (True, True, *group.shards, *state.shards)
        # Placeholders of numbers follow those of tensors.
        paired = zip(placeholders, shards, strict=False)
        whole = [node for node, is_shard in paired if is_shard]
        found = check_elementwise(gm, shape=info.shape, whole=whole, optimizer=name)
        of_any_sizes = is_usual(info) and not (shadow_step.asks_for_shapes or _has_sizes(gm))
        fit_to_shards(gm, shape=info.shape, whole=found)
    gm.recompile()
    of_tensors, of_scalars = zip(group.paths("group"), state.paths("state"), strict=True)
    return Update(
        graph_module=gm,
        shards=(True, True, *group.shards, *state.shards),
        guard=_compile_guard(env, symbols),
        state=shadow_step.new_state,
        group=shadow_step.new_group,
        clones_gradient=shadow_step.uses_up_gradient,
        writes_gradient=shadow_step.writes_gradient,
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


def _remedy(info: ParameterInfo, state: Arguments) -> str:
    """Return advice on an error that the optimizer itself raised."""
    for name, value in state.values.items():
        if isinstance(value, Tensor) and value.ndim and value.dtype != info.dtype:
            return (
                f"Its state '{name}' is {value.dtype} and the parameter {info.dtype}: set states "
                "with optimizer.load_state_dict, which casts them to the parameter's dtype."
            )
    return "It must be callable without a closure, for one parameter at a time."


class _ShadowStep:
    """Runs the optimizer's step on a copy of it that knows one parameter only."""

    __name__ = "update"

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        env: compat.ScalarEnvironment,
        group: Arguments,
        state: Arguments,
    ) -> None:
        self.optimizer, self.env = optimizer, env
        self.group, self.state = group, state
        self.follower = Follower()
        self.new_state: tuple[tuple[str, Any], ...] = ()
        self.new_group: tuple[tuple[str, Any], ...] = ()
        self.nested: list[str] = []  # states that are lists or dictionaries of tensors
        self.uses_up_gradient = self.writes_gradient = False
        self.asks_for_shapes = True
        self.changing: set[Any] = set()

    def __call__(self, parameter: Tensor, gradient: Tensor, *inputs: Any) -> list[Any]:
        num_tensors = len(self.group.tensors) + len(self.state.tensors)
        # Now: a branch `x == 0` replaces the symbol of x by the number.
        symbols = {id(number): compat.expression(number) for number in inputs[num_tensors:]}
        tensors, scalars = iter(inputs[:num_tensors]), iter(inputs[num_tensors:])
        group = self.group.rebuild(tensors, scalars, self.follower.know)
        state = self.state.rebuild(tensors, scalars, self.follower.know)
        given = {name: _copied(value) for name, value in group.items()}
        numbers = dict(self.follower.values)
        keys = (compat.storage_key(parameter), compat.storage_key(gradient))
        parameter.grad = gradient
        self._check_carried(dict(self.state.values))

        shadow = self._shadow(parameter, {"params": [parameter], **group}, state)
        attributes = dict(shadow.__dict__)
        contents = {name: _copied(value) for name, value in own_attributes(shadow).items()}
        with TensorsOfNumbers() as numbers_mode, self.follower:
            type(shadow).step(shadow)
        self.asks_for_shapes = numbers_mode.asks_for_shapes
        if compat.storage_key(parameter) != keys[0]:
            raise self._error("assigns `p.data`", "write into it: `p.data.copy_(value)`")
        self._check_attributes(shadow, attributes, contents, parameter)

        results: list[Any] = []
        new_state = shadow.state.get(parameter, {})
        self._check_carried(new_state)
        self.nested = [
            name
            for name, value in new_state.items()
            if type(value) in (list, tuple, dict)
            and any(isinstance(leaf, Tensor) and leaf.dim() for leaf in _leaves(value))
        ]
        self._check_apart(new_state, keys[0])
        self.new_state = tuple((name, _store(value, results)) for name, value in new_state.items())
        kept = {compat.storage_key(item) for item in results if isinstance(item, Tensor)}
        self.writes_gradient = keys[1] in self.follower.mutated
        self.uses_up_gradient = self.writes_gradient or keys[1] in kept
        changed = {
            name: value
            for name, value in shadow.param_groups[0].items()
            if name != "params" and not (name in given and _same(given[name], value))
        }
        self._check_group(group, changed)
        self.new_group = tuple((name, _store(value, results)) for name, value in changed.items())

        unchanged = {id(item) for item in results} | {
            id(number)
            for key, number in numbers.items()
            if key in kept and key not in self.follower.mutated
        }
        mine = inputs[num_tensors + len(self.group.scalars) :]
        changing = [number for number in mine if id(number) not in unchanged]
        for name in changed.keys() & given.keys():
            changing += _leaves(given[name])
        self.changing = {symbols[id(number)] for number in changing if id(number) in symbols}
        return results

    def _shadow(self, parameter: Tensor, group: dict, state: dict) -> torch.optim.Optimizer:
        shadow: Any = object.__new__(class_with_symbolic_math(type(self.optimizer), self.env))
        shadow.__dict__.update(self.optimizer.__dict__)
        shadow.__dict__.pop("step", None)  # LR schedulers wrap it on the instance
        for name in shadow.__dict__:
            if name.startswith("_optimizer_") and name.endswith("_hooks"):
                shadow.__dict__[name] = {}
        theirs = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        for name, value in own_attributes(shadow).items():
            stand_in = _Elsewhere(type(self.optimizer).__name__, name)
            copied = _copied(value)  # which a trace may change
            shadow.__dict__[name] = _without_parameters(copied, theirs, stand_in)
        shadow.state = defaultdict(dict)
        if state:
            shadow.state[parameter] = state
        shadow.param_groups = [group]
        return shadow

    def _check_attributes(
        self,
        shadow: Any,
        before: dict[str, Any],
        contents: dict[str, Any],
        parameter: Tensor,
    ) -> None:
        for name, value in shadow.__dict__.items():
            is_other = name not in before or before[name] is not value
            written = isinstance(value, Tensor) and (
                compat.storage_key(value) in self.follower.mutated
            )
            inside = name in contents and not _same(contents[name], value)
            if is_other or written or inside:
                raise self._error(
                    f"changes its attribute `{name}`",
                    "keep it in `self.state[p]`, or in the parameter group",
                )
        if any(key is not parameter for key in shadow.state):
            raise self._error(
                "keeps state that belongs to no parameter", "keep it in the parameter group"
            )

    def _check_carried(self, state: Any) -> None:
        """Refuse a state that holds what the trace would take for a constant."""
        found = not_carried(state)
        if found is not None:
            path, what = found
            raise self._error(
                f"keeps {what} as state `{path}`"
                if path
                else f"has {what} for its `self.state[p]`",
                "keep what it holds as states of their own, `self.state[p][name] = value`, each a "
                "tensor, a number, a string, a boolean or None, or a list, tuple or dict of these",
            )

    def _check_apart(self, state: dict[str, Any], parameter: Any) -> None:
        """Refuse states in each other's memory: they are kept, and loaded, one by one."""
        names = {parameter: "p"}
        for name, value in state.items():
            if not isinstance(value, Tensor) or not value.dim():
                continue
            other = names.setdefault(compat.storage_key(value), name)
            if other != name:
                raise self._error(
                    f"keeps one memory as state `{name}` and as `{other}`",
                    "`.clone()` it, or keep it under one name",
                )

    def _check_group(self, group: dict[str, Any], changed: dict[str, Any]) -> None:
        tensors = [item for item in _leaves(list(group.values())) if isinstance(item, Tensor)]
        tensors = [t for t in tensors if compat.storage_key(t) in self.follower.mutated]
        if tensors or any(isinstance(item, Tensor) for item in _leaves(list(changed.values()))):
            raise self._error(
                "changes a tensor of its parameter group, which every parameter would repeat",
                "keep it in `self.state[p]`, or make it a Python number",
            )
        integers = {name for name in changed if type(self.group.values.get(name)) is int}
        if integers & self.group.constants:
            raise ChangingIntegers(integers & self.group.constants)

    def _error(self, what: str, remedy: str) -> UpdateError:
        return UpdateError(
            f"{type(self.optimizer).__name__}.step {what}, which a traced update cannot carry "
            f"from one step to the next: {remedy}."
        )


@dataclass(frozen=True)
class Slot:
    """Stands for one result of the graph in a new state or group entry."""

    index: int


def _empty_like(one: Tensor | ParameterInfo, layout: Tensor | ParameterInfo) -> Tensor:
    """An uninitialised tensor with the dtype and device of one and the layout of another."""
    stride = layout.stride() if isinstance(layout, Tensor) else layout.stride
    return torch.empty_strided(layout.shape, stride, dtype=one.dtype, device=one.device)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _leaves(item)
    else:
        yield value


def _copied(value: Any) -> Any:
    """A copy that later changes of lists and dictionaries do not reach."""
    if type(value) is dict:
        return {name: _copied(item) for name, item in value.items()}
    return type(value)(map(_copied, value)) if type(value) in (list, tuple) else value


class _Elsewhere:
    """Stands for an attribute that a step must not look into; says so if it does."""

    def __init__(self, optimizer: str, name: str) -> None:
        self._optimizer, self._name = optimizer, name

    def _refuse(self, *_: Any) -> Any:
        raise UpdateError(
            f"{self._optimizer}.step looks into its attribute `{self._name}`, where parameters, a "
            "module or another optimizer are, but an update is traced for one parameter at a "
            "time, which is in `self.param_groups` and nowhere else. Go through these, and keep "
            "what a parameter has of its own in its group or in `self.state[p]`. If it wraps "
            "another optimizer, give the step that one."
        )

    __getattr__ = __iter__ = __len__ = __contains__ = __getitem__ = _refuse


def _without_parameters(value: Any, parameters: Collection[int], stand_in: Any) -> Any:
    """An attribute's value with a stand-in wherever there are parameters, or their ``id``.

    While tracing, these are others than those in the groups, and have no gradients: a step that
    went through them would do nothing.
    """

    def is_theirs(item: Any) -> bool:
        is_id = type(item) is int and item in parameters
        return isinstance(item, (torch.optim.Optimizer, nn.Module)) or (
            is_id or id(item) in parameters
        )

    if type(value) not in (list, tuple, set, dict):
        return stand_in if is_theirs(value) else value
    if any(map(is_theirs, (*value, *value.values()) if type(value) is dict else value)):
        return stand_in
    if type(value) is dict:
        return {key: _without_parameters(item, parameters, stand_in) for key, item in value.items()}
    return type(value)(_without_parameters(item, parameters, stand_in) for item in value)


def _same(before: Any, after: Any) -> bool:
    if type(before) in (list, tuple, dict) and type(before) is type(after):
        if isinstance(before, dict) and list(before) != list(after):
            return False
        left, right = list(_leaves(before)), list(_leaves(after))
        return len(left) == len(right) and all(a is b for a, b in zip(left, right, strict=True))
    return before is after


def _store(value: Any, results: list[Any]) -> Any:
    """Move a value's tensors and symbolic numbers to ``results``; return what is left."""
    if isinstance(value, torch.SymBool):
        return bool(value)  # guarded: another outcome is another trace
    if isinstance(value, (Tensor, *compat.SYMBOLIC_SCALARS)):
        results.append(value)
        return Slot(len(results) - 1)
    if type(value) is dict:
        return {name: _store(item, results) for name, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)([_store(item, results) for item in value])
    return value


def _fill(template: Any, results: Sequence[Any]) -> Any:
    if type(template) is Slot:
        return results[template.index]
    if type(template) is dict:
        return {name: _fill(item, results) for name, item in template.items()}
    if type(template) in (list, tuple):
        return type(template)([_fill(item, results) for item in template])
    return template


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
                if any(isinstance(leaf, Tensor) for leaf in _leaves(value))
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
        if isinstance(number, compat.SYMBOLIC_SCALARS):
            name = names.get(compat.expression(number))
            if name is not None:
                node.meta.setdefault("source_name", name)


def _refuse_changing_conversions(
    env: compat.ScalarEnvironment, optimizer: str, changing: set[Any]
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
    env: compat.ScalarEnvironment, symbols: Sequence[Any]
) -> Callable[[Sequence[float | int]], bool] | None:
    """A Python predicate over the scalar inputs: whether the branches taken hold for them."""
    guards = compat.guard_sources(env)
    if not guards:
        return None
    functions = {f"function_{i}": derived[1] for i, derived in enumerate(env.derived)}
    lines = ["def guard(scalars):", f"    {', '.join(s.name for s in symbols)}, = scalars"]
    for i, (symbol, _, arguments) in enumerate(env.derived):
        sources = ", ".join(map(compat.python_source, arguments))
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
