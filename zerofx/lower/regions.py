"""The compute between zerofx operators, compiled by Inductor region by region."""

from __future__ import annotations

import contextlib
import itertools
import logging
import operator
import os
import traceback
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx, nn

from zerofx import compat
from zerofx.compat.inductor import CompiledForAnyLength, Like
from zerofx.ir import ops
from zerofx.ir.aliases import aliased_inputs, memory_of, mutated_inputs, uses
from zerofx.ir.graph import is_random
from zerofx.ir.interface import input_role, region_of, written_input
from zerofx.ir.key import key_of
from zerofx.ir.reach import reached
from zerofx.ir.regions import shared_by_layers
from zerofx.ir.roles import Role, role
from zerofx.ir.sizes import is_symbolic
from zerofx.ir.source import call_text, layout_text
from zerofx.runtime.memory.flat import without_base

logger = logging.getLogger("zerofx")

aten = torch.ops.aten

# Inductor takes some operators apart into others, whose results may have other strides than were
# captured: of such a result, a view may have to be a copy.
_VIEWS = {aten.view.default, aten._unsafe_view.default}


REGION_META = (compat.inductor.EMPTIED, compat.inductor.ALIKE)
"""Metadata of a region's nodes that compiling it asks for."""

FLEX = (
    "flex_attention runs operator by operator, and has scores of every token with every other in "
    "memory: lowering='inductor' does not fuse it. F.scaled_dot_product_attention has none of them"
)


def with_compiled_regions(gm: fx.GraphModule, root: nn.Module) -> fx.Graph:
    """Copy a program with each of its regions replaced by a call of what compiles it.

    The regions become submodules of ``root``.
    """
    flex = torch.ops.higher_order.flex_attention
    if gm.graph.find_nodes(op="call_function", target=flex):
        logger.warning(FLEX)
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for run in runs(gm):
        if isinstance(run, Region):
            _call_region(run, graph, root, copies)
            continue
        for node in run:  # ours, or nothing but views: not worth a call
            if node.op == "output":
                graph.output(fx.node.map_arg(node.args[0], copies.__getitem__))
            else:
                copies[node] = graph.node_copy(node, copies.__getitem__)
    return graph


@dataclass(frozen=True)
class Region:
    """Nodes of a program that are compiled together, and a graph that computes the same alone.

    It is given ``inputs``, each seen in the shape that ``seen`` has for it if any, and returns
    ``outputs``.  Nobody reads inputs later that are ``donated``, by their positions.
    """

    nodes: Sequence[fx.Node]
    inputs: Sequence[fx.Node]
    seen: Mapping[fx.Node, tuple[int, ...]]
    outputs: Sequence[fx.Node]
    body: fx.Graph
    donated: Sequence[int]
    gm: fx.GraphModule

    @cached_property
    def text(self) -> str:
        """Says what the region computes: regions that are alike have one text."""
        return text_of(self.body, self.donated)

    @cached_property
    def module(self) -> CompiledRegion:
        return CompiledRegion(fx.GraphModule(self.gm, self.body), self.donated)


def runs(gm: fx.GraphModule) -> Iterator[Region | list[fx.Node]]:
    """Yield a program's nodes in order: its regions, and between them what runs by itself."""
    alike = _alike_on_ranks(gm.graph)
    numbers = {node: number for node in gm.graph.nodes if (number := region_of(node)) is not None}
    shared = shared_by_layers(gm.graph.nodes, numbers)
    # In a list, for the iterator that torch has over nodes begins anew when it has ended.
    for number, run in itertools.groupby(list(gm.graph.nodes), region_of):
        nodes = list(run)
        if number is not None and any(map(_computes, nodes)):
            yield _region(gm, nodes, shared, not alike.isdisjoint(nodes))
        else:
            yield nodes


