"""Text that stands for values and programs: where texts are equal, so are these, in any process."""

from __future__ import annotations

import enum
import functools
import hashlib
import importlib
import os
import sys
import time
import types
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
import typing_extensions
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
"""Names that Dynamo notes with a graph: tracing it does not read them."""


class NoKeyError(Exception):
    """Something has no text that stands for it, so what depends on it cannot be looked up."""


def key_of(*parts: str) -> str:
    """Return a name, in hexadecimal digits, for texts that are equal only if it is."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def described(value: Any) -> str:
    """Return text that stands for a value; for a node that is its name.

    Raises: NoKeyError for what is not plain: a symbolic number, a tensor with elements, an object
    or a function of the user's.
    """
    kind = type(value)
    if kind in _PLAIN:
        return repr(value)
    if kind in _TORCH:
        return f"{kind.__name__} {value}"
    if kind is fx.Node:
        return value.name
    if isinstance(value, (tuple, list)):
        inside = ", ".join(described(item) for item in value)
        return f"{'list' if isinstance(value, list) else 'tuple'}[{inside}]"
    if kind in _UNORDERED:
        return f"set{{{', '.join(sorted(described(item) for item in value))}}}"
    if isinstance(value, Mapping):
        pairs = (f"{described(k)}: {described(v)}" for k, v in value.items())
        return f"map{{{', '.join(pairs)}}}"
    if kind is slice:
        return f"slice {described((value.start, value.stop, value.step))}"
    if isinstance(value, enum.Enum):
        return f"{kind.__module__}.{value}"
    if is_dataclass(value) and kind.__module__.startswith("zerofx."):
        pairs = (f"{f.name}={described(getattr(value, f.name))}" for f in fields(value))
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
    if found is function and place.startswith("zerofx.capture."):
        return place  # whose text is in the key of what is captured
    is_own = not isinstance(function, types.FunctionType) or _is_own(function.__code__.co_filename)
    if found is not function or not is_own or place.partition(".")[0] not in _MODULES:
        raise NoKeyError(f"function {place}")
    return place


_MODULES = ("torch", "operator", "_operator", "math", "builtins")


def _namespace(operator: Any) -> str:
    name = getattr(operator, "_qualified_op_name", None) or operator._schema.name
    return str(name).partition("::")[0]


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


@functools.cache
def described_package() -> str:
    """Return what stands for Python and the text of this package's files.

    Raises: NoKeyError if one has changed since it was imported: what runs is not what it says.
    """
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    # Two of the packages are links.
    paths = sorted(
        Path(folder, name)
        for folder, _, names in os.walk(root, followlinks=True)
        for name in names
        if name.endswith(".py")
    )
    texts = [path.read_text(encoding="utf-8") for path in paths]
    for path in paths:  # after they are read
        if path.stat().st_ctime > _IMPORTED_S:
            raise NoKeyError(f"a file that has changed since it was imported: {path}")
    return key_of(sys.version, *texts)


_IMPORTED_S = time.time()


def described_code(modules: Iterable[types.ModuleType]) -> str:
    """Return text for which functions and plain values modules hold, whoever put them there.

    Their code is that of torch's and of this package's files.

    Raises: NoKeyError if a function is from elsewhere: what it does, only its caller knows.
    """
    lines: list[str] = []
    for module in sorted(modules, key=lambda one: one.__name__):
        for name, value in sorted(vars(module).items()):
            if not (name.startswith("__") or isinstance(value, types.ModuleType)):
                place = f"{module.__name__}.{name}"
                if place in _NOT_TRACED:
                    continue
                lines.append(f"{place} {_held(value, module.__name__, place)}")
    return key_of(*lines)


_NOT_TRACED = ("torch.compile", f"{__name__}._IMPORTED_S")
"""No trace runs the first: Lightning puts a function of its own around it."""


def _held(value: Any, module: str, place: str, within: tuple[int, ...] = ()) -> str:
    """Return text for what is at a place of a module, ``within`` what holds it, by identities."""
    if isinstance(value, types.MethodType):
        return f"bound {_kept((value.__func__, value.__self__), place, within)}"
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    elif isinstance(value, property):
        value = value.fget
    elif isinstance(value, functools.cached_property):
        value = value.func
    elif isinstance(value, functools.partial):
        return f"partial {_kept((value.func, value.args, value.keywords), place, within)}"
    wrapped = None if isinstance(value, type) else getattr(value, "__dict__", {}).get("__wrapped__")
    inside = "" if wrapped is None else f" of {_held(wrapped, module, place, within)}"
    if isinstance(value, types.FunctionType):
        code = value.__code__
        is_generated = code.co_filename == "<string>" and place.rpartition(".")[2].startswith("__")
        if not (is_generated or _is_own(code.co_filename)):
            raise NoKeyError(f"a function of {code.co_filename} in the place of {place}")
        name = f"{value.__module__}.{value.__qualname__} {code.co_firstlineno}{inside}"
        cells = tuple(map(_contents, value.__closure__ or ()))
        beside = (value.__defaults__ or (), value.__kwdefaults__ or {}, cells)
        if id(value) in within or not any(beside):
            return name
        return f"{name} {_kept(beside, place, (*within, id(value), id(wrapped)))}"
    if isinstance(value, type):
        if value.__module__ != module:
            file = getattr(sys.modules.get(value.__module__), "__file__", None)
            package = value.__module__.partition(".")[0]
            is_built_in = package in (*_KINDS, *sys.builtin_module_names)
            if not (_is_own(file) if file else is_built_in):
                raise NoKeyError(f"a class of {value.__module__} in the place of {place}")
            return f"class {value.__module__}.{value.__qualname__}"
        members = (
            f"{name} {_held(held, module, f'{place}.{name}', within)}"
            for name, held in sorted(vars(value).items(), key=lambda pair: pair[0])
            if _is_run(held) or not name.startswith("__")
        )
        return "; ".join(members)
    if type(value) in _PLAIN:
        return repr(value)
    if isinstance(value, _BUILT_IN):
        bound = getattr(value, "__self__", None)
        if isinstance(bound, type):  # as the ``apply`` of an autograd function, from 2.15
            return f"{value.__name__} of {_held(bound, '', place, within)}{inside}"
        owner = getattr(value, "__objclass__", None) or bound
        of = getattr(owner, "__name__", "")
        return f"{type(value).__qualname__} {of}.{value.__name__}{inside}"
    kind = type(value)
    if callable(value) and kind.__module__.partition(".")[0] not in _KINDS:
        raise NoKeyError(f"a {kind.__module__}.{kind.__qualname__} in the place of {place}")
    return f"a {kind.__module__}.{kind.__qualname__}{inside}"


def _kept(value: Any, place: str, within: tuple[int, ...]) -> str:
    """Return text for what a function keeps: a default, a value that it closes over, an argument.

    Of objects, those attributes count that are plain.
    """
    kind = type(value)
    if kind in _PLAIN:
        return repr(value)
    if kind in _TORCH:
        return f"{kind.__name__} {value}"
    if isinstance(value, types.ModuleType):
        return f"module {value.__name__}"
    if isinstance(value, types.FunctionType):
        return _held(value, "", place, within)
    if id(value) in within:
        return "what it is in"
    within = (*within, id(value))
    if kind in (tuple, list):
        return f"{kind.__name__}[{', '.join(_kept(item, place, within) for item in value)}]"
    if kind in _UNORDERED:
        return f"set{{{', '.join(sorted(_kept(item, place, within) for item in value))}}}"
    if kind is dict:
        pairs = (f"{_kept(k, place, within)}: {_kept(v, place, within)}" for k, v in value.items())
        return f"map{{{', '.join(sorted(pairs))}}}"
    text = _held(value, "", place, within)
    attributes = {} if isinstance(value, type) else getattr(value, "__dict__", {})
    plain = sorted(f"{k}={v!r}" for k, v in attributes.items() if type(v) in (*_PLAIN, *_TORCH))
    return f"{text} {plain}" if plain else text


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing yet
        return None


def _is_run(member: Any) -> bool:
    """Return whether a member of a class is run, as a function is, and no text or note on it."""
    return callable(member) or isinstance(member, (classmethod, property))


_KINDS = (
    *("torch", "zerofx", "builtins", "collections", "functools", "operator"),
    *("types", "typing", "typing_extensions"),
)
"""Packages of what else may be called there."""


_BUILT_IN = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.ClassMethodDescriptorType,
    types.WrapperDescriptorType,
    types.MethodWrapperType,
    types.GetSetDescriptorType,
)


def _is_own(path: str) -> bool:
    """Return whether a file is torch's, this package's or of Python's own library.

    Or that of the decorators that torch marks what it wants to be rid of with.
    """
    is_installed = f"{os.sep}site-packages{os.sep}" in path and not path.startswith(_OWN[:2])
    return path == typing_extensions.__file__ or (path.startswith(_OWN) and not is_installed)


_OWN = tuple(
    os.path.dirname(os.path.abspath(path)) + os.sep
    for path in (torch.__file__, os.path.dirname(__file__), os.__file__)
)
