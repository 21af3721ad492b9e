"""Updates that need whole tensors: which optimizers have them, and which part of them does.

Muon's momentum and its step are elementwise and run on flat shards, like any update.  Only what
lies between, the Newton-Schulz iteration, reads a whole matrix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, NoReturn

import torch
from torch import Tensor, fx

from zerofx.codegen.rewrite.elementwise import (
    UpdateError,
    fit_to_shards,
    is_whole_factory,
    operation_line,
    why_not_elementwise,
)
from zerofx.codegen.trace.trace import Update
from zerofx.ir.aliases import aliased_inputs, mutated_inputs
from zerofx.ir.reach import reached


def newton_schulz_flops(shape: Sequence[int], group: Mapping[str, Any]) -> int:
    """Floating point operations of Muon's iteration on a matrix, whose smaller side is m.

    Each of its steps is ``X @ X.T``, the square of that, and its product with ``X``.
    Source: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks".
    """
    m, n = min(shape, default=1), max(shape, default=1)
    return (4 * m * m * n + 2 * m**3) * int(group.get("ns_steps", 1))


def whole_update_flops(optimizer: torch.optim.Optimizer) -> dict[int, int]:
    """Return the flops of updates that may need a whole tensor, by the ``id`` of the parameter.

    They are Muon's, and its subclasses'.  Those of any other optimizer must be elementwise.
    """
    return {
        id(parameter): newton_schulz_flops(tuple(parameter.shape), group)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if isinstance(optimizer, torch.optim.Muon)
    }


@dataclass(frozen=True)
class DividedUpdate:
    """A traced update in three parts, the first and the last of which run on flat shards.

    ``first(*inputs)`` returns, of the ``counts`` that they are, the tensor that the core takes,
    numbers for it, and what is left for the last; ``core(whole, *numbers)`` returns one tensor of
    the parameter's shape; ``last(*inputs, *left, shard)`` gets this rank's shard of that and
    returns what the update does.  Without a ``core`` the update is elementwise, and ``last`` is
    all of it.
    """

    update: Update
    first: fx.GraphModule
    core: fx.GraphModule | None
    last: fx.GraphModule
    counts: tuple[int, int, int]

    @property
    def core_dtype(self) -> torch.dtype:
        """Of what the core returns."""
        assert self.core is not None
        return self.core.graph.output_node().args[0].meta["val"].dtype

    def run_first(
        self, parameter: Tensor, inputs: Sequence[Any]
    ) -> tuple[Tensor, Sequence[Any], Sequence[Any]]:
        """Return what the core takes, numbers for it, and what is left for the last part.

        Without a core, the parameter's shard stands for what it would take.
        """
        results = self.first(parameter, *inputs)
        num_taken, num_numbers, _ = self.counts
        taken, rest = results[:num_taken], results[num_taken:]
        return (*taken, parameter)[0], rest[:num_numbers], rest[num_numbers:]

    def run_last(
        self, parameter: Tensor, inputs: Sequence[Any], left: Sequence[Any], shard: Tensor
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Update the parameter's shard; return its new state and the group's changed entries."""
        given = [] if self.core is None else [shard]
        results = self.last(parameter, *inputs, *left, *given)
        return self.update.filled(results)


def divide(update: Update, shape: Sequence[int]) -> DividedUpdate:
    """Divide an update that was traced on whole tensors into what runs on shards and the rest.

    Before::

        lerp_ = lerp_(momentum, grad, a);  lerp = lerp(grad, lerp_, b);  x = to(lerp, bfloat16)
        div_ = div_(x, norm(x));  mm = mm(div_, t(div_));  ...;  addmm = addmm(...)
        mul_ = mul_(param, c);  add_ = add_(mul_, addmm, alpha=d);  return [lerp_]

    After::

        first   lerp_ = ...;  lerp = ...;  x = ...;  return [x, lerp_]
        core    div_ = div_(x, norm(x));  mm = ...;  addmm = addmm(...);  return addmm
        last    mul_ = ...;  add_ = ...;  return [lerp_]

    Raises: UpdateError naming an operation and its line, if the core takes or gives more than one
    tensor, or the parts cannot run one after the other.
    """
    return _Division(update, tuple(shape)).divided()


