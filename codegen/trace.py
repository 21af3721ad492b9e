"""Trace the update of one parameter from the optimizer's own Python ``step``.

The trace is an FX graph of aten operations and Python scalar arithmetic.  Hyperparameters and
Python numbers in the state are inputs of it, so a learning rate may change without a retrace,
and scalar arithmetic stays in doubles as in eager mode: the two agree bitwise.  Where the
optimizer branches on a number, the branch taken is kept as a guard over these inputs.
"""

from __future__ import annotations

import builtins
import inspect
import math
import os
import types
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from zerofx import compat
from zerofx.codegen.elementwise import (
    UpdateError,
    check_elementwise,
    fit_to_shards,
    mutated_operands,
)
from zerofx.plan import ParameterInfo

aten = torch.ops.aten

# What tells the single-tensor form of torch's optimizers from the others.
_SINGLE_TENSOR = {"foreach": False, "fused": False, "differentiable": False}


@dataclass(frozen=True)
class Arguments:
    """What a parameter group, or a parameter's state, gives to one run of the update.

    ``key`` is all of it that a trace depends on, in the order of its values; what changes
    freely between runs is in ``tensors`` and ``scalars``.
    """

    values: Mapping[str, Any]
    key: tuple
    tensors: tuple[Tensor, ...]
    scalars: tuple[float | int, ...]


def read_arguments(
    values: Mapping[str, Any], *, shard_shape: tuple[int, ...] | None, inputs: Any
) -> Arguments:
    """Sort what an update reads into run-time inputs and constants.

    Tensors and finite floats are inputs; an int is one if its name is in ``inputs``.  A tensor
    of ``shard_shape`` stands for a whole one, of the parameter's shape.  The value of a 0-dim
    CPU tensor is an input next to the tensor: reading it costs no synchronisation, and branches
    on it can then be guarded.
    """
    tensors: list[Tensor] = []
    scalars: list[float | int] = []

    def describe(value: Any, is_input: bool) -> Hashable:
        if isinstance(value, Tensor):
            tensors.append(value)
            if value.ndim == 0 and value.device.type == "cpu" and _has_number(value):
                scalars.append(value.item())
                return ("scalar tensor", value.dtype, is_input and _counts_exactly(value))
            if value.shape == shard_shape:
                return ("shard", value.dtype, value.device)
            return ("tensor", value.dtype, value.device, tuple(value.shape), value.stride())
        if isinstance(value, float) and math.isfinite(value):
            scalars.append(float(value))
            return "number"
        if isinstance(value, int) and not isinstance(value, bool) and is_input:
            scalars.append(int(value))
            return "number"
        if type(value) in (list, tuple):
            return (type(value), *(describe(item, is_input) for item in value))
        if type(value) is dict:
            return (dict, *((name, describe(item, is_input)) for name, item in value.items()))
        return _Constant(value)

    key = tuple((name, describe(value, name in inputs)) for name, value in values.items())
    return Arguments(values, key, tuple(tensors), tuple(scalars))


