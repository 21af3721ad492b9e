"""The numbers of an update: arithmetic that is done once a step, on the host, for all elements.

A traced update mixes arithmetic on numbers (``1 - beta1 ** step``) with arithmetic on elements.
``NumberGraph`` takes the first out of it.  What is left is given its results by name: in double
precision where they are Python numbers, as in the optimizer's own step.
"""

from __future__ import annotations

import contextlib
import keyword
import operator
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from sympy.printing.str import StrPrinter
from torch import fx

from zerofx.ir.aliases import aliased_inputs, mutated_inputs

aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class Number:
    """A number that elements are combined with; ``formula`` says how the step computes it."""

    name: str
    formula: str


@dataclass(frozen=True)
class HostNumbers:
    """The arithmetic on numbers, as a program over the update's inputs.

    ``inputs`` are the positions of what it reads.  Calling it gives the first ``num_results``
    values for the update's results, and the others in the order of ``needed``.
    """

    graph_module: fx.GraphModule
    inputs: tuple[int, ...]
    num_results: int
    needed: tuple[Number, ...]

    def __call__(self, values: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        """Run on the update's inputs, whose 0-dim tensors it changes in place as the step does."""
        computed = self.graph_module.forward(*(values[position] for position in self.inputs))
        return computed[: self.num_results], computed[self.num_results :]


class NumberGraph:
    """Collects, in a program's order, the nodes that compute numbers."""

    def __init__(self, gm: fx.GraphModule, names: dict[fx.Node, str]) -> None:
        self._owner = gm
        self._graph = fx.Graph()
        self._copies: dict[fx.Node, fx.Node] = {}
        self._root: dict[fx.Node, fx.Node] = {}
        self._placeholders = gm.graph.find_nodes(op="placeholder")
        self._inputs: list[int] = []
        self._formulas: dict[fx.Node, Any] = {}  # of what each root's memory holds by now
        self._written: set[fx.Node] = set()
        self._input_names = names
        self._taken: set[str] = set(names.values())
        self._needed: dict[Any, tuple[Number, fx.Node]] = {}
        roots = roots_of(gm.graph)
        self._changes = {roots[target] for node in roots for target in mutated_inputs(node)}

    def add(self, node: fx.Node) -> None:
        """Take over a node that reads no elements."""
        if node.op == "placeholder":
            self._inputs.append(self._placeholders.index(node))
        self._copies[node] = self._graph.node_copy(node, self._copies.__getitem__)
        sources = aliased_inputs(node)
        self._root[node] = root = self._root[sources[0]] if sources else node
        is_written = bool(mutated_inputs(node))
        if is_written:
            self._written.add(root)
        if is_written or not sources:
            self._formulas[root] = self._formula(node)

    def alias(self, node: fx.Node, other: fx.Node) -> None:
        """Let a node of another graph stand for a number."""
        self._copies[node], self._root[node] = self._copies[other], self._root[other]

    def use(self, node: fx.Node) -> tuple[Number | int | float | bool, bool]:
        """Return the current partner of an element, and whether it is negated."""
        constant = _constant(node)
        if constant is not None:
            return constant, False
        if node.target in (operator.neg, aten.neg.default) and self._is_settled(node.args[0]):
            inner, negative = self.use(node.args[0])
            return inner, not negative
        if node.target is aten._local_scalar_dense.default and self._is_settled(node.args[0]):
            return self.use(node.args[0])
        root = self._root[node]
        formula = self._formulas[root]
        key = (formula, root if root in self._written else None)
        if key not in self._needed:
            copy = self._copies[node]
            if root in self._changes:  # perhaps after this use of it
                copy = self._graph.call_function(aten.clone.default, (copy,))
            number = Number(self._name(node, root), _Printer().doprint(formula))
            self._needed[key] = number, copy
        return self._needed[key][0], False

    def finish(self, results: Iterable[fx.Node]) -> HostNumbers:
        """The program that computes these results and all numbers in use."""
        kept = [self._copies[node] for node in results]
        self._graph.output([*kept, *(copy for _, copy in self._needed.values())])
        for node in reversed(list(self._graph.nodes)):
            if node.op == "call_function" and not node.users and not mutated_inputs(node):
                self._graph.erase_node(node)
        needed = tuple(number for number, _ in self._needed.values())
        gm = fx.GraphModule(self._owner, self._graph)
        return HostNumbers(gm, tuple(self._inputs), len(kept), needed)

    def _is_settled(self, node: Any) -> bool:
        """Return whether nothing has written to a number since it was computed."""
        return isinstance(node, fx.Node) and self._root[node] not in self._written

    def _name(self, node: fx.Node, root: fx.Node) -> str:
        """The input's own name, or what the optimizer calls the number, or what it is."""
        formula = self._formulas[root]
        if isinstance(formula, sympy.Symbol) and root not in self._written:
            return formula.name
        name = node.meta.get("source_name") or _in_words(formula) or "coefficient"
        name = unique(identifier(name), self._taken)
        self._taken.add(name)
        return name

    def _formula(self, node: fx.Node) -> Any:
        """The number as an expression of the inputs."""
        if node.op != "call_function":
            return sympy.Symbol(self._input_names.get(node, node.name))
        operands = [self._operand(operand) for operand in node.args]
        named = {name: self._operand(value) for name, value in node.kwargs.items()}
        rule = _FORMULAS.get(_bare_name(node.target))
        if rule is not None and named.keys() <= _OF_MEMORY:
            with contextlib.suppress(TypeError):  # of an overload with other operands
                return rule(*operands)
        return sympy.Function(_bare_name(node.target) or "f")(
            *map(_in_formula, operands),
            *(sympy.Function(name)(_in_formula(value)) for name, value in named.items()),
        )

    def _operand(self, value: Any) -> Any:
        if isinstance(value, fx.Node):
            return self._formulas[self._root[value]]
        if isinstance(value, float) and value.is_integer():
            return sympy.Integer(int(value))
        return sympy.sympify(value) if isinstance(value, (int, float)) else value


_FORMULAS = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "rsub": lambda a, b: b - a,
    "mul": lambda a, b: a * b,
    "truediv": lambda a, b: a / b,
    "div": lambda a, b: a / b,
    "pow": lambda a, b: a**b,
    "neg": lambda a: -a,
    "sqrt": sympy.sqrt,
    "exp": sympy.exp,
    "log": sympy.log,
    "copy": lambda a, b, *_: b,
    "full": lambda _, value: value,
    **dict.fromkeys(
        ("detach", "alias", "clone", "scalar_tensor", "_local_scalar_dense", "sym_float"),
        lambda a: a,
    ),
}


