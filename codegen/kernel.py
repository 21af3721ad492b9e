"""Split a traced update in two: arithmetic on numbers, and one kernel over the elements.

The numbers of a step (bias corrections, the step size) are computed once, in Python; what is
left reads each element of the parameter, its gradient and its moments once, and writes it once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from zerofx import compat
from zerofx.codegen.numbers import is_written_after

aten = torch.ops.aten

# The second operand may be a 0-dim tensor in place of a number, with the same meaning.
_TAKES_SCALAR_TENSOR = {
    aten.mul.Tensor,
    aten.mul_.Tensor,
    aten.div.Tensor,
    aten.div_.Tensor,
    aten.add.Tensor,
    aten.add_.Tensor,
    aten.sub.Tensor,
    aten.sub_.Tensor,
}


class UpdateKernel:
    """A traced update, its elementwise part compiled by Inductor for shards of any length."""

    def __init__(self, numbers: fx.GraphModule, elements: fx.GraphModule, plan: _Plan) -> None:
        self._numbers, self._elements = numbers, elements
        self._run = compat.compile_for_any_length(elements)
        self._plan = plan

    @classmethod
    def of(cls, gm: fx.GraphModule, is_shard: Sequence[bool]) -> UpdateKernel | None:
        """Split and compile an update's graph; None if an operation of it is not known here.

        ``is_shard`` says it of each tensor among the placeholders, which numbers follow.
        """
        split = _split(gm, is_shard)
        return cls(*split) if split is not None else None

    def readable(self) -> str:
        """Both parts as Python, for who wants to read them."""
        parts = {"numbers, in Python": self._numbers, "elements, compiled": self._elements}
        return "\n\n".join(f"# {what}\n{gm.code.strip()}\n" for what, gm in parts.items())

    def __call__(self, *values: Any) -> list[Any]:
        """Run the update in place, as the traced graph would; return the results it returns."""
        plan = self._plan
        numbers = self._numbers(*(values[position] for position in plan.numbers))
        known = numbers[: plan.num_results]
        inputs = [
            number if isinstance(number, Tensor) else torch.tensor(number, dtype=torch.float64)
            for number in numbers[plan.num_results :]
        ]
        shards = [values[position] for position in plan.shards]
        computed = self._run(*shards, *inputs)
        sources = {"number": known, "input": shards, "computed": computed}
        return [sources[kind][index] for kind, index in plan.results]


class _Plan:
    """Which values go where: positions of inputs, and where each result comes from."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.shards: list[int] = []
        self.num_results = 0
        self.results: list[tuple[str, int]] = []


def _split(
    gm: fx.GraphModule, is_shard: Sequence[bool]
) -> tuple[fx.GraphModule, fx.GraphModule, _Plan] | None:
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    shards = [n for n, flag in zip(placeholders, is_shard, strict=False) if flag]
    elementwise = set(shards)
    for node in gm.graph.nodes:
        if node.op == "get_attr":
            return None
        if any(operand in elementwise for operand in node.all_input_nodes):
            elementwise.add(node)
    (output,) = (node for node in gm.graph.nodes if node.op == "output")
    elementwise.discard(output)

    plan = _Plan()
    plan.shards = [placeholders.index(node) for node in shards]
    numbers, elements = fx.Graph(), fx.Graph()
    outside: dict[fx.Node, fx.Node] = {}
    inside = {node: elements.placeholder(node.name) for node in shards}
    needed = list(
        dict.fromkeys(
            operand
            for node in gm.graph.nodes
            if node in elementwise
            for operand in node.all_input_nodes
            if operand not in elementwise
        )
    )
    if any(map(is_written_after, needed)):
        return None  # the numbers are all computed before the elements: it would be too new
    for node in needed:
        inside[node] = elements.placeholder(node.name)
    root: dict[fx.Node, fx.Node] = {node: node for node in shards}  # whose memory it is
    for node in gm.graph.nodes:
        if node is output or node in shards:
            continue
        if node not in elementwise:
            if node.op == "placeholder":
                plan.numbers.append(placeholders.index(node))
            outside[node] = numbers.node_copy(node, outside.__getitem__)
            continue
        emitted = _emit(elements, node, inside, elementwise)
        if emitted is None:
            return None
        inside[node] = emitted
        written = node.args[0] if _is_in_place(node) else node
        root[node] = root.get(written, node)
    computed: list[fx.Node] = []
    kept: list[fx.Node] = []
    for result in output.args[0]:
        if not isinstance(result, fx.Node):
            return None
        if result not in elementwise:
            plan.results.append(("number", len(kept)))
            kept.append(outside[result])
        elif root[result] in shards:
            plan.results.append(("input", shards.index(root[result])))
        else:
            plan.results.append(("computed", len(computed)))
            computed.append(inside[result])
    plan.num_results = len(kept)
    numbers.output([*kept, *(outside[node] for node in needed)])
    elements.output(computed)
    return fx.GraphModule(gm, numbers), fx.GraphModule(gm, elements), plan


def _emit(
    graph: fx.Graph, node: fx.Node, copies: dict[fx.Node, fx.Node], elementwise: set[fx.Node]
) -> fx.Node | None:
    """Copy an operation, its numbers now 0-dim tensors; None if it is not known."""
    target = node.target
    assert not isinstance(target, str)
    outer = [operand for operand in node.all_input_nodes if operand not in elementwise]

    def local(value: Any) -> Any:
        return copies[value] if isinstance(value, fx.Node) else value

    def call(function: Callable, *args: Any) -> fx.Node:
        return graph.call_function(function, args)

    if not outer:
        return graph.node_copy(node, copies.__getitem__)
    operands = [local(value) for value in node.args]
    if target in _TAKES_SCALAR_TENSOR and set(node.kwargs) <= {"alpha"} and len(operands) == 2:
        if "alpha" in node.kwargs:
            operands[1] = call(aten.mul.Tensor, operands[1], local(node.kwargs["alpha"]))
        return call(target, *operands)
    name = target.overloadpacket.__name__ if hasattr(target, "overloadpacket") else ""
    if name.rstrip("_") == "lerp" and len(operands) == 3 and not node.kwargs:
        weight = call(_like, operands[2], operands[0])
        result = call(aten.lerp.Tensor, operands[0], operands[1], weight)
    elif name.rstrip("_") in ("addcmul", "addcdiv") and set(node.kwargs) <= {"value"}:
        combine = aten.mul.Tensor if name.startswith("addcmul") else aten.div.Tensor
        first = call(aten.mul.Tensor, operands[1], local(node.kwargs.get("value", 1)))
        result = call(aten.add.Tensor, operands[0], call(combine, first, operands[2]))
    else:
        return None
    return call(aten.copy_.default, operands[0], result) if name.endswith("_") else result


def _like(number: Tensor, tensor: Tensor) -> Tensor:
    return number.to(tensor.dtype)


def _is_in_place(node: fx.Node) -> bool:
    target = node.target
    return (
        isinstance(target, torch._ops.OpOverload)
        and target._schema.is_mutable
        and isinstance(node.args[0], fx.Node)
    )
