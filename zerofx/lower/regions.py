"""The compute between zerofx operators, compiled by Inductor region by region."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from types import MethodType
from typing import Any

import torch
from torch import fx, nn

from zerofx import compat
from zerofx.ir.aliases import aliased_inputs, aliases
from zerofx.ir.aliases import is_compute as computes
from zerofx.ir.source import call_text, layout_text

aten = torch.ops.aten

# Inductor takes some operators apart into others, whose results may have other strides than were
# captured: of such a result, a view may have to be a copy.
_VIEWS = {aten.view.default, aten._unsafe_view.default}


def with_compiled_regions(gm: fx.GraphModule, program: fx.Graph, root: nn.Module) -> fx.Graph:
    """Copy a program with each run of compute replaced by a call of its compiled region.

    The regions become submodules of ``root``, as what the program reads from ``gm`` does.
    """
    _take_results_apart_at_once(program)
    region_of = _regions(program)
    _take_views_where_they_are_read(program, region_of)
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    pending: list[fx.Node] = []

    def flush() -> None:
        if not any(_computes(node) for node in pending):
            for node in pending:  # nothing but views: not worth a call
                copies[node] = graph.node_copy(node, copies.__getitem__)
        else:
            _call_region(gm, pending, region_of, graph, root, copies)
        pending.clear()

    for node in program.nodes:
        if node.op == "get_attr" and not hasattr(root, node.target):
            setattr(root, node.target, getattr(gm, node.target))
        if node in region_of:
            pending.append(node)
            continue
        flush()
        if node.op == "output":
            graph.output(fx.node.map_arg(node.args[0], copies.__getitem__))
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    return graph


def _take_results_apart_at_once(program: fx.Graph) -> None:
    """Compiled regions return tensors: those of several results are taken where they are made."""
    for node in program.nodes:
        if not is_compute(node) or isinstance(node.meta.get("val"), torch.Tensor):
            continue
        for part in [user for user in node.users if user.target is operator.getitem]:
            if part.users:
                node.append(part)
            else:
                program.erase_node(part)


def _regions(program: fx.Graph) -> dict[fx.Node, int]:
    """Number the runs of compute, and say which one each node of theirs is in."""
    region_of: dict[fx.Node, int] = {}
    number = 0
    for node in program.nodes:
        if is_compute(node):
            region_of[node] = number
        else:
            number += 1
    return region_of


def _take_views_where_they_are_read(program: fx.Graph, region_of: dict[fx.Node, int]) -> None:
    """Give every region a view of its own, where it reads one that another region takes.

    What passes between regions is then whole memory, once, which its last reader may reuse.
    """
    for node in reversed(program.nodes):
        if node not in region_of or not _is_view(node):
            continue
        own = {region_of[node]: node}
        for user in sorted(node.users):  # in the program's order
            region = region_of.get(user)
            if region is None:
                continue
            if region not in own:
                with program.inserting_before(user):
                    own[region] = program.node_copy(node)
                region_of[own[region]] = region
            user.replace_input_with(node, own[region])
        if not node.users:
            program.erase_node(node)


def _is_view(node: fx.Node) -> bool:
    """Whether all that a node does is to look at one tensor's memory in another way."""
    return (
        isinstance(node.target, torch._ops.OpOverload)
        and aliased_inputs(node) == node.all_input_nodes
        and isinstance(node.meta.get("val"), torch.Tensor)
    )


def is_compute(node: fx.Node) -> bool:
    """Whether a node goes into a compiled region."""
    is_the_runtimes = isinstance(node.target, MethodType)
    return computes(node) and not is_the_runtimes and not _has_branches(node)


def _has_branches(node: fx.Node) -> bool:
    """Whether a node runs programs of its own, as ``torch.cond`` does, or is a result of such.

    These are in attributes and no tensors, as a region's inputs are: they run operator by operator.
    """
    if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        return _has_branches(node.args[0])
    return compat.is_higher_order(node.target)


def _computes(node: fx.Node) -> bool:
    return node.target is not operator.getitem and not aliased_inputs(node)


def _call_region(
    gm: fx.GraphModule,
    nodes: list[fx.Node],
    region_of: Mapping[fx.Node, int],
    graph: fx.Graph,
    root: nn.Module,
    copies: dict[fx.Node, fx.Node],
) -> None:
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
    number = region_of[nodes[0]]
    donated = [at for at, source in enumerate(inputs) if _dies_in(number, source, region_of)]
    for position, source in enumerate(inputs):
        local[source] = body.call_function(operator.getitem, (values, position))
        local[source].meta = dict(source.meta)
        if position in donated:
            local[source].name = f"donated_{position}"  # torch's caches go by the code
    for node in nodes:
        local[node] = body.node_copy(node, local.__getitem__)
        if node.target in _VIEWS:
            local[node].target = aten.reshape.default
        compat.forget_checkpoints(local[node])
    body.output(tuple(local[node] for node in outputs))
    name = f"region_{sum(1 for _ in root.children())}"
    is_dynamic = any(_is_symbolic(node.meta.get("val")) for node in (*inputs, *nodes))
    root.add_module(name, CompiledRegion(fx.GraphModule(gm, body), is_dynamic, donated))
    # A call of its own: the program's names for the inputs are gone when the region begins.
    box = graph.call_function(_listed, tuple(copies[source] for source in inputs))
    call = graph.call_module(name, (box,))
    for position, node in enumerate(outputs):
        copies[node] = graph.call_function(operator.getitem, (call, position))


