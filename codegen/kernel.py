"""Split a traced update in two: arithmetic on numbers, and one kernel over the elements.

The numbers of a step (bias corrections, the step size) are computed once, in Python; what is
left reads each element of the parameter, its gradient and its moments once, and writes it once.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from zerofx import compat
from zerofx.codegen.numbers import is_written_after
from zerofx.codegen.rewrite.elementwise import mutated_operands
from zerofx.codegen.rewrite.rounding import in_blocks, random_bits
from zerofx.codegen.trace.trace import Update

aten = torch.ops.aten

BLOCKS_AT_ONCE = 1024
"""The number of blocks of 256 that an update in eight bits takes at once: 1 MiB of float32."""

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

# Of two operands, a tensor and a number: these do the same with a 0-dim tensor as the second.
_WITH_SCALAR_TENSOR = {
    aten.eq.Scalar: aten.eq.Tensor,
    aten.ne.Scalar: aten.ne.Tensor,
    aten.lt.Scalar: aten.lt.Tensor,
    aten.le.Scalar: aten.le.Tensor,
    aten.gt.Scalar: aten.gt.Tensor,
    aten.ge.Scalar: aten.ge.Tensor,
    aten.pow.Tensor_Scalar: aten.pow.Tensor_Tensor,
}


class UpdateKernel:
    """A traced update, its elementwise part compiled by Inductor for shards of any length."""

    def __init__(self, update: Update, split: _Split, is_compiled: bool = True) -> None:
        self._numbers, self._elements, self._plan = split
        self._run: Callable = self._elements
        if is_compiled:
            self._run = compat.compile_for_any_length(self._elements)
        self._update = update
        # Where the step's numbers are written for the kernel to read: the same memory each time.
        num_numbers = self._plan.num_numbers
        self._memory = array("d" if self._plan.is_double else "f", [0.0] * num_numbers)
        self._inputs: list[Any] = [None] * num_numbers
        self._is_compiled = is_compiled
        if num_numbers and is_compiled:
            dtype = torch.float64 if self._plan.is_double else torch.float32
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
        parts = {"numbers, in Python": self._numbers, "elements, compiled": self._elements}
        return "\n\n".join(f"# {what}\n{gm.code.strip()}\n" for what, gm in parts.items())

    def __call__(self, *values: Any) -> list[Any]:
        """Run the update in place, as the traced graph would; return the results it returns."""
        return self.ready(*values)()

    def ready(self, *values: Any) -> Callable[[], list[Any]]:
        """Do all of an update but its elements: return what does these, in any thread.

        Where that has to be compiled, it is now.  What two calls return must not run at once.
        """
        run, write_numbers, inputs, known = self._prepare(values)
        shards = [values[position] for position in self._plan.shards]
        run = compat.ready_to_run(run, [*shards, *inputs])

        def run_elements() -> list[Any]:
            write_numbers()
            return self._collect(known, shards, run(*shards, *inputs))

        return run_elements

    def in_blocks(self, *values: Any) -> list[Any]:
        """Run an update whose tensors it takes in rows, each a block with a scale of its own.

        Flat tensors of a shard's length are cut into such rows, and ones as long as it has blocks
        are what is one number per block.  The kernel takes two turns over what it is given, to
        find the scales and to use them: little enough at once for the second to find it in cache.
        """
        return self.ready_in_blocks(*values)()

    def ready_in_blocks(self, *values: Any) -> Callable[[], list[Any]]:
        """``ready``, for ``in_blocks``."""
        run, write_numbers, inputs, known = self._prepare(values)
        plan = self._plan
        shards = [values[position] for position in plan.shards]
        calls = []
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
        run = compat.ready_to_run(run, calls[0])

        def run_elements() -> list[Any]:
            write_numbers()
            parts = [run(*call) for call in calls]
            pieces = zip(*parts, strict=True)
            computed = [torch.cat([piece.reshape(-1) for piece in p]) for p in pieces]
            return self._collect(known, shards, computed)

        return run_elements

    def _prepare(
        self, values: Sequence[Any]
    ) -> tuple[Callable, Callable[[], None], list[Any], list[Any]]:
        """Return the kernel, the writer of its numbers, the inputs beside shards, their results."""
        plan = self._plan
        numbers = self._numbers(*(values[position] for position in plan.numbers))
        inputs = list(self._inputs)
        written: dict[int, Any] = {}
        for position, number in enumerate(numbers[plan.num_results :]):
            if isinstance(number, Tensor) or not self._is_compiled:
                inputs[position] = number
            else:
                written[position] = number
        is_near = all(abs(written.get(position, 0.0)) < 0.5 for position in plan.near_weights)

        def write_numbers() -> None:
            for position, number in written.items():
                self._memory[position] = number

        run = self._run if is_near else self._run_far
        return run, write_numbers, inputs, numbers[: plan.num_results]

    @cached_property
    def _run_far(self) -> Callable:
        """The kernel for weights of ``lerp`` that are not all below 0.5."""
        split = _split(self._update, any_weight=True)
        assert split is not None, "it has been split before"
        return compat.compile_for_any_length(split.elements)

    def _collect(self, known: Sequence, shards: Sequence, computed: Sequence) -> list[Any]:
        sources = {"number": known, "input": shards, "computed": computed}
        return [sources[kind][index] for kind, index in self._plan.results]


_NOTHING = (slice(0, 0), slice(0, 0))


def _in_rows(flat: Tensor, num_rows: int) -> Tensor:
    return flat.view(num_rows, len(flat) // num_rows if num_rows else 1)


class _Plan:
    """The wiring of a kernel: positions of inputs, and the source of each result."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.shards: list[int] = []
        self.num_results = 0
        self.num_numbers = 0
        self.is_double = False
        self.near_weights: list[int] = []  # which of the numbers have to be below 0.5
        self.offset: int | None = None  # which of the numbers it is
        self.scales: set[int] = set()  # which of the shards have one number per block
        self.results: list[tuple[str, int]] = []


