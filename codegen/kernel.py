"""Split a traced update in two: arithmetic on numbers, and one kernel over the elements.

The numbers of a step (bias corrections, the step size) are computed once, in Python; what is
left reads each element of the parameter, its gradient and its moments once, and writes it once.
"""

from __future__ import annotations

import inspect
import operator
from array import array
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx

from zerofx import compat
from zerofx.codegen.numbers import is_written_after, roots_of
from zerofx.codegen.rewrite.elementwise import operator_names
from zerofx.codegen.rewrite.rounding import in_blocks, random_bits
from zerofx.codegen.trace.trace import Update

aten = torch.ops.aten

BLOCKS_AT_ONCE = 1024
"""The number of blocks of 256 that an update in eight bits takes at once: 1 MiB of float32."""


class UpdateKernel:
    """A traced update, its elementwise part compiled by Inductor for shards of any length."""

    may_wait = False

    def __init__(self, update: Update, split: _Split, is_compiled: bool = True) -> None:
        self._plan, self._elements = split, split.elements
        self._run: Callable = split.elements
        if is_compiled:
            self._run = compat.CompiledForAnyLength(split.elements)
        self._update, self.gradient_dtype = update, update.gradient_dtype
        # Where the step's numbers are written for the kernel to read: the same memory each time.
        self._memory = array("d" if split.is_double else "f", [0.0] * split.num_needed)
        self._inputs: list[Any] = [None] * split.num_needed
        self._is_compiled = is_compiled
        if split.num_needed and is_compiled:
            dtype = torch.float64 if split.is_double else torch.float32
            self._inputs = list(torch.frombuffer(self._memory, dtype=dtype).unbind())

    @classmethod
    def of(cls, update: Update, is_compiled: bool = True) -> UpdateKernel | None:
        """Split and compile an update's graph; None if an operation of it is not known here.

        With ``is_compiled`` false it runs operator by operator, and every operation is known.
        """
        split = _split(update, is_compiled)
        return cls(update, split, is_compiled) if split is not None else None

    def readable(self) -> str:
        """Both parts as Python, for who wants to read them."""
        parts = {"numbers, in Python": self._plan.numbers, "elements, compiled": self._elements}
        return "\n\n".join(f"# {what}\n{gm.code.strip()}\n" for what, gm in parts.items())

    def __call__(self, *values: Any) -> list[Any]:
        """Run the update in place, as the traced graph would; return the results it returns."""
        return self.ready(*values)()

    def ready(self, *values: Any) -> Callable[[], list[Any]]:
        """Do all of an update but its elements: return what does these, in any thread.

        Where that has to be compiled, it is now.  What two calls return must not run at once.
        """
        plan, is_compiled = self._plan, self._is_compiled
        numbers = plan.numbers(*(values[position] for position in plan.number_inputs))
        known = numbers[plan.num_needed :]
        inputs, written = list(self._inputs), {}
        for position, number in enumerate(numbers[: plan.num_needed]):
            if isinstance(number, Tensor) or not is_compiled:
                inputs[position] = number
            else:
                written[position] = number
        is_near = all(abs(written.get(position, 0.0)) < 0.5 for position in plan.near_weights)
        shards = [values[position] for position in plan.shards]
        calls = self._calls_in_blocks(shards, inputs) if plan.scales else [[*shards, *inputs]]
        run = compat.ready_to_run(self._run if is_near else self._run_far, calls[0])

        def run_elements() -> list[Any]:
            for position, number in written.items():
                self._memory[position] = number
            computed, *others = [run(*call) for call in calls]
            if plan.scales:
                pieces = zip(computed, *others, strict=True)
                computed = [torch.cat([piece.reshape(-1) for piece in p]) for p in pieces]
            sources = {"number": known, "input": shards, "computed": computed}
            return [sources[kind][index] for kind, index in plan.results]

        return run_elements

    def _calls_in_blocks(self, shards: Sequence[Tensor], inputs: list[Any]) -> list[list[Any]]:
        """The arguments for some rows at a time, each a block with a scale of its own.

        Flat tensors of a shard's length are cut into such rows, and ones as long as it has blocks
        are what is one number per block.  The kernel takes two turns over what it is given, to
        find the scales and to use them: little enough at once for the second to find it in cache.
        """
        plan, calls = self._plan, []
        for rows, blocks in in_blocks(len(shards[0]), BLOCKS_AT_ONCE) or [_NOTHING]:
            own = list(inputs)
            if plan.offset is not None:
                own[plan.offset] = inputs[plan.offset] + rows.start
            num_rows = blocks.stop - blocks.start
            pieces = [
                shard[blocks] if index in plan.scales else _in_rows(shard[rows], num_rows)
                for index, shard in enumerate(shards)
            ]
            calls.append([*pieces, *own])
        return calls

    @cached_property
    def _run_far(self) -> Callable:
        """The kernel for weights of ``lerp`` that are not all below 0.5."""
        split = _split(self._update, any_weight=True)
        assert split is not None, "it has been split before"
        return compat.CompiledForAnyLength(split.elements)