def _dies_in(number: int, source: fx.Node, region_of: Mapping[fx.Node, int]) -> bool:
    """Whether a region's input is memory that another region has made and nobody reads later.

    Its views are read by the region that takes them, if at all.  Whatever is no region may read it
    later than it says, as communication does, or keep it.
    """
    maker = source.args[0] if source.target is operator.getitem else source
    if not isinstance(maker, fx.Node) or not isinstance(maker.target, torch._ops.OpOverload):
        return False
    if maker not in region_of or aliased_inputs(maker):
        return False
    return all(
        user in region_of
        and region_of[user] <= number
        and (alias is source or region_of[user] == region_of.get(alias))
        for alias in aliases(source)
        for user in alias.users
    )


def _listed(*values: Any) -> list[Any]:
    return list(values)


def _is_symbolic(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return any(isinstance(size, torch.SymInt) for size in (*value.shape, *value.stride()))
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))


class CompiledRegion(nn.Module):
    """The compute between two zerofx operators, compiled by Inductor when it first runs.

    Compiling with the values at hand needs no tracing context of the step's own compilation.
    Equal regions, as those of equal layers, share what has been compiled, if their inputs lie in
    memory alike.  A region with symbolic sizes or strides is compiled once for each set of them.

    It takes its inputs in a list, which it empties: what forward has saved for backward, and
    nobody reads later, is freed while the region runs and not after it.  Results may take the
    memory of the ``donated`` ones.

    Inductor may leave out an operator that changes nothing, ``x + 0`` or a second ``clone``, and
    return one tensor for two.  Others write to what they take for memory of its own, so it is
    looked up when the region first runs, and copied from then on.
    """

    # By what a region computes: what runs it, and which of its results to copy.
    _known: dict[str, dict[tuple, tuple[Callable, list[int]]]] = {}

    def __init__(self, gm: fx.GraphModule, is_dynamic: bool, donated: Sequence[int]):
        super().__init__()
        self.gm = gm
        self.is_dynamic = is_dynamic
        self.donated = donated  # positions of inputs
        self.compiled = self._known.setdefault(f"{_computation(gm.graph)}\n{donated}", {})
        self.found: tuple[Callable, list[int]] | None = None  # of those, for these inputs

    def forward(self, values: list[Any]) -> tuple[Any, ...]:
        results, found = None, self.found
        if found is None or self.is_dynamic:
            layouts = tuple(map(_layout, values))
            if layouts not in self.compiled:
                self.compiled[layouts], results = self._compile(values)
            self.found = found = self.compiled[layouts]
        run, copied = found
        if results is None:
            results = run(values)
        if copied:
            return tuple(r.clone() if at in copied else r for at, r in enumerate(results))
        return results

    def _compile(self, values: list[Any]) -> tuple[tuple[Callable, list[int]], tuple[Any, ...]]:
        """Compile for these inputs and run for the first time; return both."""
        run = compat.compile_with_inductor(self.gm, [values], self.donated)
        # Held, so that no result takes the place of one that is freed meanwhile.
        held = [None if at in self.donated else v for at, v in enumerate(values)]
        results = run(values)
        places = list(map(_place, held))
        return (run, _shared_unasked(self.gm.graph, places, results)), results


def _place(value: Any) -> int | None:
    """Where a tensor's memory begins; None for one without any."""
    if not isinstance(value, torch.Tensor) or not value.untyped_storage().nbytes():
        return None
    return value.untyped_storage().data_ptr()


def _shared_unasked(
    graph: fx.Graph, places: Sequence[int | None], results: Sequence[Any]
) -> list[int]:
    """Results in the memory of an input or another result that they are no views of."""
    owners: dict[int | None, set[fx.Node]] = {}
    for node in graph.nodes:
        if node.target is operator.getitem and node.args[0].op == "placeholder":
            owners.setdefault(places[node.args[1]], set()).add(node)
    found = []
    for at, (node, result) in enumerate(zip(graph.output_node().args[0], results, strict=True)):
        place, origins = _place(result), _origins(node)
        there = owners.setdefault(place, set())
        if place is not None and there and there.isdisjoint(origins):
            found.append(at)
        else:
            there |= origins
    return found


def _origins(node: fx.Node) -> set[fx.Node]:
    """What a node is a view of, or itself."""
    bases = aliased_inputs(node)
    if node.target is operator.getitem:  # of several results, or of the region's inputs
        bases = [base for source in bases for base in aliased_inputs(source)]
    return set().union(*map(_origins, bases)) if bases else {node}


def _computation(graph: fx.Graph) -> str:
    """Everything that compiling a region depends on, without names: equal for equal regions."""
    number = {node: f"%{position}" for position, node in enumerate(graph.nodes)}
    lines = []
    for node in graph.nodes:
        call = node.op if node.op == "placeholder" else call_text(node, number.__getitem__)
        lines.append(f"{call} {layout_text(node.meta.get('val'))}")
    return "\n".join(lines)


def _layout(value: Any) -> Any:
    return (value.shape, value.stride()) if isinstance(value, torch.Tensor) else value