class _Split(NamedTuple):
    numbers: fx.GraphModule
    elements: fx.GraphModule
    plan: _Plan


def _split(
    update: Update, numbers_as_tensors: bool = True, any_weight: bool = False
) -> _Split | None:
    """Split an update; without ``any_weight`` its ``lerp`` are for weights below 0.5.

    ``lerp`` has two formulas, and both for each element cost 4% of an Adam in memory's speed.
    """
    gm = update.graph_module
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    shards = [n for n, flag in zip(placeholders, update.shards, strict=False) if flag]
    elementwise = set(shards)
    for node in gm.graph.nodes:
        if node.op == "get_attr" and numbers_as_tensors:
            return None
        if any(operand in elementwise for operand in node.all_input_nodes):
            elementwise.add(node)
    (output,) = (node for node in gm.graph.nodes if node.op == "output")
    elementwise.discard(output)

    coefficients = {placeholders[position] for position in update.coefficients}
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
    weights: dict[fx.Node, None] = {}
    if numbers_as_tensors and not any_weight:
        weights = dict.fromkeys(_weights(node for node in gm.graph.nodes if node in elementwise))
    root: dict[fx.Node, fx.Node] = {node: node for node in shards}  # whose memory it is
    if update.clones_gradient:  # in the kernel: no memory that holds a copy
        gradient = placeholders[1]
        inside[gradient] = elements.call_function(aten.clone.default, (inside[gradient],))
        del root[gradient]
    for node in gm.graph.nodes:
        if node is output or node in shards:
            continue
        if node not in elementwise:
            if node.op == "placeholder":
                plan.numbers.append(placeholders.index(node))
            outside[node] = numbers.node_copy(node, outside.__getitem__)
            continue
        if numbers_as_tensors:
            emitted = _emit(elements, node, inside, elementwise | coefficients, weights)
            if emitted is None:
                return None
        else:
            emitted = elements.node_copy(node, inside.__getitem__)
        inside[node] = emitted
        root[node] = root.get(_written_by(node), node)
    computed: list[fx.Node] = []
    kept: list[fx.Node] = []
    for result in output.args[0]:
        if not isinstance(result, fx.Node):
            return None
        if result not in elementwise:
            plan.results.append(("number", len(kept)))
            kept.append(outside[result])
        elif root.get(result) in shards:
            plan.results.append(("input", shards.index(root[result])))
        else:
            plan.results.append(("computed", len(computed)))
            computed.append(inside[result])
    plan.num_results = len(kept)
    plan.num_numbers = len(needed)
    plan.is_double = any(_has_doubles(node) for node in elementwise)
    plan.near_weights = [needed.index(node) for node in weights]
    if update.offset is not None:
        plan.offset = needed.index(placeholders[update.offset])
    plan.scales = {plan.shards.index(position) for position in update.scales}
    numbers.output([*kept, *(outside[node] for node in needed)])
    elements.output(computed)
    return _Split(fx.GraphModule(gm, numbers), fx.GraphModule(gm, elements), plan)


