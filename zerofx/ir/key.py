"""Text that stands for values and programs: where texts are equal, so are these, in any process."""

from __future__ import annotations

import enum
import functools
import hashlib
import importlib
import os
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import fx, nn

from zerofx import compat

NAMESPACES = ("aten", "prims", "zerofx")
"""Namespaces of operators that do the same in every process with the same torch and zerofx."""

_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(...), range)
_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_UNORDERED = (set, frozenset)

HIGHER_ORDER = (
    "autograd_function_apply",
    "cond",
    "scan",
    "tag_activation_checkpoint",
    "while_loop",
)
"""Operators over graphs that are all that they depend on."""

NOT_READ = frozenset({"backend_id", "dynamo_compile_id", "dynamo_flat_name_to_original_fqn"})
"""What Dynamo notes of a graph that nothing which traces it reads."""


class NoKeyError(Exception):
    """Something has no text that stands for it, so what depends on it cannot be looked up."""


def key_of(*parts: str) -> str:
    """Return a name, in hexadecimal digits, for texts that are equal only if it is."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def described(value: Any, name: Callable[[fx.Node], str] = lambda node: node.name) -> str:
    """Return text that stands for a value; ``name`` gives it for nodes.

    Raises: NoKeyError for what is not plain: a symbolic number, a tensor with elements, an object
    or a function of the user's.
    """
    kind = type(value)
    if kind in _PLAIN:
        return repr(value)
    if kind in _TORCH:
        return f"{kind.__name__} {value}"
    if kind is fx.Node:
        return name(value)
    if isinstance(value, (tuple, list)):
        inside = ", ".join(described(item, name) for item in value)
        return f"{'list' if isinstance(value, list) else 'tuple'}[{inside}]"
    if kind in _UNORDERED:
        return f"set{{{', '.join(sorted(described(item, name) for item in value))}}}"
    if isinstance(value, Mapping):
        pairs = (f"{described(k, name)}: {described(v, name)}" for k, v in value.items())
        return f"map{{{', '.join(pairs)}}}"
    if kind is slice:
        return f"slice {described((value.start, value.stop, value.step), name)}"
    if isinstance(value, enum.Enum):
        return f"{kind.__module__}.{value}"
    if is_dataclass(value) and kind.__module__.startswith("zerofx."):
        pairs = (f"{f.name}={described(getattr(value, f.name), name)}" for f in fields(value))
        return f"{kind.__qualname__}({', '.join(pairs)})"
    if callable(value):
        return _function(value)
    raise NoKeyError(f"{kind.__module__}.{kind.__qualname__}")


def _function(function: Any) -> str:
    """Name an operator of ours or torch's, or a function that torch or Python has under its name.

    A function that somebody has put in its place is none of torch's.
    """
    if isinstance(function, torch._ops.OpOverload | type(torch.ops.aten.add)):
        if _namespace(function) in NAMESPACES:
            return f"{type(function).__name__} {function}"
        raise NoKeyError(f"operator {function}")
    if compat.inductor.is_higher_order(function):
        if function.name() in HIGHER_ORDER:
            return f"higher order {function.name()}"
        raise NoKeyError(f"operator {function.name()}")
    try:
        place = compat.aot.name_of_function(function)
        owner, _, last = place.rpartition(".")
        found = getattr(_resolved(owner), last, None)
    except Exception:  # it has no name, or none of a module
        place, found = repr(function), None
    is_own = not isinstance(function, types.FunctionType) or _is_of_torch(function)
    if found is not function or not is_own or place.partition(".")[0] not in _MODULES:
        raise NoKeyError(f"function {place}")
    return place


_MODULES = ("torch", "operator", "_operator", "math", "builtins")


def _namespace(operator: Any) -> str:
    name = getattr(operator, "_qualified_op_name", None) or operator._schema.name
    return str(name).partition("::")[0]


def _is_of_torch(function: types.FunctionType) -> bool:
    return function.__code__.co_filename.startswith(os.path.dirname(torch.__file__) + os.sep)


def _resolved(path: str) -> Any:
    """Return the module, or what is inside one, that a dotted name stands for."""
    owner, *rest = path.split(".")
    found: Any = importlib.import_module(owner)
    for part in rest:
        found = getattr(found, part, None)
    return found


def described_graph(gm: fx.GraphModule, meta: Iterable[str]) -> str:
    """Return text that stands for a graph, with the graphs in it and these metadata of its nodes.

    Raises: NoKeyError.
    """
    lines = [described({key: each for key, each in gm.meta.items() if key not in NOT_READ})]
    for node in gm.graph.nodes:
        target = described(node.target) if callable(node.target) else node.target
        if node.op == "call_module":
            raise NoKeyError(f"module {node.target}")
        if node.op == "get_attr":
            inner: Any = gm
            for part in str(node.target).split("."):
                inner = getattr(inner, part)
            if not isinstance(inner, fx.GraphModule):
                raise NoKeyError(f"constant {node.target}")
            target = f"{target} {{{described_graph(inner, meta)}}}"
        noted = "; ".join(_noted(node.meta[key]) for key in meta if key in node.meta)
        call = f"{described(node.args)} {described(node.kwargs)}"
        lines.append(f"{node.op} {node.name} {target} {call} {noted}")
    return "\n".join(lines)


def _noted(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return described_tensor(value)
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(_noted, value))}]"
    return described(value)


def described_tensor(tensor: torch.Tensor) -> str:
    """Return text for all of a tensor but its elements and where in its memory it begins.

    Dynamo's guards leave that open too.  Raises: NoKeyError for a subclass.
    """
    if not compat.tensors.is_fake(tensor) and type(tensor) not in (torch.Tensor, nn.Parameter):
        raise NoKeyError(f"a tensor of {type(tensor).__qualname__}")
    return described(
        (
            isinstance(tensor, nn.Parameter),
            tensor.dtype,
            tensor.device,
            tuple(tensor.shape),
            tensor.stride(),
            tensor.layout,
            tensor.requires_grad,
            tensor.is_conj(),
            tensor.is_neg(),
        )
    )


def described_code(modules: Iterable[types.ModuleType]) -> str:
    """Return text for the functions and plain values that modules hold, whoever put them there."""
    lines: list[str] = []
    for module in sorted(modules, key=lambda one: one.__name__):
        for name, value in sorted(vars(module).items()):
            if not (name.startswith("__") or isinstance(value, types.ModuleType)):
                lines.append(f"{module.__name__}.{name} {_code(value, module.__name__)}")
    return key_of(*lines)


def _code(value: Any, module: str, depth: int = 0) -> str:
    value = getattr(value, "__func__", value)  # of a method
    if isinstance(value, property):
        return ", ".join(_code(one, module, depth) for one in (value.fget, value.fset))
    if isinstance(value, functools.partial):
        return _code(value.func, module, depth)
    if isinstance(value, functools.cached_property):
        return _code(value.func, module, depth)
    if isinstance(value, functools._lru_cache_wrapper):
        return _code(value.__wrapped__, module, depth)
    if isinstance(value, types.FunctionType):
        cells = (cell.cell_contents for cell in value.__closure__ or () if cell != _EMPTY)
        held = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values(), *cells)
        inside = (_code(one, "", depth + 1) for one in held if depth < _DEEPEST)
        return key_of(_digest_of_code(value.__code__), *inside)
    if isinstance(value, type):
        if value.__module__ != module or depth > _DEEPEST:
            return f"class {value.__module__}.{value.__qualname__}"
        inside = (
            f"{name} {_code(held, module, depth + 1)}"
            for name, held in sorted(vars(value).items(), key=lambda pair: pair[0])
            if isinstance(held, types.FunctionType) or not name.startswith("__")
        )
        return "; ".join(inside)
    if type(value) in _PLAIN:
        return repr(value)
    return f"a {type(value).__module__}.{type(value).__qualname__}"


_EMPTY = types.CellType()
_DEEPEST = 2


def _digest_of_code(code: types.CodeType) -> str:
    constants = (
        _digest_of_code(each) if isinstance(each, types.CodeType) else _constant(each)
        for each in code.co_consts
    )
    return key_of(code.co_code.hex(), *code.co_names, *code.co_freevars, *constants)


def _constant(value: Any) -> str:
    return (
        "set " + ", ".join(sorted(map(repr, value))) if type(value) in _UNORDERED else repr(value)
    )
