"""From the passes' program to something that runs: operators bound to one step's runtime."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from types import MethodType
from typing import Any

import torch
from torch import fx, nn

from zerofx import compat, ops
from zerofx.graph import aliased_inputs, erase_unused, mutated_inputs
from zerofx.in_place import WholeBucket


def lower(
    gm: fx.GraphModule,
    kernels: Mapping[object, Callable],
    lowering: str,
    update_together: Callable | None = None,
    reduce_bucket_start: Callable | None = None,
    write_back: Callable | None = None,
    in_place: Sequence[WholeBucket] = (),
) -> Callable:
    """Return a function of the program's inputs.

    ``kernels`` holds the function that runs each ``zerofx::`` operator.  ``eager`` runs every
    operator by itself; ``inductor`` compiles what stands between zerofx operators.
    Communication keeps the program's order in both.  ``update_together``, if given, runs
    several updates that follow one another; ``reduce_bucket_start`` reduces a bucket of what
    would be copied into its buffer for that alone; ``write_back`` stands for all copies of
    updated values into the parameters of a bucket, for those of ``in_place``.
    """
    root = nn.Module()
    program = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    program.output(program.graph_copy(gm.graph, copies))
    if write_back is not None:
        for bucket in in_place:
            _write_back_together(program, bucket, copies, write_back)
    if lowering == "inductor":
        graph = _with_compiled_regions(gm, program, root)
    else:
        graph = program
        for node in graph.nodes:
            if node.op == "get_attr":
                setattr(root, node.target, getattr(gm, node.target))
    if update_together is not None:
        _merge_updates(graph, update_together)
    if reduce_bucket_start is not None:
        _reduce_unflattened(graph, reduce_bucket_start)
    for node in graph.nodes:
        if node.op == "call_function" and node.target in kernels:
            node.target = kernels[node.target]
    return fx.GraphModule(root, graph, "ZeroProgram")


def _write_back_together(
    graph: fx.Graph,
    bucket: WholeBucket,
    copies: Mapping[fx.Node, fx.Node],
    write_back: Callable,
) -> None:
    """Replace the copies of a gathered bucket into its parameters by one call."""
    wait, writes = copies[bucket.wait], [copies[write] for write in bucket.writes]
    with graph.inserting_after(wait):
        wholes = [write.args[0] for write in writes]
        graph.call_function(write_back, (wait, wholes, list(bucket.parameters)))
    for write in writes:
        value = write.args[1]
        graph.erase_node(write)
        erase_unused(graph, [value])


def _merge_updates(graph: fx.Graph, update_together: Callable) -> None:
    """Replace updates of one optimizer that follow one another by one call.

    Between them may stand what reads nothing that they write: views of gradients, and copies of
    shards yet to be updated.
    """
    pending: list[fx.Node] = []

    def flush() -> None:
        if pending:
            _, _, optimizer, _, *found_inf = pending[0].args
            with graph.inserting_after(pending[-1]):
                values, grads, _, parameters = zip(*(n.args[:4] for n in pending), strict=True)
                together = graph.call_function(
                    update_together,
                    (list(values), list(grads), optimizer, list(parameters), *found_inf),
                    dict(pending[0].kwargs),
                )
            for position, node in reversed(list(enumerate(pending))):
                with graph.inserting_after(together):
                    part = graph.call_function(operator.getitem, (together, position))
                node.replace_all_uses_with(part)
                graph.erase_node(node)
        pending.clear()

    for node in list(graph.nodes):
        if node.target is ops.update and all(n not in pending for n in node.all_input_nodes):
            if pending and _shared(node) != _shared(pending[0]):
                flush()
            pending.append(node)
        elif pending and not _may_stand_between(node, pending):
            flush()


def _reduce_unflattened(graph: fx.Graph, reduce_bucket_start: Callable) -> None:
    """Replace a copy into a bucket's buffer and the reduction that alone reads it by one call."""
    for start in list(graph.nodes):
        if start.target is not ops.reduce_scatter_start:
            continue
        flat, *others = start.args
        if flat.target is ops.flatten_bucket and list(flat.users) == [start]:
            with graph.inserting_before(start):
                call = graph.call_function(reduce_bucket_start, (*flat.args, *others))
            start.replace_all_uses_with(call)
            graph.erase_node(start)
            graph.erase_node(flat)


def _shared(update: fx.Node) -> tuple:
    """What updates must have in common: the optimizer, and its flag of overflow."""
    return (update.args[2], update.args[4:], tuple(update.kwargs.items()))


def _may_stand_between(node: fx.Node, updates: list[fx.Node]) -> bool:
    if any(operand in updates for operand in node.all_input_nodes):
        return False
    return node.target in (ops.take_shard, operator.getitem) or (
        node.op == "call_function" and not ops.is_ours(node.target) and bool(aliased_inputs(node))
    )


