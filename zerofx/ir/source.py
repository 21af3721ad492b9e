"""Nodes as text: the user's line that each comes from, its call, and how its value is laid out."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import fx


def call_text(node: fx.Node, name: Callable[[fx.Node], str]) -> str:
    """A node's operation and arguments, its sources as ``name`` gives them."""
    arguments = fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: _Text(name(n)))
    return f"{node.op} {node.target} {arguments}"


class _Text(str):
    __repr__ = str.__str__


def layout_text(value: Any) -> str:
    """Describe a value without its elements: dtype, device, shape and strides."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {value.device} {tuple(value.shape)} {value.stride()}"
    return repr(value)


def source_line(node: fx.Node) -> str:
    """``file:line text`` of the user's line that a node comes from, or an empty string."""
    return " ".join(filter(None, source_of(node)))


def source_of(node: fx.Node) -> tuple[str, str]:
    """The user's line that a node comes from: ``file:line`` and its text; empty if none is known.

    Lines of torch and of this package are passed over: users look for their own.
    """
    found = "", ""
    for frame in _FRAME.finditer(node.meta.get("stack_trace") or node.stack_trace or ""):
        if found[0] and frame["path"].startswith(_LIBRARIES):
            continue
        path = " ".join(frame["path"].splitlines())  # for a name may have line breaks
        found = f"{path}:{frame['line']}", (frame["text"] or "").strip()
    return found


# A line of source may begin with File too, and is missing where its file is.
_FRAME = re.compile(
    r'^ *File "(?P<path>.*?)", line (?P<line>\d+)(?:, in [^\n]*)?'
    r'(?:\n(?! *File ")(?P<text>[^\n]*))?',
    re.MULTILINE | re.DOTALL,
)

_LIBRARIES = (
    os.path.dirname(torch.__file__) + os.sep,
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep,
)
