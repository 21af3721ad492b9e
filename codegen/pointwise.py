"""One update as a pointwise program: what happens to one element, in the optimizer's order.

``pointwise_program`` makes it of a traced update.  In-place operations, views and aliases are
gone: every ``Value`` is computed once, from values before it, numbers and constants.  What it is
worth to a kernel is said outright: the streams it reads and writes, and their bytes.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx

from zerofx.codegen.numbers import Number, NumberGraph, identifier, roots_of, unique
from zerofx.codegen.operations import (
    ALIASES,
    NumberOperand,
    Operand,
    Value,
    as_it_is,
    operator_names,
    register_dtype,
    rule_of,
)
from zerofx.codegen.program import Kind, Program, Result, Stream, without_dead_values
from zerofx.codegen.rewrite.elementwise import UpdateError, is_tensor, operation_line, source_line
from zerofx.codegen.rewrite.gradient_work import GradientWork, sum_of_squares
from zerofx.codegen.rewrite.rounding import LOW, round_to
from zerofx.codegen.trace.functions import add_call, example, note_of, trace_call
from zerofx.codegen.trace.nested import Slot, named_leaves
from zerofx.codegen.trace.trace import Update
from zerofx.ir.aliases import mutated_inputs
from zerofx.ir.wires import BLOCK

aten = torch.ops.aten


def pointwise_program(
    update: Update,
    *,
    gradient_dtype: torch.dtype | None = None,
    work: GradientWork | None = None,
    squares: bool = False,
    by_inductor: bool = False,
) -> Program:
    """Normalise a traced update of flat shards.

    The gradient arrives in ``gradient_dtype``, if not as the update takes it.  ``work`` is done to
    it first, whose coefficients are the last inputs; ``squares`` asks for the sum of its squares
    then, behind the other results.  ``by_inductor``: the program is written in torch's operators,
    so one without a rule is taken as it is.

    Raises: UpdateError naming the operation and the optimizer's line, where the update is not
    elementwise, or has an operation that is not known here.
    """
    build = Builder(update, by_inductor)
    build.load(gradient_dtype, work)
    if squares:
        build.sum_squares()
    return build.run()


class Builder:
    """Takes over a traced update node by node; rules write with it."""

    def __init__(self, update: Update, by_inductor: bool = False) -> None:
        self.update, self.by_inductor = update, by_inductor
        self.graph = update.graph_module.graph
        self.placeholders = self.graph.find_nodes(op="placeholder")
        paired = zip(self.placeholders, update.shards, strict=False)
        self.shards = [node for node, is_shard in paired if is_shard]
        self.stream_names: dict[fx.Node, str] = {}
        self.number_names = self._name_inputs()
        self.numbers = NumberGraph(update.graph_module, self.number_names)
        self.coefficients: dict[fx.Node, Number] = {}
        self.source_names = _source_names(self.graph)
        self.note = ""  # the Python function whose operations are being taken over
        self.values: list[Value] = []
        self.root: dict[fx.Node, fx.Node] = {}
        self.current: dict[fx.Node, Value | None] = {}
        self.length: set[fx.Node] = set()
        self.loads: dict[fx.Node, Value] = {}
        self.squares: Value | None = None
        self.gradient_dtype = update.gradient_dtype
        self.read_again = _read_again(self.graph)

    def _name_inputs(self) -> dict[fx.Node, str]:
        """Name the streams, and return the numbers' names: the optimizer's own where it has any."""
        names: dict[fx.Node, str] = {}
        by_path: dict[str, str] = {}
        # What has been added to a traced update has its own name only.
        known = self.update.inputs
        added = (f"added.{node.name}" for node in self.placeholders[len(known) :])
        paired = zip(self.placeholders, (*known, *added), strict=True)
        for node, path in sorted(paired, key=lambda pair: is_tensor(pair[0])):
            if node in self.shards:
                taken = tuple(self.stream_names.values())
                self.stream_names[node] = unique(_last_name(path), taken)
            else:  # a 0-dim tensor and its number are one
                if path not in by_path:
                    source_name = None if is_tensor(node) else node.meta.get("source_name")
                    name = identifier(source_name or _last_name(path))
                    by_path[path] = unique(name, tuple(by_path.values()))
                names[node] = by_path[path]
        return names

    def load(self, gradient_dtype: torch.dtype | None, work: GradientWork | None) -> None:
        """Load every stream, and do work to the gradient."""
        gradient = self.placeholders[1]
        for node in self.shards:
            if not is_tensor(node):
                raise self.refusal(node, "does not say in meta['val'] which dtype it has")
            dtype = node.meta["val"].dtype
            if node is gradient and work is not None:
                self.gradient_dtype = dtype = work.inputs[0].meta["val"].dtype
            load = Value("load", (), register_dtype(dtype), self.stream_names[node])
            self.loads[node] = load
            self.values.append(load)
            self.root[node] = node
            self.current[node] = load
        self.gradient_dtype = gradient_dtype or self.gradient_dtype
        if work is not None:
            self._work_on_gradient(work)

    def run(self) -> Program:
        for node in self.graph.nodes:
            if node.op == "output":
                output = node.args[0]
            elif node not in self.root:
                self._visit(node)
        return self._finish(output)

    def emit(
        self, operation: str | partial, *operands: Operand, dtype: torch.dtype, node: fx.Node
    ) -> Value:
        """Append the value of one operation, which serves ``node``."""
        line = "" if self.note else source_line(node)
        value = Value(operation, operands, dtype, "", line, self.note)
        self.values.append(value)
        return value

    def operand(self, argument: Any, dtype: torch.dtype, node: fx.Node) -> Operand:
        """An argument of ``node`` in the dtype that it is computed in."""
        value, negative = self.signed(argument, dtype, node)
        return self.emit("neg", value, dtype=dtype, node=node) if negative else value

    def signed(self, argument: Any, dtype: torch.dtype, node: fx.Node) -> tuple[Operand, bool]:
        """An argument without its sign if it is a number, and whether it had one."""
        if not isinstance(argument, fx.Node):
            if not dtype.is_floating_point or not isinstance(argument, (int, float)):
                return argument, False
            return abs(argument), argument < 0
        if self.is_element(argument):
            value = self.current[self.root[argument]]
            if value is None:
                raise self.refusal(node, "reads memory that nothing was written to")
            return self.cast(value, dtype, node), False
        if argument in self.length:
            raise self.refusal(node, "computes with the length of a shard")
        if argument in self.coefficients:
            return NumberOperand(self.coefficients[argument], dtype), False
        number, negative = self.numbers.use(argument)
        if isinstance(number, Number):
            return NumberOperand(number, dtype), negative
        operand, inner = self.signed(number, dtype, node)
        return operand, inner is not negative

    def cast(self, value: Value, dtype: torch.dtype, node: fx.Node) -> Value:
        if value.dtype == dtype:
            return value
        return self.emit("cast", value, dtype=dtype, node=node)

    def converted(self, value: Value, dtype: torch.dtype, node: fx.Node) -> Value:
        """A value in a dtype that the optimizer asks for, rounded to it.

        What functions such as ``round_to`` convert stays: they are written for compilers.
        """
        asks = self.by_inductor and not self.note
        if asks and dtype in LOW and value.dtype.is_floating_point:
            value = self._rounded(value, dtype, node)
        return self.cast(value, dtype, node)

    def is_element(self, argument: Any) -> bool:
        return isinstance(argument, fx.Node) and argument in self.root

    def refusal(self, node: fx.Node, reason: str) -> UpdateError:
        return UpdateError(
            f"{self.update.optimizer} has no kernel of its own: `{node.target}`"
            f"{operation_line(node)} {reason}. Write it with the operations that "
            "docs/codegen.md lists."
        )

    def _visit(self, node: fx.Node) -> None:
        """Take over one node of the trace: a number, a new name for a value, or a new value."""
        reads = [operand for operand in node.all_input_nodes if operand in self.root]
        if node.target in (aten.sym_size.int, aten.sym_numel.default):
            self.length.add(node)
            return
        counts = node.target is aten.arange.default and bool(self.note)
        sized = counts or any(operand in self.length for operand in node.all_input_nodes)
        if not reads and not sized:
            self.numbers.add(node)
            return
        if not isinstance(node.target, torch._ops.OpOverload):
            self._call(node)
            return
        if _is_alias(node):
            self.root[node] = self.root[reads[0]]
            return
        value = self._computed(node)
        written = mutated_inputs(node)
        root = self.root[node] = self.root[written[0]] if written else node
        if value is not None and root is not node:
            value = self.cast(value, register_dtype(node.meta["val"].dtype), node)
        if value is not None and node is self.read_again:
            value = self._rounded(value, self.placeholders[0].meta["val"].dtype, node)
        self.current[root] = self._named(value, node, root) if value is not None else None

    def _computed(self, node: fx.Node) -> Value | None:
        rule = rule_of(node.target, in_function=bool(self.note))
        if not is_tensor(node) or (rule is None and not self.by_inductor):
            raise self.refusal(node, "is not known to the kernel")
        try:
            return (rule or as_it_is)(self, node)
        except UpdateError:
            if rule is None or not self.by_inductor:
                raise
            return as_it_is(self, node)

    def _call(self, node: fx.Node) -> None:
        """Take over what a Python function of elements does, operation by operation."""
        if not all(map(is_tensor, node.all_input_nodes)):
            raise self.refusal(node, "is not an operation on tensors")
        *inner, output = trace_call(node).nodes
        num_operands = len(node.all_input_nodes)
        for operand, outer in zip(inner, node.all_input_nodes, strict=False):
            if self.is_element(outer):
                self.root[operand] = self.root[outer]
            else:
                self.numbers.alias(operand, outer)
        self.note = note_of(node.target)
        for operation in inner[num_operands:]:
            self._visit(operation)
        self.note = ""
        self.root[node] = root = self.root[output.args[0]]
        value = self.current[root]
        if root is output.args[0] and value is self.values[-1] and not value.name:
            self._rename_last(node.target.__name__)

    def _rounded(self, value: Value, dtype: torch.dtype, node: fx.Node) -> Value:
        """A value of ``node`` rounded to fewer bits: by bits, as compilers leave such casts out."""
        graph = fx.Graph()
        source = graph.placeholder("value")
        source.meta["val"] = example(1, torch.float32)
        self.root[source] = source
        self.current[source] = self.cast(value, torch.float32, node)
        rounded = add_call(graph, round_to, source, dtype)
        self._call(rounded)
        result = self.current[self.root[rounded]]
        assert result is not None
        return result

    def _work_on_gradient(self, work: GradientWork) -> None:
        """Do work to the gradient first.  What the step rounds between two operations is rounded.

        Before, for clipping a bfloat16 gradient::

            grad = load

        After::

            mul = grad * coefficient;  rounded = round_to(mul);  grad = cast(rounded, bfloat16)
        """
        gradient, (own, *coefficients) = self.placeholders[1], work.inputs
        for node in coefficients:
            name = unique(identifier(node.name), tuple(self.number_names.values()))
            self.number_names[node] = name
            self.coefficients[node] = Number(name, "computed by the step, on the device")
        self.root[own], self.current[own] = own, self.current[gradient]
        for node in work.operations:
            self.source_names[node] = "grad"
            self._visit(node)
            value = self.current[node]
            assert value is not None, "work makes something of a gradient"
            if node.meta["val"].dtype in LOW:
                if value.operation == "cast":
                    (value,) = value.values
                self.current[node] = self._rounded(value, node.meta["val"].dtype, node)
        output = work.graph_module.graph.output_node()
        self.source_names[output] = "grad"
        made = self.current[self.root[output.args[0]]]
        assert made is not None
        made = self.cast(made, self.update.gradient_dtype, output)
        self.current[gradient] = self._named(made, output, output)

    def sum_squares(self) -> None:
        """Add the one result that is no stream: a number for each block of the grid."""
        gradient = self.placeholders[1]
        elements = self.operand(gradient, torch.float32, gradient)
        note = note_of(sum_of_squares)
        self.squares = Value("sum_of_squares", (elements,), torch.float32, "squares", note=note)
        self.values.append(self.squares)

    def _named(self, value: Value, node: fx.Node, root: fx.Node) -> Value:
        """The value under the optimizer's name for it; that of the memory if it is written to."""
        name = self.stream_names.get(root) or self.source_names.get(node)
        if not name or not self.values or value is not self.values[-1] or value.name:
            return value
        return self._rename_last(name)

    def _rename_last(self, name: str) -> Value:
        """Name the last value, also where it is what other memory was given."""
        value = self.values[-1]
        self.values[-1] = named = replace(value, name=identifier(name))
        for root in [root for root, current in self.current.items() if current is value]:
            self.current[root] = named
        return named

    def _finish(self, output: Any) -> Program:
        streams = list(map(self._stream, self.shards))
        results: list[Result] = []
        kept: list[fx.Node] = []
        new: dict[fx.Node, str] = {}
        for position, node in enumerate(output):
            if not isinstance(node, fx.Node) or node in self.length:
                raise self.refusal(node, "is a result that is no tensor of the parameter's shape")
            if node not in self.root:
                results.append(("number", len(kept)))
                kept.append(node)
                continue
            root = self.root[node]
            if root in self.stream_names and root is not self.placeholders[1]:
                results.append(("stream", self.stream_names[root]))
                continue
            if root not in new:
                taken = (stream.name for stream in streams)
                new[root] = unique(identifier(self._name_of_result(position)), tuple(taken))
                value = self.operand(node, register_dtype(node.meta["val"].dtype), node)
                assert isinstance(value, Value)
                dtype = node.meta["val"].dtype
                streams.append(Stream(new[root], "new state", dtype, store=value))
            results.append(("stream", new[root]))
        if self.squares is not None:
            results.append(("squares", None))
        host = self.numbers.finish(kept)
        num_inputs = len(self.placeholders)
        inputs = {self.stream_names[node]: self.placeholders.index(node) for node in self.shards}
        program = Program(
            self.update.optimizer,
            tuple(streams),
            tuple(self.values),
            host,
            inputs,
            tuple(results),
            tuple(self.coefficients.values()),
            tuple(range(num_inputs, num_inputs + len(self.coefficients))),
            self.squares,
        )
        return without_dead_values(program)

    def _stream(self, node: fx.Node) -> Stream:
        name, load, value = self.stream_names[node], self.loads[node], self.current[node]
        dtype = node.meta["val"].dtype
        if node is self.placeholders[1]:
            return Stream(name, "gradient", self.gradient_dtype, load)
        kind: Kind = "parameter" if node is self.placeholders[0] else "state"
        is_scale = self.placeholders.index(node) in self.update.scales
        return Stream(
            name, kind, dtype, load, None if value is load else value, BLOCK if is_scale else 1
        )

    def _name_of_result(self, position: int) -> str:
        """The name of the state, or of the part of one, that a result becomes."""
        for owner in (self.update.state, self.update.group):
            for path, leaf in named_leaves(dict(owner)):
                if leaf == Slot(position):
                    return "_".join(str(k + 1 if type(k) is int else k) for k in path)
        return "state"


