"""The rules of an operator: what the compiler knows of it beside its schema and its fake.

Whoever asks about a node reads them with ``rules``, so that a new operator is known everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

if TYPE_CHECKING:
    from zerofx.ir.parameters import ParameterTable

LINK, TO_HOST, TO_DEVICE = "link", "to host", "to device"
UPDATES, FILES = "updates", "files"
"""The lanes beside the device's compute; each does one thing after the other."""

OUTER_LINK = "outer link"
"""The lane of collectives along a mesh's outer axis; those along both are on both lanes."""


def _no_bytes(node: fx.Node, table: ParameterTable) -> float:
    return 0


@dataclass(frozen=True)
class Rules:
    """The rules that hold for every call of one operator.

    ``lane`` is what it keeps busy beside the step's compute, and ``starts`` says that its result is
    there only after a wait, which ``waits`` marks.

    ``shares`` are the operands whose memory the result may share though the schema is silent;
    ``gives_up`` says that the first operand's memory is not to be read again.  ``acts`` says that a
    call counts though nobody reads its result.

    ``carries`` are the bytes that it puts on its lane, the same on all ranks.  On the link these
    are ``sends``, of the buffer that the ranks make, in so many ``rounds``; ``traffic`` is what
    they count as.  ``memory_bytes`` and ``flops`` are what it computes with on the device.

    ``gathers``: it puts shards together.  ``reduces``: it combines what ranks have.  ``uniform``:
    what is made of its result does not differ between ranks.  ``updates`` gives the optimizer and
    the parameters that it updates.  ``holds`` is the kind of memory that its result is, and
    ``fake`` makes one without values.

    ``uncaptured`` says why a CUDA graph cannot hold a call; empty if it can.
    """

    lane: str | Callable[[fx.Node], str] = ""
    starts: bool = False
    waits: bool = False
    shares: Callable[[fx.Node], Sequence[Any]] | None = None
    gives_up: bool | Callable[[fx.Node], bool] = False
    acts: bool | Callable[[fx.Node], bool] = False
    carries: Callable[[fx.Node, ParameterTable], float] = _no_bytes
    sends: Callable[[fx.Node], int] = lambda node: 0
    rounds: Callable[[fx.Node], int] = lambda node: 1
    traffic: Callable[[fx.Node], str] = lambda node: ""
    memory_bytes: Callable[[fx.Node, ParameterTable], float] = _no_bytes
    flops: Callable[[fx.Node], int] = lambda node: 0
    fake: Callable[..., Any] | None = None
    gathers: bool = False
    reduces: bool = False
    uniform: bool = False
    updates: Callable[[fx.Node], tuple[int, list[int]]] | None = None
    holds: str | Callable[[fx.Node], str] = ""
    uncaptured: str | Callable[[fx.Node], str] = ""


NAMESPACE = "zerofx"

_library = torch.library.Library(NAMESPACE, "DEF")
_RULES: dict[Any, Rules] = {}
_BY_ID: dict[int, Rules] = {}
"""The same by the ``id`` of an operator: to hash one takes torch longer."""
_OF_OTHERS = Rules()


def define(schema: str, backward: Any = None, **rules: Any):
    """Define an operator with these rules; the decorated function is its fake implementation.

    One with a ``backward`` passes its first argument's gradient on, and has these for the others'.

    Raises: ValueError for a collective whose schema names no axis of the mesh.
    """
    if rules.get("starts") and rules.get("lane") == LINK and "str axis" not in schema:
        raise ValueError(f"{schema} is between ranks: say which, with str axis='data'")

    def register(fake):
        _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        qualified = schema.split("(", 1)[0]
        torch.library.register_fake(f"{NAMESPACE}::{qualified}", fake, lib=_library)
        if backward is not None:
            torch.library.register_autograd(
                f"{NAMESPACE}::{qualified}", lambda ctx, grad: (grad, *backward), lib=_library
            )
        name, _, overload = qualified.partition(".")
        packet = getattr(getattr(torch.ops, NAMESPACE), name)
        defined = getattr(packet, overload or "default")
        _RULES[defined] = _BY_ID[id(defined)] = Rules(fake=fake, **rules)
        return defined

    return register


def rules(node: fx.Node) -> Rules:
    """The rules of a node's operator; of what is none of ours, those that say nothing."""
    return _BY_ID.get(id(node.target), _OF_OTHERS)


def at(rule: Any, node: fx.Node) -> Any:
    """A rule as it is for one node: some depend on its arguments."""
    return rule(node) if callable(rule) else rule


def is_ours(target: Any) -> bool:
    """Return whether ``target`` is a ``zerofx::`` operator."""
    return isinstance(target, torch._ops.OpOverload) and target.namespace == NAMESPACE


def argument(node: fx.Node, name: str) -> Any:
    """One argument of a call of one of our operators, or what it is if not given."""
    for position, one in enumerate(node.target._schema.arguments):
        if one.name == name:
            if position < len(node.args):
                return node.args[position]
            return node.kwargs.get(name, one.default_value)
    raise KeyError(name)