class CompiledRegion(nn.Module):
    """The compute between two zerofx operators, compiled by Inductor when it first runs.

    Compiling with the values at hand needs no tracing context of the step's own compilation.
    Equal regions, as those of equal layers, share what has been compiled.  A region with
    symbolic sizes is compiled once for each set of them.

    It takes its inputs in a list, which it empties: what forward has saved for backward, and
    nobody reads later, is freed while the region runs and not after it.
    """

    _known: dict[str, dict[tuple, Callable]] = {}  # by what a region computes

    def __init__(self, gm: fx.GraphModule, is_dynamic: bool):
        super().__init__()
        self.gm = gm
        self.is_dynamic = is_dynamic
        self.compiled = self._known.setdefault(_computation(gm.graph), {})

    def forward(self, values: list[Any]) -> tuple[Any, ...]:
        sizes = tuple(map(_size, values)) if self.is_dynamic else ()
        if sizes not in self.compiled:
            self.compiled[sizes] = compat.compile_with_inductor(self.gm, [values])
        return self.compiled[sizes](values)


def _computation(graph: fx.Graph) -> str:
    """Everything that compiling a region depends on, without names: equal for equal regions."""
    number = {node: f"%{position}" for position, node in enumerate(graph.nodes)}
    lines = []
    for node in graph.nodes:
        arguments = fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: _Text(number[n]))
        target = "" if node.op == "placeholder" else node.target
        lines.append(f"{node.op} {target} {arguments} {_layout(node.meta.get('val'))}")
    return "\n".join(lines)


class _Text(str):
    __repr__ = str.__str__


def _layout(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {value.device} {tuple(value.shape)} {value.stride()}"
    return repr(value)


def _size(value: Any) -> Any:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else value


def _with_compiled_regions(gm: fx.GraphModule, program: fx.Graph, root: nn.Module) -> fx.Graph:
    """Copy a program with each run of compute replaced by a call of its compiled region."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    pending: list[fx.Node] = []

    def flush() -> None:
        if not any(_computes(node) for node in pending):
            for node in pending:  # nothing but views: not worth a call
                copies[node] = graph.node_copy(node, copies.__getitem__)
        else:
            _call_region(gm, pending, graph, root, copies)
        pending.clear()

    for node in program.nodes:
        if node in copies:
            continue  # part of a result that its region has taken apart
        if node.target is operator.getitem and not node.users:
            continue  # a part that nobody reads, maybe far from what it is a part of
        if node.op == "get_attr":
            setattr(root, node.target, getattr(gm, node.target))
        if _is_compute(node):
            pending.append(node)
            continue
        flush()
        if node.op == "output":
            graph.output(fx.node.map_arg(node.args[0], copies.__getitem__))
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    return graph


def _is_compute(node: fx.Node) -> bool:
    if node.op != "call_function" or isinstance(node.target, MethodType):  # the runtime's
        return False
    return not ops.is_ours(node.target) and not mutated_inputs(node)


def _computes(node: fx.Node) -> bool:
    return node.target is not operator.getitem and not aliased_inputs(node)


def _call_region(
    gm: fx.GraphModule,
    nodes: list[fx.Node],
    graph: fx.Graph,
    root: nn.Module,
    copies: dict[fx.Node, fx.Node],
) -> None:
    # A compiled region returns tensors, so whoever makes several is taken apart inside it.
    for node in list(nodes):
        if not isinstance(node.meta.get("val"), torch.Tensor):
            parts = [user for user in node.users if user.target is operator.getitem]
            nodes.extend(part for part in parts if part not in nodes)
    inside = set(nodes)
    inputs = list(
        dict.fromkeys(s for node in nodes for s in node.all_input_nodes if s not in inside)
    )
    outputs = [
        node
        for node in nodes
        if any(user not in inside for user in node.users)
        and not isinstance(node.meta["val"], (tuple, list))
    ]
    body = fx.Graph()
    local = {}
    values = body.placeholder("values")
    compat.mark_emptied(values)
    for position, source in enumerate(inputs):
        local[source] = body.call_function(operator.getitem, (values, position))
        local[source].meta = dict(source.meta)
    for node in nodes:
        local[node] = body.node_copy(node, local.__getitem__)
        compat.forget_checkpoints(local[node])
    body.output(tuple(local[node] for node in outputs))
    name = f"region_{sum(1 for _ in root.children())}"
    is_dynamic = any(_is_symbolic(node.meta.get("val")) for node in (*inputs, *nodes))
    root.add_module(name, CompiledRegion(fx.GraphModule(gm, body), is_dynamic))
    # A call of its own: the program's names for the inputs are gone when the region begins.
    box = graph.call_function(_listed, tuple(copies[source] for source in inputs))
    call = graph.call_module(name, (box,))
    for position, node in enumerate(outputs):
        copies[node] = graph.call_function(operator.getitem, (call, position))


def _listed(*values: Any) -> list[Any]:
    return list(values)


def _is_symbolic(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return any(isinstance(size, torch.SymInt) for size in value.shape)
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))