def _read_again(graph: fx.Graph) -> fx.Node | None:
    """Return the value to round, because the update reads what it stored in a narrow parameter.

    Kernels compute in float32 and round what they store.  An update that looks at its own
    rounding, to make up for it at the next step (Kahan summation), has to find it: in what it
    writes last, or in what it copies from if somebody else reads that.
    """
    nodes = list(graph.nodes)
    parameter = nodes[0].meta.get("val")
    if not isinstance(parameter, torch.Tensor) or parameter.dtype not in LOW:
        return None
    root = roots_of(graph)
    written = [
        node for node in nodes if any(root[item] is nodes[0] for item in mutated_inputs(node))
    ]
    if not written:
        return None
    last = written[-1]
    if last.target is aten.copy_.default and last.args[1].op == "call_function":
        value = last.args[1].meta.get("val")
        is_result = isinstance(value, torch.Tensor) and value.dtype == parameter.dtype
        if is_result and len(last.args[1].users) > 1:
            return last.args[1]
    for node in nodes[nodes.index(last) + 1 :]:
        reads = any(root[operand] is nodes[0] for operand in node.all_input_nodes)
        if reads and isinstance(node.target, torch._ops.OpOverload):  # others ask for its length
            return last
    return None


def _is_alias(node: fx.Node) -> bool:
    """Return whether a node gives another name to its one operand: a view of the whole shape."""
    return (
        isinstance(node.target, torch._ops.OpOverload)
        and operator_names(node.target)[0] in ALIASES
        and node.target is not aten.view.dtype
        and len(node.all_input_nodes) == 1
    )


def _source_names(graph: fx.Graph) -> dict[fx.Node, str]:
    """Return the optimizer's name for a node's result, or for an alias of it."""
    names: dict[fx.Node, str] = {}
    for node in reversed(graph.nodes):
        name = node.meta.get("source_name") or names.get(node)
        if name is not None:
            names[node] = name
            if _is_alias(node):
                names.setdefault(node.all_input_nodes[0], name)
    return names


def _last_name(path: str) -> str:
    """Return an input's short name: ``group.betas.0`` is ``beta1``."""
    owner, *parts = path.split(".")
    name = parts[0] if parts else owner
    for part in parts[1:]:
        is_place = part.isdigit()
        name = f"{name.removesuffix('s')}{int(part) + 1}" if is_place else f"{name}_{part}"
    return identifier(name)