def _alike_on_ranks(graph: fx.Graph) -> set[fx.Node]:
    """Return what several ranks have alike: what is computed of averaged gradients.

    And what whole parameters are written with, back to what ranks have sent each other: weights
    that are normalised before forward, say.  A norm of either, added up in another order, would
    have replicas drift apart by last bits.
    """
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            given = input_role(node)
            is_one = given.kind == "gradient" and not given.sharded and not given.unreduced
        else:
            is_one = node.target in _WHOLE and role(node) == Role.REDUCE_GRADIENT
        if is_one or not found.isdisjoint(node.all_input_nodes):
            found.add(node)

    def onward(node: fx.Node) -> list[fx.Node]:
        is_collective = (
            getattr(node.target, "namespace", "") == "_c10d_functional"
        )  # the step's own
        return [] if ops.rules(node).uniform or is_collective else node.all_input_nodes

    return found.union(reached(filter(_writes_whole_parameter, graph.nodes), onward))


_WHOLE = (ops.all_reduce_start, ops.all_reduce_bucket_start, ops.all_gather_start)
"""Operators whose result several ranks have whole."""


def _writes_whole_parameter(node: fx.Node) -> bool:
    written = written_input(node)
    return written is not None and written.kind == "parameter" and not written.sharded


def _computes(node: fx.Node) -> bool:
    return node.target is not operator.getitem and not aliased_inputs(node)


def _region(
    gm: fx.GraphModule, nodes: list[fx.Node], shared: set[fx.Node], is_alike: bool
) -> Region:
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
    compat.inductor.mark_emptied(values)
    if is_alike:
        compat.inductor.mark_alike(values)
    number = region_of(nodes[0])
    assert number is not None
    # Not what layers share: the region of the last one would be another than those of the others.
    own = [at for at, source in enumerate(inputs) if source not in shared]
    donated = [at for at in own if _dies_in(number, inputs[at])]
    shapes = {}
    for position, source in enumerate(inputs):
        views = _taken_only_as(source, inside, outputs)
        seen = next(iter(views), source)
        if views:
            shapes[source] = tuple(seen.meta["val"].shape)
        local[source] = body.call_function(operator.getitem, (values, position))
        local[source].meta = dict(seen.meta)
        local |= dict.fromkeys(views, local[source])
        if position in donated:
            local[source].name = f"donated_{position}"  # torch's caches go by the code
    for node in nodes:
        if node in local:
            continue
        local[node] = body.node_copy(node, local.__getitem__)
        if node.target in _VIEWS:
            local[node].target = aten.reshape.default
        compat.aot.forget_checkpoints(local[node])
    body.output(tuple(local[node] for node in outputs))
    return Region(nodes, inputs, shapes, outputs, body, donated, gm)


def _call_region(
    region: Region, graph: fx.Graph, root: nn.Module, copies: dict[fx.Node, fx.Node]
) -> None:
    """Call a region's module from a graph that has its inputs' ``copies``; add those of outputs."""
    given = [
        graph.call_function(_seen_as, (copies[source], region.seen[source]))
        if source in region.seen
        else copies[source]
        for source in region.inputs
    ]
    name = f"region_{sum(1 for _ in root.children())}"
    root.add_module(name, region.module)
    # A call of its own: the program's names for the inputs are gone when the region begins.
    box = graph.call_function(_listed, tuple(given))
    call = graph.call_module(name, (box,))
    for position, node in enumerate(region.outputs):
        copies[node] = graph.call_function(operator.getitem, (call, position))


def _taken_only_as(
    source: fx.Node, inside: set[fx.Node], outputs: Sequence[fx.Node]
) -> list[fx.Node]:
    """Return the views that a region takes an input as, if they are one and all that it reads.

    They are of all of its memory, in order: what gives it may lay it out in other dimensions, as a
    product of matrices does, and the region is like others whose input needs no view.
    """
    views = [user for user in source.users if user in inside]
    values = [source.meta.get("val"), *(view.meta.get("val") for view in views)]
    are_plain = all(isinstance(value, torch.Tensor) and not is_symbolic(value) for value in values)
    if not are_plain or not all(value.is_contiguous() for value in values):
        return []
    is_one = len({value.shape for value in values[1:]}) == 1
    are_views = all(view.target in _VIEWS and view not in outputs for view in views)
    return views if is_one and are_views else []