class _Division:
    def __init__(self, update: Update, shape: tuple[int, ...]) -> None:
        self.update, self.shape = update, shape
        self.gm = update.graph_module
        self.inputs = self.gm.graph.find_nodes(op="placeholder")
        self.calls = [node for node in self.gm.graph.nodes if node.op == "call_function"]
        self.output = self.gm.graph.output_node()
        # One element per element of the parameter, and whatever is computed from one.
        marked = zip(self.inputs, update.shards, strict=False)
        self.elements = {node for node, is_shard in marked if is_shard}
        self.derived = set(self.elements)
        self.roots: dict[fx.Node, set[fx.Node]] = {}
        for node in self.gm.graph.nodes:
            sources = [self.roots[source] for source in aliased_inputs(node)]
            self.roots[node] = set().union(*sources) if sources else {node}

    def divided(self) -> DividedUpdate:
        core = self._core()
        read = {operand for node in core for operand in node.all_input_nodes} - core
        taken = sorted(read & self.elements)
        numbers = sorted(node for node in read - self.elements if node.op != "get_attr")
        given = sorted(n for n in core if any(user not in core for user in n.users))
        if core and (len(taken) != 1 or len(given) != 1 or given[0] not in self.elements):
            self._refuse(
                sorted(core)[0],
                f"begins what takes {len(taken)} and gives {len(given)} tensors of its elements",
            )
        first = self._first(core, [*taken, *numbers])
        last = {node for node in self.calls if node not in core and node not in first}
        self._check_memory(first, core, last)
        reads_last = {operand for node in last for operand in node.all_input_nodes}
        left = sorted((reads_last | set(self.output.all_input_nodes)) & first)
        core_gm = self._part(core, [*taken, *numbers], given[0])[0] if core else None
        first_gm, of_first = self._part(first, self.inputs, [*taken, *numbers, *left])
        last_gm, of_last = self._part(last, [*self.inputs, *left, *given], self.output.args[0])
        for gm, copies in ((first_gm, of_first), (last_gm, of_last)):
            whole = {copy for node, copy in copies.items() if node in self.elements}
            fit_to_shards(gm, shape=self.shape, whole=whole)
            gm.recompile()
        counts = (len(taken), len(numbers), len(left))
        return DividedUpdate(self.update, first_gm, core_gm, last_gm, counts)

    def _core(self) -> set[fx.Node]:
        """The operations that are not elementwise, and those between two of them."""
        core: set[fx.Node] = set()
        for node in self.calls:
            operands = set(node.all_input_nodes)
            value = node.meta.get("val")
            if is_whole_factory(node, self.shape):
                self.elements.add(node)
                self.derived.add(node)
            if operands.isdisjoint(self.derived):
                continue
            self.derived.add(node)
            if operands & (self.derived - self.elements):
                core.add(node)
            elif why_not_elementwise(node, self.shape, self.elements) is not None:
                core.add(node)
            if isinstance(value, Tensor) and tuple(value.shape) == self.shape:
                self.elements.add(node)
        behind = reached(core, lambda node: node.users)
        before = reached(core, lambda node: node.all_input_nodes)
        return set(behind) & set(before)

    def _first(self, core: set[fx.Node], wanted: Sequence[fx.Node]) -> set[fx.Node]:
        """All numbers, and what the core's elements are computed from."""
        first: set[fx.Node] = set()
        pending = [*wanted, *(node for node in self.calls if node not in self.derived)]
        pending += {writer for node in core for writer in self._writers_before(node)} - core
        while pending:
            node = pending.pop()
            if node in first or node.op != "call_function":
                continue
            if node in core:
                self._refuse(node, "computes a number that elements are computed from later")
            first.add(node)
            pending += node.all_input_nodes
            pending += self._writers_before(node)
        for node in sorted(first):
            if self.inputs[0] in self._written(node):
                self._refuse(node, "changes the parameter before it")
        return first

    def _writers_before(self, node: fx.Node) -> list[fx.Node]:
        """Return the writes, maybe through another view, to what a node reads."""
        touched = self._touched(node)
        return [other for other in self.calls if other < node and self._written(other) & touched]

    def _check_memory(self, first: set[fx.Node], core: set[fx.Node], last: set[fx.Node]) -> None:
        """Refuse what reads or writes memory in another order once it is divided."""
        place = {n: number for number, part in enumerate((first, core, last)) for n in part}
        for node, later in combinations(self.calls, 2):
            conflicts = self._written(node) & self._touched(later)
            conflicts |= self._written(later) & self._touched(node)
            if conflicts and place[node] > place[later]:
                self._refuse(later, "shares memory with an operation before it")
        kept = set(self.inputs).union(*map(self._touched, (*last, *self.output.all_input_nodes)))
        for node in sorted(core):
            if self._written(node) & kept - core:
                self._refuse(node, "writes to what the rest of the step reads")

    def _part(
        self, nodes: set[fx.Node], inputs: Sequence[fx.Node], results: Any
    ) -> tuple[fx.GraphModule, dict[fx.Node, fx.Node]]:
        """A graph of some of the nodes, in their order, and the copies in it."""
        graph = fx.Graph()
        copies = {node: graph.placeholder(node.name) for node in inputs}
        for node, copy in copies.items():
            copy.meta = dict(node.meta)
        constants = self.gm.graph.find_nodes(op="get_attr")
        for node in sorted({*nodes, *constants}):
            copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(fx.node.map_arg(results, copies.__getitem__))
        for node in reversed(graph.nodes):
            if node.op == "get_attr" and not node.users:
                graph.erase_node(node)
        return fx.GraphModule(self.gm, graph), copies

    def _touched(self, node: fx.Node) -> set[fx.Node]:
        operands = (self.roots[operand] for operand in node.all_input_nodes)
        return self.roots[node].union(*operands)

    def _written(self, node: fx.Node) -> set[fx.Node]:
        return set().union(*(self.roots[target] for target in mutated_inputs(node)))

    def _refuse(self, node: fx.Node, what: str) -> NoReturn:
        raise UpdateError(
            f"{self.update.optimizer} cannot run on shards: `{node.target}`{operation_line(node)} "
            f"is not elementwise, or next to what is not, and {what}. zerofx gathers one tensor of "
            "a parameter's shape where an update needs it whole, and goes on with one that is made "
            'of it. Use options={"stage": 0}, which updates whole parameters.'
        )
