"""Writes values, names and functions as dumped programs have them."""

from __future__ import annotations

import json
import pkgutil
import re
import textwrap
from typing import Any

import torch

from zerofx import compat
from zerofx.ir import ops

WIDTH = 100


def quoted_name(name: str) -> str:
    """Return a parameter's name, in quotes if a reader could not tell where it ends."""
    return name if re.fullmatch(r"[^\s,;:()\"\\]+", name) else json.dumps(name)


def comment(text: str) -> list[str]:
    """Return the lines of one comment; all but the first are indented."""
    wrapped = [text]
    if len(text) > WIDTH - 6:
        wrapped = textwrap.wrap(text, WIDTH - 10, break_long_words=False, break_on_hyphens=False)
    return [f"    # {wrapped[0]}", *(f"    #     {line}" for line in wrapped[1:])]


def value_text(value: Any) -> str:
    """``f32[5, 3]cpu`` for a tensor; with its strides if they are not those of its shape."""
    if isinstance(value, tuple | list):
        return f"({', '.join(map(value_text, value))})"
    if not isinstance(value, torch.Tensor):
        return "" if value is None else one_line(without_addresses(str(value)))
    dtype = compat.tensors.short_dtypes.get(value.dtype) or str(value.dtype).removeprefix("torch.")
    shape = ", ".join(map(str, value.shape))
    strides = ""
    sizes = [*value.shape, *value.stride()]
    if all(type(size) is int for size in sizes) and not value.is_contiguous():
        strides = f"[{', '.join(map(str, value.stride()))}]"
    return f"{dtype}[{shape}]{strides}{value.device}"


EXACT = {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool}
EXACT |= {torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8}
"""Dtypes whose elements Python's literals reproduce bit by bit."""


def target_text(target: Any) -> str | None:
    """Return the name by which a program calls a function; None if no import finds it."""
    if isinstance(target, torch._ops.OpOverload):
        namespace, name = target._schema.name.split("::")
        if ops.is_ours(target):
            return f"zerofx.{name}"  # its arguments tell its overload
        known = namespace if namespace in ("aten", "prims") else f"torch.ops.{namespace}"
        return f"{known}.{name}.{target._overloadname}"
    module, name = getattr(target, "__module__", None), getattr(target, "__qualname__", None)
    module = {"_operator": "operator"}.get(module or "", module)
    if not module or not name or not re.fullmatch(r"[\w.]+", name):
        return None
    if module == "builtins":
        return name
    if module != "operator" and module.split(".")[0] != "torch":
        return None
    try:
        found = pkgutil.resolve_name(f"{module}:{name}")
    except (ImportError, AttributeError, ValueError):
        return None
    return f"{module}.{name}" if found is target else None


class AsItIs(str):
    """Text that a list, tuple or dict shows without quotes."""

    __repr__ = str.__str__


def literal_text(name: str, value: Any) -> str:
    """Return the assignment of a literal to a name; items of a dict, or dicts, have a line each."""
    match value:
        case {} if value:
            lines = [f"    {key!r}: {item!r}," for key, item in value.items()]
            return "\n".join([f"{name} = {{", *lines, "}"])
        case [dict() | str(), *_]:
            return "\n".join([f"{name} = [", *(f"    {item!r}," for item in value), "]"])
    return f"{name} = {value!r}"


def one_line(text: str) -> str:
    return " ".join(text.split())


def without_addresses(text: str) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", text)