_NOTHING = (slice(0, 0), slice(0, 0))


def _in_rows(flat: Tensor, num_rows: int) -> Tensor:
    return flat.view(num_rows, len(flat) // num_rows if num_rows else 1)


@dataclass(frozen=True)
class _Split:
    """An update in two parts, and their wiring.

    ``numbers``, given the update's inputs at ``number_inputs``, returns the ``num_needed`` inputs
    that ``elements`` takes behind the inputs at ``shards``, then numbers that are results.
    ``results`` are where each result of the update comes from, and which one it is there.  Of what
    is needed, those at ``near_weights`` have to be below 0.5, and ``offset`` is the update's; of
    the shards, those at ``scales`` have one number per block.
    """

    numbers: fx.GraphModule
    elements: fx.GraphModule
    number_inputs: Sequence[int]
    shards: Sequence[int]
    num_needed: int
    is_double: bool
    near_weights: Sequence[int]
    offset: int | None
    scales: Collection[int]
    results: Sequence[tuple[str, int]]


def _split(
    update: Update, numbers_as_tensors: bool = True, any_weight: bool = False
) -> _Split | None:
    """Split an update; without ``any_weight`` its ``lerp`` are for weights below 0.5.

    ``lerp`` has two formulas, and both for each element cost 4% of an Adam in memory's speed.
    """
    gm = update.graph_module
    placeholders = gm.graph.find_nodes(op="placeholder")
    shards = [n for n, flag in zip(placeholders, update.shards, strict=False) if flag]
    tensors = set(shards)
    for node in gm.graph.nodes:
        if node.op == "get_attr" and numbers_as_tensors:
            return None
        if node.op == "call_function" and not tensors.isdisjoint(node.all_input_nodes):
            tensors.add(node)
    operations = [node for node in gm.graph.nodes if node in tensors and node not in shards]
    operands = dict.fromkeys(operand for node in operations for operand in node.all_input_nodes)
    needed = [operand for operand in operands if operand not in tensors]
    if any(map(is_written_after, needed)):
        return None  # the numbers are all computed before the elements: it would be too new

    numbers, outside = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in gm.graph.nodes:
        if node not in tensors and node.op != "output":
            outside[node] = numbers.node_copy(node, outside.__getitem__)

    elements = fx.Graph()
    inside = {node: elements.placeholder(node.name) for node in (*shards, *needed)}
    coefficients = {placeholders[position] for position in update.coefficients}
    near = (
        [] if any_weight or not numbers_as_tensors else list(filter(None, map(_weight, operations)))
    )
    if update.clones_gradient:  # in the kernel: no memory that holds a copy
        gradient = placeholders[1]
        inside[gradient] = elements.call_function(aten.clone.default, (inside[gradient],))
    for node in operations:
        emitted: fx.Node | None = None
        if numbers_as_tensors:
            emitted = _emit(elements, node, inside, tensors | coefficients, near)
        else:
            emitted = elements.node_copy(node, inside.__getitem__)
        if emitted is None:
            return None
        inside[node] = emitted

    roots = roots_of(gm.graph)
    results: list[tuple[str, int]] = []
    computed: list[fx.Node] = []
    kept: list[fx.Node] = []
    for result in gm.graph.output_node().args[0]:
        if not isinstance(result, fx.Node):
            return None
        root = roots[result]
        if result not in tensors:
            results.append(("number", len(kept)))
            kept.append(outside[result])
        elif root in shards and not (root is placeholders[1] and update.clones_gradient):
            results.append(("input", shards.index(root)))
        else:
            results.append(("computed", len(computed)))
            computed.append(inside[result])
    numbers.output([*(outside[node] for node in needed), *kept])
    elements.output(computed)
    positions = [placeholders.index(node) for node in shards]
    return _Split(
        numbers=fx.GraphModule(gm, numbers),
        elements=fx.GraphModule(gm, elements),
        number_inputs=[i for i, node in enumerate(placeholders) if node not in tensors],
        shards=positions,
        num_needed=len(needed),
        is_double=any(_dtype(node) is torch.float64 for node in tensors),
        near_weights=[needed.index(node) for node in near],
        offset=None if update.offset is None else needed.index(placeholders[update.offset]),
        scales={positions.index(position) for position in update.scales},
        results=results,
    )


def _weight(node: fx.Node) -> fx.Node | None:
    """The number that an operation interpolates by, if that is known on the host when it runs."""
    if node.target not in (aten.lerp.Scalar, aten.lerp_.Scalar):
        return None
    return node.args[2] if isinstance(node.args[2], fx.Node) else None


def _dtype(node: fx.Node) -> torch.dtype | None:
    """The dtype of a tensor."""
    value = node.meta.get("val")
    return value.dtype if isinstance(value, Tensor) else None


def _emit(
    graph: fx.Graph,
    node: fx.Node,
    copies: dict[fx.Node, fx.Node],
    tensors: Collection[fx.Node],
    near_weights: Collection[fx.Node],
) -> fx.Node | None:
    """Copy an operation, its numbers now 0-dim tensors; None if it is not known.

    ``tensors`` are the operands that have been such before, ``near_weights`` are those numbers
    that are below 0.5.
    """
    numbers = [
        operand
        for operand in node.all_input_nodes
        if operand not in tensors and _dtype(operand) is None
    ]
    name, base = "", ""
    if isinstance(node.target, torch._ops.OpOverload):
        name, base = operator_names(node.target)
    # That of a mask is checked to have one value.
    if not (numbers or base == "index_put") or node.target is random_bits:
        return graph.node_copy(node, copies.__getitem__)
    dtypes = filter(None, map(_dtype, node.all_input_nodes))
    if any(not dtype.is_floating_point and dtype is not torch.bool for dtype in dtypes):
        return None  # numbers are floats here: too coarse for counts, and of another kind
    is_near = base == "lerp" and node.args[2] in near_weights
    function = _near_lerp if is_near else _WITH_TENSORS.get(base)
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), copies.__getitem__)
    if function is None or not _takes(function, args, kwargs):
        return None
    result = graph.call_function(function, args, kwargs)
    if name.endswith("_"):
        result = graph.call_function(aten.copy_.default, (args[0], result))
    return result