def _dies_in(number: int, source: fx.Node) -> bool:
    """Return whether a region's input is another region's memory that nothing reads later.

    Its views are read by the region that takes them, if at all.  Whatever is no region may read it
    later than it says, as communication does, or keep it.
    """
    maker = source.args[0] if source.target is operator.getitem else source
    if not isinstance(maker, fx.Node) or not isinstance(maker.target, torch._ops.OpOverload):
        return False
    if region_of(maker) is None or aliased_inputs(maker):
        return False
    return all(
        (region := region_of(user)) is not None
        and region <= number
        and (alias is source or region == region_of(alias))
        for user, alias in uses(source)
    )


def _listed(*values: Any) -> list[Any]:
    return list(values)


def _seen_as(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor in another shape, and no view of it: a result may be this one."""
    return without_base(tensor.reshape(shape))


@dataclass
class _Compiled:
    """Runs a region for the inputs that it is compiled for.

    ``copied`` are the results that are copied then, None until it has run.  ``error`` says why
    Inductor could not compile it.
    """

    run: Callable
    holds_for: Callable[[Sequence[Any]], bool]
    copied: list[int] | None = None
    error: str = ""


class CompiledRegion(nn.Module):
    """The compute between two zerofx operators, compiled by Inductor before it first runs.

    With the ``sample`` that was captured, or, where inputs lie otherwise in memory, with the values
    at hand.  That needs no tracing context of the step's own compilation.  Equal regions, as those
    of equal layers, share what has been compiled, if their inputs lie in memory alike.  One of any
    size has inputs ``like`` those, with symbols for sizes: it is compiled once for all, and once
    more for those that this does not hold for.

    One of a single pointwise operator is not compiled: torch's kernel does the same.

    It takes its inputs in a list, which it empties: what forward has saved for backward, and
    nobody reads later, is freed while the region runs and not after it.  Results may take the
    memory of the ``donated`` ones.

    Inductor may leave out an operator that changes nothing, ``x + 0`` or a second ``clone``, and
    return one tensor for two.  Others write to what they take for memory of its own, so it is
    looked up when the region first runs, and copied from then on.
    """

    # By what a region computes, and torch's settings.
    _known: dict[str, list[_Compiled]] = {}

    def __init__(self, gm: fx.GraphModule, donated: Sequence[int]):
        super().__init__()
        self.gm = gm
        values, *nodes = gm.graph.nodes
        captured = [value.meta.get("val") for value in values.users]
        self.of_any_size = any(is_symbolic(node.meta.get("val")) for node in nodes)
        self.like = tuple(map(Like.of, captured)) if self.of_any_size else None
        self.sample = compat.inductor.as_captured(captured) if self.of_any_size else captured
        self.donated = donated  # positions of inputs
        self.is_one_operator = not self.of_any_size and _is_one_operator(gm.graph, donated)
        if self.is_one_operator:
            gm.recompile()
        self.text = text_of(gm.graph, donated)
        # 0.4 ms a region (November 2026).  Not in the text: that is the same on all ranks.
        key = key_of(self.text, repr(compat.inductor.settings()))
        self.compiled = self._known.setdefault(key, [])
        self.found: _Compiled | None = None  # of those, for the last inputs
        self.waits = False  # runs operator by operator until it is taken over
        self.threads: int | None = None  # then with so many at most, beside what compiles it

    @property
    def is_to_compile(self) -> bool:
        """Return whether nothing compiled is known for what was captured."""
        if self.is_one_operator:
            return False
        return self.sample is not None and self._find(self.sample) is None

    def compile_ahead(self, waits: bool = True, turns: contextlib.ExitStack | None = None) -> bool:
        """Compile for what was captured; return False if another one does, unless it waits.

        Its turn is over with ``turns``, or at once.
        """
        assert self.sample is not None
        sample = self.sample
        return _in_turn(
            self.text, waits, turns, lambda: self.compiled.append(self._compile(sample))
        )

    @property
    def inputs(self) -> Sequence[Any] | None:
        """Return the captured inputs, which it is compiled for before it runs; None if unknown."""
        return self.sample

    def forget(self) -> None:
        """Have it compiled once more, for what it has been compiled for last."""
        del self.compiled[-1]

    def take(self) -> None:
        """Run what is compiled from now on."""
        if self.is_to_compile:
            self.compile_ahead()
        self.waits = False

    def __call__(self, values: list[Any]) -> tuple[Any, ...]:
        return self.forward(values)  # past hooks that the user has on all modules

    def forward(self, values: list[Any]) -> tuple[Any, ...]:
        if self.waits:
            with _at_most(self.threads):
                return self.run_operators(values)
        if self.is_one_operator:
            return self.run_operators(values)
        found = self.found
        if found is None or (self.of_any_size and not found.holds_for(values)):
            found = self._find(values)
            if found is None:
                with compat.compile_cache.turn_to_compile(f"{self.text}\n{_layouts(values)}"):
                    found = self._compile(values)
                self.compiled.append(found)
            self.found = found
        if found.copied is None:
            return self._run_first(found, values)
        results = found.run(values)
        if found.copied:
            return tuple(r.clone() if at in found.copied else r for at, r in enumerate(results))
        return results

    def _find(self, values: Sequence[Any]) -> _Compiled | None:
        return next((one for one in self.compiled if one.holds_for(values)), None)

    def _compile(self, values: Sequence[Any]) -> _Compiled:
        """Compile for such inputs; what cannot be compiled runs operator by operator."""
        try:
            return _Compiled(*compiled_region(self.gm, values, self.like, self.donated))
        except Exception as error:
            return self._uncompiled(error)

    def _uncompiled(self, error: Exception) -> _Compiled:
        logger.warning(
            "Inductor cannot compile a region of %d operators, which runs operator by operator from"
            " now on: its results are the same to rounding, and its steps slower. It says: %s: %s",
            sum(map(_computes, self.gm.graph.nodes)),
            type(error).__name__,
            next(iter(str(error).strip().splitlines()), ""),
        )
        trace = "".join(traceback.format_exception(error))
        return _Compiled(self.run_operators, lambda values: True, error=f"{trace}\n{self.gm.code}")

    def run_operators(self, values: list[Any]) -> tuple[Any, ...]:
        return run_operators(self.gm, values)

    def _run_first(self, found: _Compiled, values: list[Any]) -> tuple[Any, ...]:
        """Run, and note which results to copy from now on."""
        # Held, so that no result takes the place of one that is freed meanwhile.
        held = [None if at in self.donated else v for at, v in enumerate(values)]
        results = found.run(values)
        places = [list(map(_place, of)) for of in (held, results)]
        found.copied = shared_unasked(self.gm.graph, *places)
        return tuple(r.clone() if at in found.copied else r for at, r in enumerate(results))


@contextlib.contextmanager
def _at_most(threads: int | None) -> Iterator[None]:
    """Run operators with so many threads at most: each waits for the last of its threads."""
    before = torch.get_num_threads()
    if threads is None or before <= threads:
        yield
        return
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def run_operators(gm: fx.GraphModule, values: list[Any]) -> tuple[Any, ...]:
    """Run a region's graph operator by operator, on inputs in a list, which it empties."""
    inputs = [list(values)]
    values.clear()
    return gm.forward(inputs.pop())  # which lets go of each input behind its last reader


def _is_one_operator(graph: fx.Graph, donated: Sequence[int]) -> bool:
    """Return whether a region computes one thing, which then runs as torch's own operator.

    If inputs are donated, it writes its result to one of them from now on, or it is none.
    """
    operators = [node for node in graph.nodes if node.op == "call_function" and _computes(node)]
    if len(operators) != 1:
        return False
    (node,) = operators
    if not isinstance(node.target, torch._ops.OpOverload) or is_random(node):
        return False
    if node.target not in _ALONE and torch.Tag.pointwise not in node.target.tags:
        return False
    if mutated_inputs(node):
        return False
    if not donated:
        return True
    result, variant = node.meta["val"], _WRITING.get(node.target)
    for source in node.all_input_nodes if variant is not None else ():
        is_input = source.target is operator.getitem and source.args[0].op == "placeholder"
        if not is_input or source.args[1] not in donated:
            continue
        others = [one for one in node.all_input_nodes if one is not source]
        given = source.meta["val"]
        is_alike = _layouts([given]) == _layouts([result]) and given.device == result.device
        if is_alike and not any(source in memory_of(one) for one in others):
            node.target, node.kwargs = variant, {**node.kwargs, "out": source}
            return True
    return False


_ALONE = (aten.embedding.default, aten.native_layer_norm.default)
"""Operators that are one kernel and not pointwise, of which a compiler makes nothing better."""

_WRITING = {
    getattr(aten, name).Tensor: getattr(aten, name).out for name in ("add", "sub", "mul", "div")
}
"""Operators between two tensors -> those that write the result to a third."""


def compiled_region(
    gm: fx.GraphModule, values: Sequence[Any], like: Sequence[Like] | None, donated: Sequence[int]
) -> tuple[Callable, Callable[[Sequence[Any]], bool]]:
    """Compile a region for such values, or with symbols for all that are ``like`` them.

    Returns what runs inputs, in a list, and what tells whether it is for those.
    """
    if like is not None:
        of_any_size = compat.inductor.compile_for_sizes(gm, values, like, donated)
        if of_any_size is not None:
            return of_any_size
    layouts = _layouts(values)
    run = compat.inductor.compile_with_inductor(gm, [list(values)], donated)
    return run, lambda others: _layouts(others) == layouts


def _in_turn(
    text: str, waits: bool, turns: contextlib.ExitStack | None, compile_it: Callable[[], object]
) -> bool:
    """Compile something unless another process does; return whether this one has.

    The turn is over with ``turns``, or at once.
    """
    with contextlib.ExitStack() as own:
        turn = compat.compile_cache.turn_to_compile(text, waits)
        is_mine = (turns or own).enter_context(turn)
        if is_mine:
            compile_it()
    return is_mine


class KernelAhead:
    """An update's kernel that is compiled before the program first runs, with its regions."""

    def __init__(self, kernel: CompiledForAnyLength, inputs: Sequence[Any]) -> None:
        self.kernel, self.inputs = kernel, inputs
        self.text = kernel.text(inputs)

    @classmethod
    def all_of(cls, ask: Callable[[], object]) -> list[KernelAhead]:
        """Return the kernels that would be compiled while something asks for them."""
        found: dict[str, KernelAhead] = {}

        def later(kernel: CompiledForAnyLength, inputs: Sequence[Any]) -> bool:
            one = cls(kernel, inputs)
            found.setdefault(one.text, one)
            return True

        token = compat.inductor.AT_ONCE.set(later)
        try:
            ask()
        finally:
            compat.inductor.AT_ONCE.reset(token)
        return list(found.values())

    def compile_ahead(self, waits: bool = True, turns: contextlib.ExitStack | None = None) -> bool:
        """Compile it; return False if another process does, unless it waits.

        What fails is left to its first run.
        """

        def compile_it() -> None:
            with contextlib.suppress(Exception):
                self.kernel.compile(self.inputs)

        return _in_turn(self.text, waits, turns, compile_it)

    def forget(self) -> None:
        """Have it compiled once more."""
        self.kernel.forget(self.inputs)


def compile_regions(
    program: nn.Module, kernels: Sequence[KernelAhead] = ()
) -> Iterator[CompiledRegion | KernelAhead]:
    """Compile each distinct region of a program, and ``kernels``, before it runs.

    The processes of a machine that need the same regions divide them among themselves: each takes
    the largest that no other one is compiling, and at last finds in Inductor's cache what others
    have compiled.  Yields each that this process has come to: its C++ is compiled with that of
    those that follow.
    """
    left: list[CompiledRegion | KernelAhead] = [*to_compile(program), *kernels]
    if any(compat.inductor.is_on_cpu(value) for one in left for value in one.inputs or ()):
        compat.inductor.prepare()  # others compile meanwhile, and wait for no region of this one
    while left:
        mine = []
        with contextlib.ExitStack() as turns:
            for one in _compiled_together(left, turns):
                mine.append(one)
                yield one
        if not mine:  # others are compiling all that are left
            mine = left[:1]
            mine[0].compile_ahead()
            yield mine[0]
        left = [one for one in left if one not in mine]


def _compiled_together(
    left: Sequence[CompiledRegion | KernelAhead], turns: contextlib.ExitStack
) -> Iterator[CompiledRegion | KernelAhead]:
    """Compile what no other process does, and at the end its C++ kernels together.

    On its share of the cores: of what is all its own, on all of them.
    """
    mine: list[CompiledRegion | KernelAhead] = []
    try:
        with compat.cpp_kernels.kernels_together() as kernels:
            for one in left:
                if one.compile_ahead(waits=False, turns=turns):
                    mine.append(one)
                    yield one
            kernels.at_once = max(1, num_cores() * len(mine) // len(left))
    except BaseException as error:
        for one in mine:
            one.forget()
        if not isinstance(error, Exception):  # interrupted
            raise
        for one in mine:  # a kernel has failed, and of which one it does not say
            one.compile_ahead()


def num_cores() -> int:
    """Return the number of processor cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def to_compile(program: nn.Module) -> list[CompiledRegion]:
    """Return the first of each distinct region that is not yet compiled, largest first."""
    regions = [child for child in program.children() if isinstance(child, CompiledRegion)]
    distinct = {
        region.text: region
        for region in reversed(regions)
        if region.is_to_compile and not region.waits
    }
    return sorted(distinct.values(), key=lambda one: len(one.gm.graph.nodes), reverse=True)


def errors_of(program: nn.Module) -> dict[str, str]:
    """Return what Inductor says of each distinct region that it could not compile, by its name."""
    names: dict[str, str] = {}
    for name, region in program.named_children():
        if isinstance(region, CompiledRegion):
            for one in region.compiled:
                names.setdefault(one.error, name)
    return {name: error for error, name in names.items() if error}


def _place(value: Any) -> int | None:
    """Return the address of a tensor's memory; None for one without any."""
    if not isinstance(value, torch.Tensor) or not value.untyped_storage().nbytes():
        return None
    return value.untyped_storage().data_ptr()


def shared_unasked(
    graph: fx.Graph, given: Sequence[Hashable], returned: Sequence[Hashable]
) -> list[int]:
    """Return which results are in memory of an input or another result that they are no views of.

    ``given`` and ``returned`` tell the memory of a region's inputs and results, None if there is
    none.
    """
    owners: dict[Hashable, set[fx.Node]] = {}
    for node in graph.nodes:
        if node.target is operator.getitem and node.args[0].op == "placeholder":
            owners.setdefault(given[node.args[1]], set()).add(node)
    found = []
    for at, (node, place) in enumerate(zip(graph.output_node().args[0], returned, strict=True)):
        there = owners.setdefault(place, set())
        # Not what is several tensors, in memory of their own: results, or the region's inputs.
        origins = {n for n in memory_of(node) if isinstance(n.meta.get("val"), torch.Tensor)}
        if place is not None and there and there.isdisjoint(origins):
            found.append(at)
        else:
            there |= origins
    return found


def text_of(graph: fx.Graph, donated: Sequence[int]) -> str:
    """Return all that compiling a region depends on, without names: the same for equal regions."""
    number = {node: f"%{position}" for position, node in enumerate(graph.nodes)}
    lines = []
    for node in graph.nodes:
        call = node.op if node.op == "placeholder" else call_text(node, number.__getitem__)
        lines.append(f"{call} {layout_text(node.meta.get('val'))}")
    lines.append(str(donated))
    values = next(iter(graph.nodes))
    return "\n".join(
        [*lines, compat.inductor.ALIKE] if compat.inductor.ALIKE in values.meta else lines
    )


def _layouts(values: Sequence[Any]) -> list[Any]:
    return [
        (value.dtype, value.shape, value.stride()) if isinstance(value, torch.Tensor) else value
        for value in values
    ]