def group_values(group: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter group's hyperparameters, set to torch's single-tensor implementation."""
    # Sorted: groups that name some of them themselves hold them in another order.
    values = {name: group[name] for name in sorted(group) if name != "params"}
    return values | {name: value for name, value in _SINGLE_TENSOR.items() if name in values}


@dataclass(frozen=True)
class Update:
    """The traced update of one parameter; call it to update in place.

    ``guard`` says whether the branches taken while tracing hold for other scalars (None: they
    always do).  ``conversions`` are the lines that made a plain number of a hyperparameter,
    which is why another value of it needs another trace.
    """

    graph_module: fx.GraphModule
    guard: Callable[[Sequence[float | int]], bool] | None
    state: tuple[tuple[str, Any], ...]
    group: tuple[tuple[str, Any], ...]
    clones_gradient: bool
    conversions: tuple[str, ...]

    def __call__(
        self, parameter: Tensor, gradient: Tensor, tensors: Sequence[Tensor], scalars: Sequence
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Update ``parameter`` in place; return its new state and the group's changed entries."""
        if self.clones_gradient:
            gradient = gradient.clone()
        results = self.graph_module.forward(parameter, gradient, *tensors, *scalars)
        state = {name: _fill(template, results) for name, template in self.state}
        return state, {name: _fill(template, results) for name, template in self.group}


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
        layout = (info.shape, info.stride)
        parameter = _empty(*layout, info.dtype, info.device)
        gradient = _empty(*layout, info.dtype, info.device)
        tensors = [
            _empty(*layout, kind[1], kind[2])
            if kind[0] == "shard"
            else _empty(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)
            for tensor, kind in zip(
                (*group.tensors, *state.tensors), _tensor_kinds(group.key + state.key), strict=True
            )
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
                f"computes, at {_innermost_line(error)}: a traced update cannot branch on it. "
                "Write both outcomes with torch.where, or keep the number in the parameter group."
            ) from error
        except (UpdateError, ChangingIntegers):
            raise
        except Exception as error:
            error.add_note(f"while zerofx traced {name}.step for parameter '{info.name}'")
            raise
    _refuse_changing_conversions(env, name, shadow_step.changing)
    _tidy(gm)
    if sharded:
        placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
        kinds = [("shard",), ("shard",), *_tensor_kinds(group.key + state.key)]
        # Placeholders of numbers follow those of tensors.
        paired = zip(placeholders, kinds, strict=False)
        whole = [node for node, kind in paired if kind[0] == "shard"]
        found = check_elementwise(gm, shape=info.shape, whole=whole, optimizer=name)
        fit_to_shards(gm, shape=info.shape, whole=found)
    gm.recompile()
    return Update(
        graph_module=gm,
        guard=_compile_guard(env, symbols),
        state=shadow_step.new_state,
        group=shadow_step.new_group,
        clones_gradient=shadow_step.uses_up_gradient,
        conversions=tuple(_frame_line(frame) for _, frame in env.conversions),
    )


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
        self.follower = _Follower()
        self.new_state: tuple[tuple[str, Any], ...] = ()
        self.new_group: tuple[tuple[str, Any], ...] = ()
        self.uses_up_gradient = False
        self.changing: set[Any] = set()

    def __call__(self, parameter: Tensor, gradient: Tensor, *inputs: Any) -> list[Any]:
        num_tensors = len(self.group.tensors) + len(self.state.tensors)
        # Now: a branch `x == 0` replaces the symbol of x by the number.
        symbols = {id(number): compat.expression(number) for number in inputs[num_tensors:]}
        tensors, scalars = iter(inputs[:num_tensors]), iter(inputs[num_tensors:])
        group = self._rebuild(self.group, tensors, scalars)
        state = self._rebuild(self.state, tensors, scalars)
        given = {name: _copied(value) for name, value in group.items()}
        numbers = dict(self.follower.values)
        keys = (compat.storage_key(parameter), compat.storage_key(gradient))
        parameter.grad = gradient

        shadow = self._shadow(parameter, {"params": [parameter], **group}, state)
        attributes = dict(shadow.__dict__)
        with _TensorsOfNumbers(), self.follower:
            type(shadow).step(shadow)
        if compat.storage_key(parameter) != keys[0]:
            raise self._error("assigns `p.data`", "write into it: `p.data.copy_(value)`")
        self._check_attributes(shadow, attributes, parameter)

        results: list[Any] = []
        new_state = shadow.state.get(parameter, {})
        self.new_state = tuple((name, _store(value, results)) for name, value in new_state.items())
        kept = {compat.storage_key(item) for item in results if isinstance(item, Tensor)}
        self.uses_up_gradient = keys[1] in kept | self.follower.mutated
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

    def _rebuild(self, arguments: Arguments, tensors: Iterator, scalars: Iterator) -> dict:
        """The group or state with symbolic inputs in place of its tensors and numbers."""

        def rebuild(value: Any, kind: Any) -> Any:
            if isinstance(kind, _Constant):
                return value
            if kind == "number":
                return next(scalars)
            if kind[0] is dict:
                return {name: rebuild(value[name], item) for name, item in kind[1:]}
            if kind[0] in (list, tuple):
                return kind[0](rebuild(item, k) for item, k in zip(value, kind[1:], strict=True))
            tensor = next(tensors)
            if kind[0] == "scalar tensor":
                self.follower.know(tensor, next(scalars), counts=kind[2])
            return tensor

        return {name: rebuild(arguments.values[name], kind) for name, kind in arguments.key}

    def _shadow(self, parameter: Tensor, group: dict, state: dict) -> torch.optim.Optimizer:
        shadow = object.__new__(_class_with_symbolic_math(type(self.optimizer), self.env))
        shadow.__dict__.update(self.optimizer.__dict__)
        shadow.__dict__.pop("step", None)  # LR schedulers wrap it on the instance
        for name in shadow.__dict__:
            if name.startswith("_optimizer_") and name.endswith("_hooks"):
                shadow.__dict__[name] = {}
        shadow.state = defaultdict(dict)
        if state:
            shadow.state[parameter] = state
        shadow.param_groups = [group]
        return shadow

    def _check_attributes(self, shadow: Any, before: dict[str, Any], parameter: Tensor) -> None:
        for name, value in shadow.__dict__.items():
            if name not in before or before[name] is not value:
                raise self._error(
                    f"changes its attribute `{name}`",
                    "keep it in `self.state[p]`, or in the parameter group",
                )
        if any(key is not parameter for key in shadow.state):
            raise self._error(
                "keeps state that belongs to no parameter", "keep it in the parameter group"
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
        constants = {name for name, kind in self.group.key if isinstance(kind, _Constant)}
        if integers & constants:
            raise ChangingIntegers(integers & constants)

    def _error(self, what: str, remedy: str) -> UpdateError:
        return UpdateError(
            f"{type(self.optimizer).__name__}.step {what}, which a traced update cannot carry "
            f"from one step to the next: {remedy}."
        )


class _Follower(compat.DispatchMode):
    """Knows the values of 0-dim tensors during a trace, and which source line runs.

    ``step += 1`` on such a tensor is followed exactly, and ``.item()`` then gives a number that
    can be branched on.  Any other write makes the value unknown: it may round.
    """

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[int, Any] = {}
        self.mutated: set[int] = set()
        self._counts: set[int] = set()
        self.last_read = "item"
        self._makers: dict[int, str] = {}
        self._alive: list[Tensor] = []  # a freed storage's key may be another's later

    def know(self, tensor: Tensor, value: Any, *, counts: bool) -> None:
        """Take ``value`` for the tensor's; ``counts``: adding integers to it does not round."""
        self._alive.append(tensor)
        self.values[compat.storage_key(tensor)] = value
        (self._counts.add if counts else self._counts.discard)(compat.storage_key(tensor))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        compat.set_source_line(_calling_line())
        if func is aten._local_scalar_dense.default:
            key = compat.storage_key(args[0])
            if key in self.values:
                return self.values[key]
            self.last_read = self._makers.get(key, "item")
            return func(*args, **kwargs)
        if func in _LIFTS and args[0].numel() == 1:
            # torch folds arithmetic on lifted constants, and gives NaN where the other operand
            # is symbolic (2.11 to 2.15).  A factory call is not folded.
            constant = args[0].item()
            result = aten.full.default(
                list(args[0].shape), constant, dtype=args[0].dtype, device=args[0].device
            )
            self.know(result, constant, counts=float(constant).is_integer())
            return result
        known = self._known_result(func, args, kwargs)
        result = func(*args, **kwargs)
        for written in mutated_operands(func, args, kwargs):
            self.mutated.add(compat.storage_key(written))
            self.values.pop(compat.storage_key(written), None)
        if isinstance(result, Tensor) and result.numel() == 1:
            self._alive.append(result)
            if func is not aten.detach.default:
                self._makers[compat.storage_key(result)] = str(func)
            if known is not None:
                self.know(result, known[0], counts=known[1])
        return result

    def _known_result(
        self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[Any, bool] | None:
        """The number that the result of an operation holds exactly, and whether it counts."""
        if func in _FILLS and list(args[0]) == []:
            value = args[1] if func is aten.full.default else _FILLS[func]
            dtype = kwargs.get("dtype") or torch.get_default_dtype()
            if isinstance(value, (int, float)) and float(value).is_integer():
                return float(value) if dtype.is_floating_point else int(value), True
            return None
        if not args or not isinstance(args[0], Tensor):
            return None
        key = compat.storage_key(args[0])
        if key not in self.values:
            return None
        value = self.values[key]
        if func is aten.clone.default:
            return value, key in self._counts
        if key not in self._counts or len(args) != 2 or kwargs:
            return None
        if not isinstance(args[1], (int, float)) or not float(args[1]).is_integer():
            return None
        if func in (aten.add_.Tensor, aten.add.Tensor):
            return value + args[1], True
        if func in (aten.sub_.Tensor, aten.sub.Tensor):
            return value - args[1], True
        return None


_LIFTS = (aten.lift_fresh.default, aten.lift_fresh_copy.default)
_FILLS = {aten.zeros.default: 0, aten.ones.default: 1, aten.full.default: None}


class _TensorsOfNumbers(torch.overrides.TorchFunctionMode):
    """Makes ``torch.tensor(x)`` of a symbolic number without making it a plain one."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor, torch.scalar_tensor):
            if args and isinstance(args[0], compat.SYMBOLIC_SCALARS):
                default = torch.get_default_dtype()
                is_float = isinstance(args[0], torch.SymFloat)
                dtype = kwargs.get("dtype") or (default if is_float else torch.int64)
                return torch.full((), args[0], dtype=dtype, device=kwargs.get("device"))
        return func(*args, **kwargs)


class _Constant:
    """A value that a trace depends on; equal to another of the same type and value."""

    __slots__ = ("token", "value")

    def __init__(self, value: Any) -> None:
        self.value = value  # kept alive: the token may be its id
        plain = value is None or isinstance(value, (bool, int, str, torch.dtype, torch.device))
        # repr: NaN is not equal to itself, and would be traced again at every step.
        self.token = value if plain else repr(value) if type(value) is float else id(value)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _Constant)
            and type(self.value) is type(other.value)
            and self.token == other.token
        )

    def __hash__(self) -> int:
        return hash(self.token)


@dataclass(frozen=True)
class _Slot:
    """Stands for one result of the graph in a new state or group entry."""

    index: int


def constant_attributes(optimizer: torch.optim.Optimizer) -> tuple:
    """The numbers and strings that a step can read off the optimizer itself: part of the key."""
    plain = (bool, int, float, str)
    defaults = getattr(optimizer, "defaults", {}).items()
    return tuple(
        (name, _Constant(value))
        for items in (optimizer.__dict__.items(), defaults)
        for name, value in items
        if isinstance(value, plain) and name not in ("_opt_called", "_step_count")
    )


def _has_number(tensor: Tensor) -> bool:
    if tensor.dtype is torch.bool or tensor.is_complex():
        return False
    return not tensor.is_floating_point() or math.isfinite(tensor.item())


def _counts_exactly(tensor: Tensor) -> bool:
    """Whether adding small integers to a 0-dim tensor is exact, as for a step count."""
    if not tensor.is_floating_point():
        return True
    value = tensor.item()
    return value.is_integer() and abs(value) < 1 / torch.finfo(tensor.dtype).eps


def _empty(shape: tuple, stride: tuple, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype, device=device)


def _tensor_kinds(key: Any) -> Iterator[tuple]:
    """The descriptions of the tensors in a key, in order."""
    if not isinstance(key, tuple) or not key:
        return
    if key[0] in ("shard", "scalar tensor", "tensor"):
        yield key
        return
    for item in key:
        yield from _tensor_kinds(item)


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


def _same(before: Any, after: Any) -> bool:
    if type(before) in (list, tuple, dict) and type(before) is type(after):
        if isinstance(before, dict) and list(before) != list(after):
            return False
        left, right = list(_leaves(before)), list(_leaves(after))
        return len(left) == len(right) and all(a is b for a, b in zip(left, right, strict=True))
    return before is after


def _store(value: Any, results: list[Any]) -> Any:
    """Move a value's tensors and symbolic numbers to ``results``; return what is left."""
    if isinstance(value, (Tensor, *compat.SYMBOLIC_SCALARS)):
        results.append(value)
        return _Slot(len(results) - 1)
    if type(value) is dict:
        return {name: _store(item, results) for name, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)([_store(item, results) for item in value])
    return value


def _fill(template: Any, results: Sequence[Any]) -> Any:
    if type(template) is _Slot:
        return results[template.index]
    if type(template) is dict:
        return {name: _fill(item, results) for name, item in template.items()}
    if type(template) in (list, tuple):
        return type(template)([_fill(item, results) for item in template])
    return template


def _class_with_symbolic_math(optimizer_class: type, env: compat.ScalarEnvironment) -> type:
    """A subclass whose methods may call ``math.sqrt`` and ``float`` on symbolic numbers.

    Their functions are copied with other globals; the optimizer's own module stays as it is.
    Methods reached through ``super()`` are not copied.
    """

    def symbolic(function: Callable[..., float]) -> Callable[..., Any]:
        def on_symbols(*arguments: Any) -> Any:
            return env.derive(function, arguments)

        on_symbols.function = function  # type: ignore[attr-defined]

        def call(*arguments: Any) -> Any:
            if any(isinstance(argument, compat.SYMBOLIC_SCALARS) for argument in arguments):
                return compat.record_scalar_call(on_symbols, arguments)
            return function(*arguments)

        return call

    class KindOfFloat(type):
        def __instancecheck__(cls, value: Any) -> bool:
            return isinstance(value, (builtins.float, torch.SymFloat))

        def __call__(cls, value: Any = 0.0) -> Any:
            known = isinstance(value, compat.SYMBOLIC_SCALARS)
            return torch.sym_float(value) if known else builtins.float(value)

    symbolic_float = KindOfFloat("float", (), {})
    functions = {getattr(math, name): symbolic(getattr(math, name)) for name in _MATH}
    namespace = types.SimpleNamespace(
        **vars(math) | {function.__name__: call for function, call in functions.items()}
    )
    copies: dict[int, Any] = {}

    def copied_globals(original: dict[str, Any]) -> dict[str, Any]:
        if id(original) in copies:
            return copies[id(original)]
        copies[id(original)] = result = dict(original)
        for name, value in original.items():
            if value is math:
                result[name] = namespace
            elif isinstance(value, types.BuiltinFunctionType) and value in functions:
                result[name] = functions[value]
            elif isinstance(value, types.FunctionType) and value.__globals__ is original:
                result[name] = copied(value)
        result.setdefault("float", symbolic_float)
        return result

    def copied(function: types.FunctionType) -> types.FunctionType:
        if id(function) in copies:
            return copies[id(function)]
        # Inside torch, only decorators such as no_grad are copied, for what they close over.
        inside_torch = function.__module__.partition(".")[0] == "torch"
        cells = [types.CellType() for _ in function.__closure__ or ()]
        names = function.__globals__ if inside_torch else copied_globals(function.__globals__)
        result = types.FunctionType(
            function.__code__, names, function.__name__, function.__defaults__, tuple(cells)
        )
        result.__kwdefaults__ = function.__kwdefaults__
        copies[id(function)] = result
        for cell, original in zip(cells, function.__closure__ or (), strict=True):
            try:
                content = original.cell_contents
            except ValueError:  # a name that is not bound yet
                continue
            is_function = isinstance(content, types.FunctionType)
            cell.cell_contents = copied(content) if is_function else content
        return result

    methods = {}
    for base in reversed(optimizer_class.__mro__):
        if base in torch.optim.Optimizer.__mro__:
            continue
        for name, member in vars(base).items():
            if getattr(member, "hooked", False):
                member = member.__wrapped__  # torch's profiling and hooks around a step
            if isinstance(member, types.FunctionType):
                methods[name] = copied(member)
            elif isinstance(member, staticmethod):
                methods[name] = staticmethod(copied(member.__func__))
    return type(optimizer_class.__name__, (optimizer_class,), methods)


# Functions of a number that give a float.  The others (floor, isnan) work through the number's
# own methods.
_MATH = (
    *("sqrt", "exp", "log", "log2", "log10", "log1p", "expm1", "pow", "fabs", "hypot"),
    *("sin", "cos", "tan", "asin", "acos", "atan", "atan2", "sinh", "cosh", "tanh", "erf"),
)


def _tidy(gm: fx.GraphModule) -> None:
    """Call ``math`` functions directly, and drop the profiler's marks of a nested step."""
    for node in reversed(list(gm.graph.nodes)):
        if node.op != "call_function":
            continue
        node.target = getattr(node.target, "function", node.target)
        if getattr(node.target, "namespace", "") == "profiler":
            gm.graph.erase_node(node)


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
                f"{_frame_line(frame)}, so every step would be traced anew. Keep it symbolic: use "
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


_TORCH = os.path.dirname(torch.__file__) + os.sep
_OPTIMIZERS = os.path.join(_TORCH, "optim", "")
_NOT_USER_CODE = {__file__, compat.__file__, os.path.join(_OPTIMIZERS, "optimizer.py")}


def _is_optimizer_source(filename: str) -> bool:
    """Whether a file is the user's, or one of torch's optimizers."""
    if filename in _NOT_USER_CODE or filename.startswith("<"):
        return False
    return not filename.startswith(_TORCH) or filename.startswith(_OPTIMIZERS)


def _frame_line(frame: types.FrameType | None) -> str:
    """``file:line`` of the innermost frame that is the optimizer's source."""
    while frame is not None and not _is_optimizer_source(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else "?"


def _calling_line() -> str:
    """The optimizer's source line being run, as a traceback writes it."""
    filename, _, line = _frame_line(inspect.currentframe()).rpartition(":")
    return f'File "{filename}", line {line}, in step'


def _innermost_line(error: BaseException) -> str:
    """``file:line`` in the optimizer's source where an error was raised."""
    found, trace = "?", error.__traceback__
    while trace is not None:
        filename = trace.tb_frame.f_code.co_filename
        if _is_optimizer_source(filename):
            found = f"{filename}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found