def _takes(function: Callable, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def _add(x: Tensor, y: Any, alpha: Any = None) -> Tensor:
    return x + (y if alpha is None else y * alpha)


def _subtract(x: Tensor, y: Any, alpha: Any = None) -> Tensor:
    return x - (y if alpha is None else y * alpha)


def _addcmul(x: Tensor, y: Tensor, z: Tensor, value: Any = 1) -> Tensor:
    return x + y * value * z


def _addcdiv(x: Tensor, y: Tensor, z: Tensor, value: Any = 1) -> Tensor:
    return x + y * value / z


def _lerp(start: Tensor, end: Tensor, weight: Tensor) -> Tensor:
    return torch.lerp(start, end, weight.to(start.dtype))


def _near_lerp(start: Tensor, end: Tensor, weight: Tensor) -> Tensor:
    return start + (end - start) * weight


def _fill_where(tensor: Tensor, mask: Tensor, value: Any) -> Tensor:
    """``tensor`` with ``tensor[mask] = value`` done, for a number or 0-dim value."""
    value = value.to(tensor.dtype) if isinstance(value, Tensor) else value
    return torch.where(mask, value, tensor)


def _put(tensor: Tensor, masks: Sequence[Tensor], value: Any, accumulate: bool = False) -> Tensor:
    (mask,) = masks
    return _fill_where(tensor, mask, value)


def _full_like(
    tensor: Tensor, value: Tensor, pin_memory: Any = None, memory_format: Any = None
) -> Tensor:
    return torch.zeros_like(tensor) + value


def _clamp(tensor: Tensor, low: Any = None, high: Any = None) -> Tensor:
    """``tensor.clamp(low, high)``, each a number or 0-dim.  NaN stays NaN."""
    if isinstance(low, Tensor):
        tensor = torch.maximum(tensor, low.to(tensor.dtype))
    elif low is not None:
        tensor = tensor.clamp(min=low)
    if isinstance(high, Tensor):
        return torch.minimum(tensor, high.to(tensor.dtype))
    return tensor.clamp(max=high) if high is not None else tensor


# What operators do whose numbers may be 0-dim tensors.
_WITH_TENSORS: dict[str, Callable] = {
    **{
        name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge", "mul", "pow")
    },
    "div": operator.truediv,
    "add": _add,
    "sub": _subtract,
    "addcmul": _addcmul,
    "addcdiv": _addcdiv,
    "lerp": _lerp,
    "clamp": _clamp,
    "masked_fill": _fill_where,
    "index_put": _put,
    "full_like": _full_like,
}