_OF_MEMORY = {"dtype", "layout", "device", "pin_memory", "memory_format"}


def _in_formula(operand: Any) -> Any:
    """Return what stands for an operand of any type in a formula."""
    return operand if isinstance(operand, sympy.Basic) else sympy.Symbol(str(operand))


class _Printer(StrPrinter):
    """Writes what is subtracted behind what it is subtracted from: ``1 - lr*decay``."""

    def _as_ordered_terms(self, expr: Any, order: Any = None) -> Any:
        terms = super()._as_ordered_terms(expr, order=order)
        return sorted(terms, key=lambda term: term.could_extract_minus_sign())


def identifier(text: str) -> str:
    """A Python name made of any text."""
    name = re.sub(r"\W+", "_", text).strip("_") or "value"
    if keyword.iskeyword(name) or name in ("tl", "triton"):
        return f"{name}_"
    return f"_{name}" if name[0].isdigit() else name


def unique(name: str, taken: Iterable[str]) -> str:
    """The name, with a number behind it if it is taken."""
    if name not in taken:
        return name
    return next(candidate for i in range(1, 10**6) if (candidate := f"{name}_{i}") not in taken)


def _in_words(expression: Any) -> str | None:
    """``1 - lr*decay`` as ``one_minus_lr_decay``; None for what takes more than that."""
    if isinstance(expression, sympy.Symbol):
        return expression.name
    if isinstance(expression, sympy.Mul):
        factors = [_in_words(factor) for factor in expression.args]
        return None if None in factors else "_".join(sorted(map(str, factors)))
    if isinstance(expression, sympy.Add) and len(expression.args) == 2:
        rest = 1 - expression
        words = None if isinstance(rest, sympy.Add) else _in_words(rest)
        return f"one_minus_{words}" if words else None
    return None


def _bare_name(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.partition("::")[2].removesuffix("_")
    return getattr(target, "__name__", "")


def _constant(node: fx.Node) -> int | float | bool | None:
    """The constant that a 0-dim tensor is made of."""
    is_made = node.target in (aten.full.default, aten.scalar_tensor.default)
    if not is_made or node.meta["val"].dim():
        return None
    value = node.args[-1]
    if not isinstance(value, (int, float)):
        return None
    written = any(node in mutated_inputs(user) for user in node.users)
    is_exact = torch.tensor(value, dtype=node.meta["val"].dtype).item() == value
    return value if is_exact and not written else None


def roots_of(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Whose memory each node's result lies in."""
    roots: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        sources = aliased_inputs(node)
        roots[node] = roots[sources[0]] if sources else node
    return roots
