"""Updates traced from optimizers: symbolic scalars, operations recorded one by one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import sympy
import torch
import torch._dynamo
import torch.fx.traceback
from torch._dynamo.convert_frame import compile_lock
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.fx.experimental.proxy_tensor import (
    get_proxy_mode,
    get_proxy_slot,
    handle_sym_dispatch,
    make_fx,
)
from torch.fx.experimental.symbolic_shapes import DimDynamic, GuardOnDataDependentSymNode, ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._sympy.printers import PythonPrinter

DATA_DEPENDENT_ERRORS = (
    GuardOnDataDependentSymNode,
    DataDependentOutputException,
    DynamicOutputShapeException,
)
"""Errors of a trace that needs a tensor's value."""


DispatchMode = TorchDispatchMode

SYMBOLIC_SCALARS = (torch.SymFloat, torch.SymInt)


class ScalarEnvironment(ShapeEnv):
    """Makes symbolic scalars that know their current value, and collects guards on them.

    ``conversions`` lists the expressions that ``float()``, ``int()`` or C code turned into plain
    Python numbers, each with the frame that asked; ``derived`` the scalars made by ``derive``.
    Goes if torch offers scalar inputs to ``make_fx``, and all that is about it too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conversions: list[tuple[sympy.Expr, FrameType | None]] = []
        self.derived: list[tuple[sympy.Expr, Callable[..., float], list[Any]]] = []
        self._num_scalars = 0

    def evaluate_expr(self, orig_expr, *args, **kwargs):
        # A branch evaluates a Boolean; anything else is about to become a Python number.
        if not isinstance(orig_expr, sympy.logic.boolalg.Boolean) and orig_expr.free_symbols:
            self.conversions.append((orig_expr, sys._getframe(1)))
        return super().evaluate_expr(orig_expr, *args, **kwargs)

    def scalar(self, value: float | int) -> torch.SymFloat | torch.SymInt:
        """A symbolic scalar whose value is now ``value``."""
        source = ConstantSource(f"zerofx_scalar_{self._num_scalars}")
        self._num_scalars += 1
        symbol = self.create_unspecified_symbol(value, source, DimDynamic.DYNAMIC)
        make = self.create_symfloatnode if isinstance(value, float) else self.create_symintnode
        return make(symbol, hint=value, source=source)

    def derive(self, function: Callable[..., float], arguments: Sequence[Any]) -> torch.SymFloat:
        """``function(*arguments)`` as a new symbolic scalar, recorded in ``derived``."""
        hints = [a.node.hint if isinstance(a, SYMBOLIC_SCALARS) else a for a in arguments]
        if any(hint is None for hint in hints):
            return self.create_unbacked_symfloat()
        result = self.scalar(float(function(*hints)))
        self.derived.append((expression(result), function, [expression(a) for a in arguments]))
        return result

    def fake_tensors(self) -> FakeTensorMode:
        """A mode whose tensors have static shapes and scalars of this environment."""
        return FakeTensorMode(shape_env=self, allow_non_fake_inputs=True, static_shapes=True)


def expression(scalar: Any) -> Any:
    """The sympy expression of a symbolic scalar; a plain number is its own."""
    return scalar.node.expr if isinstance(scalar, SYMBOLIC_SCALARS) else scalar


def python_source(expr: Any) -> str:
    """A sympy expression as Python source over the names of its symbols.

    sympy's own printer does not know torch's functions.
    """
    return PythonPrinter().doprint(expr) if isinstance(expr, sympy.Basic) else repr(expr)


def guard_sources(env: ScalarEnvironment) -> list[str]:
    """The conditions under which a trace holds, as Python expressions."""
    return [python_source(guard.expr) for guard in env.guards]


def record_scalar_call(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Call ``function`` on symbolic scalars and record it as a node of the current trace."""
    return handle_sym_dispatch(function, arguments, {})


def trace_operations(function: Callable[..., Any], inputs: Sequence[Any]) -> torch.fx.GraphModule:
    """Record the aten operations and scalar arithmetic of ``function(*inputs)`` as a graph.

    What is compiled already is traced as the function that it was compiled from.
    """
    uncompiled = torch._dynamo.config.patch(error_on_nested_fx_trace=False)
    with compile_lock:  # fx patches itself for a whole process; Dynamo holds this lock then
        with torch.fx.traceback.preserve_node_meta(), uncompiled:
            return make_fx(function, tracing_mode="real", _allow_non_fake_inputs=True)(*inputs)


def traced_node(tensor: torch.Tensor) -> torch.fx.Node | None:
    """The node that stands for a tensor in the trace under way; None if it is not in it."""
    mode = get_proxy_mode()
    proxy: Any = get_proxy_slot(tensor, mode.tracer, None) if mode is not None else None
    return proxy.proxy.node if proxy is not None else None


def set_source_line(text: str) -> None:
    """Give the nodes recorded from here on this line as their ``stack_trace``."""
    torch.fx.traceback.set_stack_trace([text])
