"""An update's kernel as Inductor makes it: its pointwise program in torch's operators.

For a CPU, and for programs with operators that no kernel of our own is written for.
"""

from __future__ import annotations

import operator
from array import array
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from zerofx import compat
from zerofx.codegen.numbers import unique
from zerofx.codegen.operations import NumberOperand, Operand, Value
from zerofx.codegen.pointwise import pointwise_program
from zerofx.codegen.program import Program, Stream
from zerofx.codegen.rewrite.elementwise import UpdateError
from zerofx.codegen.rewrite.gradient_work import sum_of_squares
from zerofx.codegen.rewrite.rounding import in_blocks
from zerofx.codegen.trace.functions import add_call, example
from zerofx.codegen.trace.trace import Update
from zerofx.codegen.wires.blocks import packed, unpacked

BLOCKS_AT_ONCE = 1024
"""The number of blocks of 256 that an update in eight bits takes at once: 1 MiB of float32."""


# Arrays of Python's by the dtype of what they hold.
_CODES = {
    **{torch.float32: "f", torch.float64: "d", torch.uint8: "B", torch.bool: "b"},
    **{torch.int64: "q", torch.int32: "i", torch.int16: "h", torch.int8: "b"},
}


class UpdateKernel:
    """An update's program, compiled by Inductor for shards of any length.

    With ``is_compiled`` false it runs operator by operator, and so does one that moves a value, in
    whatever dtype, from a stream that it writes to another: of `c = p.clone(); p.add_(g);
    m.copy_(c)` Inductor drops the clone, and reads what it has written (torch 2.13).
    """

    may_wait = False

    def __init__(self, program: Program, is_compiled: bool = True) -> None:
        self.program = program
        self._is_compiled = is_compiled and not _moves_old_values(program)
        self.gradient_dtype = program.gradient_dtype
        # Where the step's numbers are written for the kernel to read: the same memory each time.
        self._numbers = {
            operand: array(_CODES[operand.dtype], [0]) for operand in program.number_names(())
        }
        self._tensors = {
            operand: torch.frombuffer(memory, dtype=operand.dtype)[0]
            for operand, memory in self._numbers.items()
        }
        self._first = torch.zeros((), dtype=torch.int64, device="cpu")
        lerps = [value.operands[2] for value in program.values if value.operation == "lerp"]
        self._weights = [weight for weight in lerps if isinstance(weight, NumberOperand)]
        self._runs: dict[bool, Callable] = {}
        self.elements = elements_graph(program, near_weights=True)

    @classmethod
    def of(cls, update: Update, is_compiled: bool = True, **options: Any) -> UpdateKernel:
        """The kernel of an update, with options of ``pointwise_program``.

        Raises: UpdateError for what no program can be made of.
        """
        return cls(pointwise_program(update, by_inductor=True, **options), is_compiled)

    @property
    def source(self) -> str:
        """Both parts as Python, for a reader."""
        host = self.program.host.graph_module
        parts = {"numbers, in Python": host, "elements, compiled": self.elements}
        return "\n\n".join(f"# {what}\n{gm.code.strip()}\n" for what, gm in parts.items())

    def __call__(self, *values: Any) -> list[Any]:
        """Run the update in place, as the traced graph would; return the results it returns."""
        return self.ready(*values)()

    def ready(self, *values: Any) -> Callable[[], list[Any]]:
        """Do all of an update but its elements: return what does these, in any thread.

        Where that has to be compiled, it is now.  What two calls return must not run at once.
        """
        bound = self.program.bind(values)
        numbers, written = [], []
        for operand, memory in self._numbers.items():
            number = bound.numbers[operand.number]
            if isinstance(number, Tensor):
                numbers.append(number.to(operand.dtype))
            else:
                numbers.append(self._tensors[operand])
                written.append((memory, number))
        calls = [[*pieces, *numbers] for pieces in self._pieces(bound.tensors)]
        weights = [bound.numbers[weight.number] for weight in self._weights]
        # Without waiting for a device.
        are_far = any(isinstance(weight, Tensor) or abs(weight) >= 0.5 for weight in weights)
        run = compat.inductor.ready_to_run(self._run(not are_far), calls[0])

        def run_elements() -> list[Any]:
            for memory, number in written:
                memory[0] = number
            sums = [run(*call) for call in calls]
            squares = torch.stack([square for (square,) in sums]).sum() if any(sums) else None
            return self.program.results_of(bound, squares)

        return run_elements

    def _run(self, near_weights: bool) -> Callable:
        if near_weights not in self._runs:
            gm = self.elements if near_weights else elements_graph(self.program, near_weights)
            compiled = compat.inductor.CompiledForAnyLength(gm) if self._is_compiled else gm
            self._runs[near_weights] = compiled
        return self._runs[near_weights]

    def _pieces(self, tensors: Sequence[Tensor]) -> Iterable[list[Tensor]]:
        """Yield the parts of the streams that each call takes, and its first element's number.

        Where blocks have a scale each, flat tensors are cut into rows that are blocks, some rows
        at a time.  The kernel takes two turns over them, to find the scales and to use them:
        little enough at once for the second to find it in cache.
        """
        streams = self.program.streams
        if not self.program.is_in_blocks:
            yield [*tensors, *([self._first] * self.program.counts)]
            return
        for rows, blocks in in_blocks(len(tensors[0]), BLOCKS_AT_ONCE) or [_NOTHING]:
            num_rows = blocks.stop - blocks.start

            def piece(
                tensor: Tensor, stream: Stream, rows: slice = rows, num_rows: int = num_rows
            ) -> Tensor:
                entries = tensor[stream.entries(rows)]
                if stream.is_per_block:
                    return entries
                return entries.view((num_rows, len(entries) // num_rows) if num_rows else (0, 1))

            pieces = list(map(piece, tensors, streams))
            yield [*pieces, *([self._first + rows.start] * self.program.counts)]


_NOTHING = (slice(0, 0), slice(0, 0))


def elements_graph(program: Program, near_weights: bool) -> fx.GraphModule:
    """A program as a graph over its streams, the number of the first element, and its numbers.

    It writes to the streams, and returns the sum of the gradient's squares if that is asked for.
    The number of the first element is there only if elements are counted.  ``lerp`` has two
    formulas, and both for each element cost 4% of an Adam in memory's speed: with
    ``near_weights`` the step's numbers that weigh are below 0.5.
    """
    graph = fx.Graph()
    num_dims = 2 if program.is_in_blocks else 1

    def placeholder(name: str, example: Tensor) -> fx.Node:
        node = graph.placeholder(unique(name, [other.name for other in graph.nodes]))
        node.meta["val"] = example
        return node

    def of_stream(stream: Stream) -> Tensor:
        made = example(1 if stream.is_per_block else num_dims, stream.dtype)
        return made[:, :1] if stream.is_packed else made  # two elements

    def call(function: Callable, *args: Any, **kwargs: Any) -> fx.Node:
        return add_call(graph, function, *args, **kwargs)

    streams = {
        stream.name: placeholder(stream.name, of_stream(stream)) for stream in program.streams
    }
    like = next(iter(streams.values()))
    first = placeholder("begin", example(0, torch.int64)) if program.counts else None
    numbers = {
        operand: placeholder(name, example(0, operand.dtype))
        for operand, name in program.number_names(()).items()
    }
    made: dict[Value, Any] = {}

    def given(operand: Operand) -> Any:
        if isinstance(operand, Value):
            return made[operand]
        return numbers[operand] if isinstance(operand, NumberOperand) else operand

    loads = {stream.load: streams[stream.name] for stream in program.streams}
    for value in program.values:
        operands = list(map(given, value.operands))
        if value in loads:
            node = loads[value]
        elif value.operation == "cast":
            (node,) = operands
        elif value.operation == "index":
            node = call(_index, like, first)
        elif value.operation == "full":
            node = call(operator.add, call(torch.zeros_like, like, dtype=value.dtype), *operands)
        elif value.operation == "bitcast":
            node = call(Tensor.view, operands[0], value.dtype)
        elif value.operation == "lerp" and near_weights and value.operands[2] in numbers:
            node = call(_near_lerp, *operands)
        elif isinstance(value.operation, partial):
            node = _call_as_it_is(graph, value.operation, operands, program.optimizer)
        else:
            function, *others = _FUNCTIONS[value.operation]
            if not any(isinstance(operand, fx.Node) for operand in operands):
                made[value] = function(*operands)  # of constants
                continue
            node = call(function, *operands, *others)
        if node.meta["val"].dtype != value.dtype:
            node = call(Tensor.to, node, value.dtype)
        made[value] = node
    stores = [(streams[s.name], s.store) for s in program.streams if s.store is not None]
    # What is only moved is read before anything is written to it.
    values = [call(torch.clone, made[v]) if _source_of(v) else made[v] for _, v in stores]
    for (target, _), node in zip(stores, values, strict=True):
        call(Tensor.copy_, target, node)
    graph.output([] if program.squares is None else [made[program.squares]])
    return fx.GraphModule({}, graph)


def _moves_old_values(program: Program) -> bool:
    """Return whether a stream is given what another one held, and that one is written to."""
    written = {stream.load for stream in program.streams if stream.store is not None}
    moved = ((s.load, _source_of(s.store)) for s in program.streams if s.store is not None)
    return any(source and source in written and source is not own for own, source in moved)


def _source_of(value: Value) -> Value | None:
    """The load that a value is, in whatever dtype; None if something is computed."""
    while value.operation in ("bitcast", "cast"):
        (source,) = value.operands
        if not isinstance(source, Value):
            return None
        value = source
    return value if value.operation == "load" else None


def _call_as_it_is(
    graph: fx.Graph, operation: partial, operands: Sequence[Any], optimizer: str
) -> fx.Node:
    """Call an operator that has no rule; it may take no tensor for a number of the step."""
    try:
        return add_call(graph, operation.func, *operands, **operation.keywords)
    except Exception as error:
        raise UpdateError(
            f"{optimizer} has no kernel of its own: `{operation.func}` cannot be given a number "
            f"as a tensor: {error}. Write it with the operations that docs/codegen.md lists."
        ) from error


def _near_lerp(start: Tensor, end: Tensor, weight: Tensor) -> Tensor:
    return start + (end - start) * weight


def _index(like: Tensor, first: Tensor) -> Tensor:
    return torch.arange(like.numel(), device=like.device).view(like.shape) + first


def _rounded(x: Tensor) -> Tensor:
    """``torch.round``, of what is below 2**22, in half of the time: that calls a function."""
    return (x + 12582912.0) - 12582912.0


# What a program's operations are in torch: a function, and what it is given behind the operands.
_FUNCTIONS: dict[str, tuple] = {
    **{name: (getattr(operator, name),) for name in ("add", "sub", "mul", "neg")},
    **{name: (getattr(operator, name),) for name in ("gt", "ge", "lt", "le", "eq", "ne")},
    **{
        name: (getattr(torch, name),)
        for name in (
            *("lerp", "where", "abs", "floor", "ceil", "sign", "sqrt", "reciprocal", "exp", "log"),
            *("sigmoid", "sin", "cos", "erf", "isnan", "isinf", "isfinite"),
        )
    },
    "round": (_rounded,),
    "div": (operator.truediv,),
    "and": (operator.and_,),
    "or": (operator.or_,),
    "xor": (operator.xor,),
    "not": (operator.invert,),
    "shift_left": (operator.lshift,),
    "shift_right": (operator.rshift,),
    "maximum": (torch.clamp_min,),
    "minimum": (torch.clamp_max,),
    "largest_of_block": (torch.amax, -1),
    "of_block": (torch.unsqueeze, -1),
    "pack": (packed,),
    "unpack": (unpacked,),
    "sum_of_squares": (sum_of_squares,),
}