def _weights(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """The numbers that these operations interpolate by, known on the host when they run."""
    scalar = (aten.lerp.Scalar, aten.lerp_.Scalar)
    return [
        node.args[2]
        for node in nodes
        if node.target in scalar and isinstance(node.args[2], fx.Node)
    ]


def _has_doubles(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.dtype is torch.float64


def _emit(
    graph: fx.Graph,
    node: fx.Node,
    copies: dict[fx.Node, fx.Node],
    tensors: set[fx.Node],
    near_weights: Collection[fx.Node],
) -> fx.Node | None:
    """Copy an operation, its numbers now 0-dim tensors; None if it is not known.

    ``tensors`` are the operands that have been such before, ``near_weights`` are those numbers
    that are below 0.5.
    """
    target = node.target
    assert not isinstance(target, str)
    numbers = [
        operand
        for operand in node.all_input_nodes
        if operand not in tensors and not _is_tensor(operand)
    ]

    def local(value: Any) -> Any:
        return fx.node.map_arg(value, lambda operand: copies[operand])

    def call(function: Callable, *args: Any) -> fx.Node:
        return graph.call_function(function, args)

    name = target.overloadpacket.__name__ if hasattr(target, "overloadpacket") else ""
    base = name.rstrip("_")
    operands = list(map(local, node.args))
    if base == "index_put" and len(operands[1]) == 1:  # by a mask: check_elementwise
        result = call(_fill_where, operands[0], operands[1][0], operands[2])
        return call(aten.copy_.default, operands[0], result) if name.endswith("_") else result
    if not numbers or target is random_bits:  # whose numbers are tensors already
        return graph.node_copy(node, copies.__getitem__)
    if any(map(_is_integer, node.all_input_nodes)):
        return None  # numbers are floats here: too coarse for counts, and of another kind
    if target in _TAKES_SCALAR_TENSOR and set(node.kwargs) <= {"alpha"} and len(operands) == 2:
        if "alpha" in node.kwargs:
            operands[1] = call(aten.mul.Tensor, operands[1], local(node.kwargs["alpha"]))
        return call(target, *operands)
    if target in _WITH_SCALAR_TENSOR and len(operands) == 2 and not node.kwargs:
        return call(_WITH_SCALAR_TENSOR[target], *operands)
    if base == "lerp" and node.args[2] in near_weights:
        distance = call(aten.sub.Tensor, operands[1], operands[0])
        result = call(aten.add.Tensor, operands[0], call(aten.mul.Tensor, distance, operands[2]))
    elif base == "lerp" and len(operands) == 3 and not node.kwargs:
        weight = call(_like, operands[2], operands[0])
        result = call(aten.lerp.Tensor, operands[0], operands[1], weight)
    elif base in ("addcmul", "addcdiv") and set(node.kwargs) <= {"value"}:
        combine = aten.mul.Tensor if name.startswith("addcmul") else aten.div.Tensor
        first = call(aten.mul.Tensor, operands[1], local(node.kwargs.get("value", 1)))
        result = call(aten.add.Tensor, operands[0], call(combine, first, operands[2]))
    elif base == "clamp" and not node.kwargs:
        result = call(_clamp, *operands)
    elif base == "masked_fill" and len(operands) == 3:
        result = call(_fill_where, *operands)
    elif target is aten.full_like.default and set(node.kwargs) <= {"pin_memory", "memory_format"}:
        return call(aten.add.Tensor, call(aten.zeros_like.default, operands[0]), operands[1])
    else:
        return None
    return call(aten.copy_.default, operands[0], result) if name.endswith("_") else result


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), Tensor)


def _is_integer(node: fx.Node) -> bool:
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.dtype is torch.bool:
        return False
    return not value.is_floating_point()


def _like(number: Tensor, tensor: Tensor) -> Tensor:
    return number.to(tensor.dtype)


def _fill_where(tensor: Tensor, mask: Tensor, value: Any) -> Tensor:
    """``tensor`` with ``tensor[mask] = value`` done, for a number or 0-dim value."""
    value = value.to(tensor.dtype) if isinstance(value, Tensor) else value
    return torch.where(mask, value, tensor)


def _clamp(tensor: Tensor, low: Any = None, high: Any = None) -> Tensor:
    """``tensor.clamp(low, high)``, each a number or 0-dim.  NaN stays NaN."""
    if isinstance(low, Tensor):
        tensor = torch.maximum(tensor, low.to(tensor.dtype))
    elif low is not None:
        tensor = tensor.clamp(min=low)
    if isinstance(high, Tensor):
        return torch.minimum(tensor, high.to(tensor.dtype))
    return tensor.clamp(max=high) if high is not None else tensor


def _written_by(node: fx.Node) -> fx.Node | None:
    """Return the node that an operation writes to: its first operand, or its ``out``."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    return next(mutated_operands(node.target, node.args, node.kwargs), None)
